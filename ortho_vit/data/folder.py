"""A user's own pictures: a folder with one folder for each class.

Pictures are decoded when their batch is made, by workers if there are any: at 224 pixels even a small set is
too large to hold.  A picture that cannot be read stops training and evaluation with its name, and is left
out, with a warning and a count, in prediction.
"""

import os
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ortho_vit.data.augment import AutoAugment, AutoAugmentPolicy, normalize, random_flip
from ortho_vit.data.datamodule import ImageDataModule
from ortho_vit.data.picture import SUFFIXES, centre_box, decode, random_box, resized
from ortho_vit.data.rng import uniform
from ortho_vit.data.sampling import Key, Loader

Received = tuple[
    Tensor, list[int], list[str]
]  # images, which samples they are, what was wrong with the others


class PictureSet(Dataset[Any]):
    """Files, decoded on demand; indexed by a `Key`, it makes the whole batch, without the files that cannot
    be read.

    What was wrong travels with the batch, to be dealt with in the main process: an exception that leaves a
    worker arrives wrapped in a page of traceback.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        labels: NDArray[np.int64],
        *,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        crop: bool = False,
        flip: bool = False,
        autoaugment: bool = False,
        seed: int = 0,
    ) -> None:
        self.paths, self.labels, self.image_size, self.mean, self.std = paths, labels, image_size, mean, std
        self.crop, self.flip, self.seed = crop, flip, seed
        self.policy = AutoAugment(AutoAugmentPolicy.IMAGENET) if autoaugment else None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, key: Key) -> Received:
        noise = uniform(self.seed, "augment", key.epoch, key.samples, 5 + AutoAugment.columns)
        pixels, good, failures = [], [], []
        for position, sample in enumerate(key.samples.tolist()):
            try:
                pixels.append(self._pixels(self.paths[sample], noise[position]))
                good.append(position)
            except ValueError as error:
                failures.append(str(error))
        if not good:
            return torch.empty(0, 3, self.image_size, self.image_size), [], failures
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
        if self.flip:
            images = random_flip(images, noise[good, 4])
        images = normalize(images, self.mean, self.std).contiguous()
        return images, key.samples[good].tolist(), failures

    def names(self, samples: NDArray[np.int64]) -> list[str]:
        """Their files."""
        return [str(self.paths[sample]) for sample in samples]

    def _pixels(self, path: Path, noise: NDArray[np.float64]) -> NDArray[np.uint8]:
        picture = decode(path)
        box = random_box(*picture.size, noise[:4]) if self.crop else centre_box(*picture.size)
        picture = resized(picture, self.image_size, box)
        if self.policy is not None:
            picture = self.policy.image(picture, noise[5:])
        return np.asarray(picture)


class ImageFolder(ImageDataModule):
    """Pictures in `root/train/<class>/`, with `root/val/<class>/` and `root/test/<class>/` if they exist.

    Without a folder `train`, the classes lie in `root` itself.  Without a folder `val`, `val_size` of the
    training pictures are held out by seed; without a folder `test`, `test` uses the validation pictures.  Any
    mode (grey, palette, transparent, CMYK, 16 bits) is converted to RGB.

    Args:
        root: the folder.
        image_size: side of the square the network sees.  Training takes a random part of the picture (with
            `crop`), evaluation the central square of 7/8 of the shorter side; each is resized to it.
        predict_root: a folder of pictures for `predict`, with or without folders in it, or one picture;
            without it the test pictures.  Predicted names are relative to it, and pictures left out are
            listed in `skipped`.
        mean, std: of the pixels in [0, 1], by which pictures are normalised; by default ImageNet's.
        crop: random parts in training, of 8 % to 100 % of the area.
        flip: mirror half of the training pictures.
        autoaugment: apply AutoAugment's ImageNet policy to training pictures.
        num_workers: processes that decode, in training and evaluation alike.
        batch_size, val_size, limit, seed: see `ImageDataModule`.
    """

    predict_set: PictureSet | None = None

    def __init__(
        self,
        root: str = "data",
        *,
        image_size: int = 224,
        predict_root: str | None = None,
        mean: tuple[float, float, float] = (0.485, 0.456, 0.406),
        std: tuple[float, float, float] = (0.229, 0.224, 0.225),
        batch_size: int = 64,
        num_workers: int = 0,
        crop: bool = True,
        flip: bool = True,
        autoaugment: bool = False,
        val_size: int | float = 0.1,
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            batch_size=batch_size, num_workers=num_workers, val_size=val_size, limit=limit, seed=seed
        )
        self._require(image_size >= 1, f"image_size must be at least 1, got {image_size}")
        self._require(len(mean) == len(std) == 3, f"mean and std must have 3 numbers, got {mean} and {std}")
        self._require(min(std) > 0, f"std must be positive, got {std}")
        self.root, self.image_size, self.mean, self.std = Path(root), image_size, tuple(mean), tuple(std)
        self.predict_root = Path(predict_root) if predict_root is not None else None
        self.crop, self.flip, self.autoaugment = crop, flip, autoaugment
        self.skipped: list[str] = []

    def _part(self, name: str) -> Path | None:
        return self.root / name if (self.root / name).is_dir() else None

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the class folders, sorted: label i is the i-th."""
        folder = self._part("train") or self.root
        names = _folders(folder) if folder.is_dir() else []
        self._require(
            not {"val", "test"} & set(names),
            f"{folder} has a folder val or test, but no folder train beside it",
        )
        if not names:
            raise FileNotFoundError(
                f"ImageFolder: no class folders in {folder.absolute()}; put the pictures into one for each class, "
                f"{self.root}/train/<class>/ or {self.root}/<class>/"
            )
        self._require(len(names) > 1, f"{folder} has one class only, {names[0]!r}; put a second beside it")
        return tuple(names)

    def _scan(self, folder: Path) -> tuple[list[Path], NDArray[np.int64]]:
        """All pictures below a folder of classes, sorted, and their labels."""
        classes = self.classes  # first of all: it knows what to say where there are none
        unknown = sorted(set(_folders(folder)) - set(classes))
        self._require(
            not unknown, f"{folder} has the class {unknown[:1]}, which the training pictures have not"
        )
        paths: list[Path] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            found = _files(folder / name)
            for path in found:
                self._require(
                    path.suffix.lower() in SUFFIXES, f"{path} is not a picture; take it out of the folder"
                )
            paths += found
            labels += [label] * len(found)
        if not paths:
            raise FileNotFoundError(f"ImageFolder: no pictures in {folder.absolute()}; put some there")
        return paths, np.array(labels, dtype=np.int64)

    def _load(self, stage: str | None) -> None:
        if stage in (None, "fit", "validate", "test") and self.train_set is None:
            self._setup_labelled()
        if stage == "predict" and self.predict_set is None:
            folder = self.predict_root or self._part("test") or self.root
            paths = [folder] if folder.is_file() else _files(folder)
            if not paths:
                raise FileNotFoundError(f"ImageFolder: no pictures in {folder.absolute()}; put some there")
            self.predict_root = folder.parent if folder.is_file() else folder
            self.predict_set = self._set(paths, np.zeros(len(paths), np.int64), np.arange(len(paths)))

    def _setup_labelled(self) -> None:
        paths, labels = self._scan(self._part("train") or self.root)
        empty = [name for label, name in enumerate(self.classes) if label not in labels]
        self._require(
            not empty, f"the class {empty[:1]} has no pictures to train on; put some there, or take it out"
        )
        if folder := self._part("val"):
            others = self._scan(folder)
            training, validation = np.arange(len(paths)), np.arange(len(others[0]))
        else:
            others = paths, labels
            training, validation = self._split(labels)
        self.train_set = self._set(paths, labels, training, augmented=True)
        self.val_set = self._set(*others, validation)
        if folder := self._part("test"):
            others = self._scan(folder)
            self.test_set = self._set(*others, np.arange(len(others[0])))
        else:
            self.test_set = self.val_set

    def _set(
        self,
        paths: list[Path],
        labels: NDArray[np.int64],
        rows: NDArray[np.int64],
        *,
        augmented: bool = False,
    ) -> PictureSet:
        rows = self._limited(rows, labels)
        return PictureSet(
            [paths[row] for row in rows],
            labels[rows],
            image_size=self.image_size,
            mean=self.mean,
            std=self.std,
            crop=self.crop and augmented,
            flip=self.flip and augmented,
            autoaugment=self.autoaugment and augmented,
            seed=self.seed,
        )

    def _batches(self, dataset: PictureSet, train: bool = False) -> Loader:
        labels = torch.from_numpy(dataset.labels)

        def receive(received: Received) -> tuple[Tensor, Tensor]:
            images, samples, failures = received
            if failures:
                raise ValueError(f"ImageFolder: {failures[0]}; mend it or take it out of the folder")
            return images, labels[samples]

        return self._loader(dataset, train=train, num_workers=self.num_workers, receive=receive)

    def predict_dataloader(self) -> Loader:
        """Batches of `(images, names)`; pictures that cannot be read are missing from them and listed in
        `skipped`.
        """
        dataset, root = self._ready(self.predict_set, "predict"), self.predict_root
        self.skipped = []

        def receive(received: Received) -> tuple[Tensor, list[str]] | None:
            images, samples, failures = received
            self.skipped += failures
            for failure in failures:
                warnings.warn(f"ImageFolder: {failure}; skipped", stacklevel=2)
            return (
                (images, [str(dataset.paths[sample].relative_to(root)) for sample in samples])
                if samples
                else None
            )

        return self._loader(dataset, num_workers=self.num_workers, receive=receive)

    def teardown(self, stage: str | None = None) -> None:
        super().teardown(stage)
        if stage == "predict" and self.skipped and self.predict_set is not None:
            total = len(self.predict_set)
            warnings.warn(f"ImageFolder: skipped {len(self.skipped)} of {total} pictures", stacklevel=2)


def _folders(folder: Path) -> list[str]:
    return sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )


def _files(folder: Path) -> list[Path]:
    """All files below a folder, sorted, but for hidden ones."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())
