"""A user's own images: a folder with one folder for each class, or images without labels.

Images are decoded batch by batch, in workers if there are any: at 224 pixels even a small set does not fit in memory.
The headers of all files are checked at the start, so that bad files are reported before training; a file that still
cannot be decoded stops training or evaluation with an error that names it.  With `skip_unreadable`, and in prediction,
such files are skipped, with a warning and a count.
"""

import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Resampling
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ortho_vit.data.datamodule import ImageDataModule
from ortho_vit.data.decode import (
    CROP_PCT,
    SUFFIXES,
    as_tensor,
    central_square,
    decode,
    random_box,
    why_unreadable,
)
from ortho_vit.data.policies import AutoAugmentPolicy
from ortho_vit.data.rng import uniform
from ortho_vit.data.sampling import Batch, BatchSet, Key, Loader
from ortho_vit.files import printable

SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
LIKE_A_SPLIT = {*SPLITS["train"], *SPLITS["val"], *SPLITS["test"], "dev", "eval", "evaluation", "holdout"}
JUNK = {  # made by operating systems and archive programs
    "__macosx", "@eadir", "lost+found", "$recycle.bin", "system volume information", "thumbs.db", "desktop.ini",
}  # fmt: skip
CROP_COLUMNS = 4  # random numbers for the crop of an image
SHOWN = 5  # at most this many files or folders are named in a message


# ------------------------------------------------------------------------------------------------------- what is there


def find_files(folder: Path) -> tuple[list[Path], list[str]]:
    """The files below a folder, sorted, and what was skipped, with reasons.  Hidden entries count as neither.

    Links to folders are not followed: they may form cycles.
    """
    paths: list[Path] = []
    skipped: list[str] = []
    for parent, folders, names in os.walk(folder):
        entries = [Path(parent, name) for name in folders + names if not name.startswith(".")]
        reasons = {path: reason for path in entries if (reason := _why_skipped(path))}
        skipped += [f"{path}: {reason}" for path, reason in reasons.items()]
        paths += [path for path in entries if path not in reasons and path.is_file()]
        folders[:] = [path.name for path in entries if path not in reasons and path.is_dir()]  # to walk
    return sorted(paths), skipped


def _why_skipped(path: Path) -> str | None:
    if path.is_symlink() and not path.is_file():
        return "a link to a folder" if path.is_dir() else "a dangling link"
    if path.name.lower() in JUNK:
        return "made by the operating system"
    return None if path.is_file() or path.is_dir() else "not a regular file"


def folders_in(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted, without hidden ones and junk."""
    names = (entry.name for entry in folder.iterdir() if entry.is_dir())
    return sorted(name for name in names if not name.startswith(".") and name.lower() not in JUNK)


def looks_like_a_split(name: str) -> bool:
    """Whether a folder's name is usual for a part of a data set: `Test`, `test_set`, `val2`, `validation-images`."""
    words = re.split(r"[^a-z]+", name.lower())
    rest = {"", "set", "data", "images", "split", "dataset", "folder", "imgs", "img"}
    return words[0] in LIKE_A_SPLIT and set(words[1:]) <= rest


def _some(items: Sequence[str]) -> str:
    """The first few items as a text."""
    more = f"; and {len(items) - SHOWN:,} more" if len(items) > SHOWN else ""
    return "; ".join(items[:SHOWN]) + more


# ------------------------------------------------------------------------------------------------------------ data sets


@dataclass(eq=False)
class FileSet(BatchSet):
    """Image files, decoded on demand to squares of uint8; files that cannot be read are left out of their batch.

    Args:
        crop: take random parts of the images, instead of the central square.
        channels: 3, or 1 to convert to grey.
    """

    paths: Sequence[Path]
    image_size: int
    crop: bool
    crop_pct: float
    channels: int
    seed: int

    def __getitem__(self, key: Key) -> Batch:
        noise = uniform(self.seed, "augment", key.epoch, key.samples, CROP_COLUMNS)
        images, good, failures = [], [], []
        for position, sample in enumerate(key.samples.tolist()):
            try:
                images.append(self._pixels(self.paths[sample], noise[position]))
                good.append(position)
            except ValueError as error:
                failures.append(str(error))
        shape = (len(images), self.channels, self.image_size, self.image_size)
        pixels = torch.stack(images) if images else torch.empty(shape, dtype=torch.uint8)
        samples = key.samples[good]
        return Batch(pixels, torch.from_numpy(self.labels[samples]), Key(key.epoch, samples), failures)

    def _pixels(self, path: Path, noise: NDArray[np.float64]) -> Tensor:
        image, size = decode(path), self.image_size
        if self.crop:
            image = image.resize((size, size), Resampling.BICUBIC, box=random_box(*image.size, noise))
        else:
            image = central_square(image, size, self.crop_pct)
        return as_tensor(image, self.channels)

    def names(self, samples: NDArray[np.int64]) -> list[str]:
        """The files of the samples."""
        return [str(self.paths[sample]) for sample in samples]


class ImageFolder(ImageDataModule):
    """Images in `root/train/<class>/`, with `root/val/<class>/` and `root/test/<class>/` if they exist.

    The three may also be called training, valid or validation, and testing, in upper or lower case.  Without
    a folder for training, the classes lie in `root` itself.  Without one for validation, `val_size` of the
    training images are held out by seed; without one for testing, `test` uses the validation images.  Any
    mode (grey, palette, transparent, CMYK, 16 bits) is converted to RGB.

    Args:
        root: the folder.
        image_size: side of the square input of the network.  Training crops a random part of the image (with
            `crop`) and resizes it; evaluation resizes the shorter side to `image_size / crop_pct` and takes
            the centre.
        crop_pct: see `image_size`; the default is the usual one for ImageNet.
        predict_root: a folder of images for `predict`, with or without folders in it, or one image; without
            it the test images.  Predicted names are relative to it, and images left out are listed in
            `skipped`.
        skip_unreadable: train and evaluate without the files that are not images or are damaged, instead of
            stopping with a list of them.
        class_names: class names that differ from the names of their folders, as in `{red_apple: apple}`:
            weights trained on the class `apple` can then be used with the images in `red_apple`.
        mean, std: of the pixels in [0, 1], by which images are normalised; by default ImageNet's.
        crop: random crops in training, of 8 % to 100 % of the area.
        flip: mirror half of the training images.
        num_workers: processes that decode, in training and evaluation alike.
        batch_size, kwargs: see `ImageDataModule`.
    """

    autoaugment_policy = AutoAugmentPolicy.IMAGENET
    predict_set: FileSet | None = None

    def __init__(
        self,
        root: str = "data",
        *,
        image_size: int = 224,
        crop_pct: float = CROP_PCT,
        predict_root: str | None = None,
        skip_unreadable: bool = False,
        class_names: dict[str, str] | None = None,
        mean: tuple[float, float, float] = (0.485, 0.456, 0.406),
        std: tuple[float, float, float] = (0.229, 0.224, 0.225),
        batch_size: int = 64,
        crop: bool = True,
        flip: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, **kwargs)
        self._require(image_size >= 1, f"image_size must be at least 1, got {image_size}")
        self._require(0 < crop_pct <= 1, f"crop_pct must be in (0, 1], got {crop_pct}")
        self._require(len(mean) == len(std) == 3, f"mean and std must have 3 numbers, got {mean} and {std}")
        self._require(min(std) > 0, f"std must be positive, got {std}")
        self.root, self.image_size, self.crop_pct = Path(root), image_size, crop_pct
        self.mean, self.std, self.crop, self.flip = tuple(mean), tuple(std), crop, flip
        self.predict_root = Path(predict_root) if predict_root is not None else None
        self.skip_unreadable = skip_unreadable
        self.class_names = {str(folder): str(name) for folder, name in (class_names or {}).items()}
        self.skipped: list[str] = []
        self._not_files: list[str] = []  # of prediction: dangling links and the like

    # ---- what is there

    @cached_property
    def parts(self) -> dict[str, Path]:
        """The folders for "train", "val" and "test" that exist, whatever their case."""
        names = folders_in(self.root) if self.root.is_dir() else []
        parts: dict[str, Path] = {}
        for part, known in SPLITS.items():
            found = [name for name in names if name.lower() in known]
            self._require(
                len(found) < 2, f"{self.root} has {' and '.join(found)}, both for {part}; keep one of them"
            )
            if found:
                parts[part] = self.root / found[0]
        others = any(not looks_like_a_split(name) for name in names)
        if others and "train" in parts and not folders_in(parts["train"]):
            del parts["train"]  # it is a class, like buses and ships
        return parts

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the classes, sorted: label i is the i-th."""
        return tuple(self._class_folders)

    @cached_property
    def _class_folders(self) -> dict[str, str]:
        """The folder of each class, by the name of the class, sorted by it."""
        folder = self.parts.get("train", self.root)
        if not folder.is_dir():
            kind = "is not a folder" if folder.exists() else "does not exist"
            raise FileNotFoundError(f"ImageFolder: {folder.absolute()} {kind}; set data.root to your folder")
        self._check_parts()
        names = folders_in(folder)
        if not names:
            raise FileNotFoundError(
                f"ImageFolder: no class folders in {folder.absolute()}; put the images into one for each class, "
                f"{self.root}/train/<class>/ or {self.root}/<class>/"
            )
        self._require(len(names) > 1, f"{folder} has one class only, {names[0]!r}; put a second beside it")
        unknown = sorted(set(self.class_names) - set(names))
        self._require(
            not unknown,
            f"class_names has {unknown[:1]}, which is not a class folder of {folder}: {_some(names)}",
        )
        folders: dict[str, str] = {}
        for name in names:
            label = self.class_names.get(name, name)
            self._require(
                label not in folders,
                f"class_names gives {folders.get(label)!r} and {name!r} the same name, {label!r}; put their images together",
            )
            folders[label] = name
        return dict(sorted(folders.items()))

    def _check_parts(self) -> None:
        """Refuse folders that are probably parts of the data set, but would be taken for classes or ignored."""
        used = {"train", *(path.name for path in self.parts.values())}
        stray = [name for name in folders_in(self.root) if looks_like_a_split(name) and name not in used]
        if stray:
            raise ValueError(
                f"ImageFolder: {self.root} has the folder {stray[0]!r}, which looks like a part of the data set; "
                "call it train, val or test, or another name if it is a class"
            )
        if "train" not in self.parts and self.parts:
            names = " and ".join(path.name for path in self.parts.values())
            raise ValueError(
                f"ImageFolder: {self.root} has the folder {names}, but no folder train beside it; add it, or "
                "choose another name if it is a class"
            )

    @property
    def source(self) -> str:
        texts = [f"in {self.root.absolute()}"]
        if self.train_set is not None and "val" not in self.parts and len(self.val_set):
            texts.append("validation held out of training")
        if "train" in self.parts:
            used = {path.name for path in self.parts.values()}
            ignored = [name for name in folders_in(self.root) if name not in used]
            texts += [f"ignored folders: {_some(ignored)}"] if ignored else []
        return "; ".join(texts + self._skipped_summary())

    def _skipped_summary(self) -> list[str]:
        return [f"skipped {len(self.skipped):,}: {_some(self.skipped)}"] if self.skipped else []

    def describe(self) -> str:
        if self.predict_set is None or self.train_set is not None:
            return super().describe()
        found = f"{type(self).__name__}: {len(self.predict_set):,} images to predict in {self.predict_root}"
        return printable("; ".join([found, *self._skipped_summary()]))

    def _scan(self, folder: Path) -> tuple[list[Path], NDArray[np.int64]]:
        """All images below a folder of classes, sorted, and their labels."""
        classes = self.classes  # first, as it raises an error that helps if there are none
        unknown = sorted(set(folders_in(folder)) - set(self._class_folders.values()))
        self._require(
            not unknown, f"{folder} has the class {unknown[:1]}, which the training images do not have"
        )
        junk = [path for path in folder.iterdir() if path.name.lower() in JUNK]
        self.skipped += [f"{path}: made by the operating system" for path in junk]
        loose = sorted(
            path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file()
        )
        self.skipped += [f"{path}: not in the folder of a class" for path in loose]
        paths: list[Path] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            found, skipped = find_files(folder / self._class_folders[name])
            self.skipped += skipped
            paths += found
            labels += [label] * len(found)
        if not paths:
            raise FileNotFoundError(f"ImageFolder: no images in {folder.absolute()}; put some there")
        return self._readable(paths, labels)

    def _readable(self, paths: list[Path], labels: list[int]) -> tuple[list[Path], NDArray[np.int64]]:
        """The files that are images, by their headers.  The others raise an error, or a warning with `skip_unreadable`."""
        console = Console(stderr=True)
        bar = (
            track(paths, "checking images", console=console, transient=True) if console.is_terminal else paths
        )
        bad = {path: reason for path in bar if (reason := why_unreadable(path))}
        reasons = list(bad.values())
        if bad and not self.skip_unreadable:
            raise ValueError(self._refusal(reasons))
        if bad:
            self.skipped += reasons
            text = f"ImageFolder: skipped {len(bad):,} of {len(paths):,} files: {_some(reasons)}"
            warnings.warn(printable(text), stacklevel=2)
        good = [i for i, path in enumerate(paths) if path not in bad]
        return [paths[i] for i in good], np.array(labels, dtype=np.int64)[good]

    def _refusal(self, reasons: Sequence[str]) -> str:
        them = "it" if len(reasons) == 1 else "them"
        remedy = f"repair or remove {them}, or set data.skip_unreadable to leave {them} out"
        return printable(f"ImageFolder: {_some(reasons)}; {remedy}")

    # ---- sets

    def _load(self, stage: str | None) -> None:
        if stage in (None, "fit", "validate", "test") and self.train_set is None:
            self._setup_labelled()
        if stage == "predict" and self.predict_set is None:
            self._setup_prediction()

    def _setup_labelled(self) -> None:
        self.skipped = []
        paths, labels = self._scan(self.parts.get("train", self.root))
        empty = [name for label, name in enumerate(self.classes) if label not in labels]
        self._require(
            not empty, f"the class {empty[:1]} has no images to train on; put some there, or take it out"
        )
        if folder := self.parts.get("val"):
            self.train_set = self._set(paths, labels, train=True)
            self.val_set = self._set(*self._scan(folder))
        else:
            training, validation = self._split(labels)
            self.train_set = self._set(paths, labels, training, train=True)
            self.val_set = self._set(paths, labels, validation)
        folder = self.parts.get("test")
        self.test_set = self._set(*self._scan(folder)) if folder else self.val_set

    def _setup_prediction(self) -> None:
        folder = self.predict_root or self.parts.get("test")
        if folder is None and self.root.exists():
            raise ValueError(
                f"ImageFolder: {self.root} has no folder test, and the model was trained on its other images; set "
                f"data.predict_root to a folder of images, or to {self.root} to predict the training images"
            )
        folder = folder or self.root
        if not folder.exists():
            raise FileNotFoundError(f"ImageFolder: {folder.absolute()} does not exist; set data.predict_root")
        paths, self._not_files = ([folder], []) if folder.is_file() else find_files(folder)
        if not paths:
            raise FileNotFoundError(f"ImageFolder: no images in {folder.absolute()}; put some there")
        self.skipped = list(self._not_files)
        self.predict_root = folder.parent if folder.is_file() else folder
        self.predict_set = self._set(paths, np.zeros(len(paths), np.int64))

    def _set(
        self,
        paths: list[Path],
        labels: NDArray[np.int64],
        rows: NDArray[np.int64] | None = None,
        *,
        train: bool = False,
    ) -> FileSet:
        """The set of some rows, by default of all."""
        rows = self._limited(np.arange(len(paths)) if rows is None else rows, labels)
        return FileSet(
            labels[rows],
            self._augmentation(train, flip=self.flip, crop_columns=CROP_COLUMNS),
            paths=[paths[row] for row in rows],
            image_size=self.image_size,
            crop=self.crop and train,
            crop_pct=self.crop_pct,
            channels=self.channels,
            seed=self.seed,
        )

    # ---- loaders

    def _batches(self, dataset: FileSet, train: bool = False) -> Loader:
        def receive(batch: Batch) -> tuple[Tensor, Tensor]:
            if batch.failures and not (self.skip_unreadable and len(batch.images)):
                raise ValueError(self._refusal(batch.failures))
            self._warn(batch.failures)
            return batch.images, batch.labels

        return self._loader(dataset, train=train, num_workers=self.num_workers, receive=receive)

    def predict_dataloader(self) -> Loader:
        """Batches of `(images, names)`, without the images that cannot be read, which are listed in `skipped`."""
        dataset = self._ready(self.predict_set, "predict")
        self.skipped = list(self._not_files)

        def receive(batch: Batch) -> tuple[Tensor, list[str]] | None:
            self.skipped += batch.failures
            self._warn(batch.failures)
            names = [str(dataset.paths[i].relative_to(self.predict_root)) for i in batch.key.samples]
            return (batch.images, names) if names else None

        return self._loader(dataset, num_workers=self.num_workers, receive=receive)

    def _warn(self, failures: Sequence[str]) -> None:
        for failure in failures:
            warnings.warn(printable(f"ImageFolder: {failure}; skipped"), stacklevel=3)

    def teardown(self, stage: str | None = None) -> None:
        super().teardown(stage)
        if stage == "predict" and self.skipped and self.predict_set is not None:
            total = len(self.predict_set) + len(self._not_files)
            warnings.warn(f"ImageFolder: skipped {len(self.skipped)} of {total} images", stacklevel=2)


class UnlabelledImages(ImageFolder):
    """All images below a folder, or one image, cropped and resized for a model that has its classes already.

    Args:
        folder: the folder, with or without folders in it, or one image.  Files that cannot be read are left
            out, with a warning and a count.
        classes: the names of the model's classes, in their order.
        image_size: side of the square the network sees.
        mean, std: of the pixels in [0, 1], with which the model was trained: one number for grey, or three.
        crop_pct: the shorter side is resized to `image_size / crop_pct`, and the centre is taken.
        share: the old name of `crop_pct`.
        batch_size, num_workers: see `ImageDataModule`.
    """

    def __init__(
        self,
        folder: str,
        *,
        classes: list[str],
        image_size: int,
        mean: list[float],
        std: list[float],
        crop_pct: float = 1.0,
        share: float | None = None,
        batch_size: int = 64,
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            image_size=image_size,
            crop_pct=crop_pct if share is None else share,
            predict_root=folder,
            batch_size=batch_size,
            num_workers=num_workers,
        )
        self._require(
            len(mean) == len(std) and len(mean) in (1, 3),
            f"mean and std must have 1 or 3 numbers, got {mean} and {std}",
        )
        self.classes = tuple(classes)
        self.mean, self.std, self.channels = tuple(mean), tuple(std), len(mean)
