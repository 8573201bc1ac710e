"""What the data modules share: arguments, loaders, splits, and sets held in memory.

Batches are `(images, labels)`: normalised float32 `(B, C, H, W)` and int64 `(B,)`, or probabilities `(B, classes)` in
training with mixup or cutmix; `predict` has batches `(images, names)`.  The validation set is held out of the training set
by seed; the test set is for `test` and `predict` only.

A data module also works without a trainer: `data.prepare_data(); data.setup("fit"); data.train_dataloader()`.  Batches
are then on the CPU; while a trainer runs they are augmented on its device.
"""

import hashlib
import math
import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from numpy.typing import NDArray
from torch import Tensor

from ortho_vit.data.augment import Augmentation
from ortho_vit.data.policies import AutoAugmentPolicy, PolicyName, make_policy
from ortho_vit.data.rng import hold_out
from ortho_vit.data.sampling import Batch, BatchSet, EpochSampler, Key, Loader, take
from ortho_vit.files import printable

NAMED_CLASSES = 10  # at most this many are named in a description


class ImageDataModule(L.LightningDataModule):
    """The arguments and the loaders of every data module.

    Args:
        batch_size: images per batch and process.
        num_workers: processes that prepare training batches; 0 prepares them in the training process.  The
            batches do not depend on it.
        val_size: how much of the training set to hold out for validation: a count, or a share below 1.  With 0
            there is no validation.
        limit: use at most this many images of each set, for a quick look.
        seed: determines the splits, the order of the training set and its augmentation.
        augment: policy of random operations for training images: "autoaugment", "randaugment" or
            "trivialaugment".
        autoaugment: the same as `augment: autoaugment`.
        random_erasing: probability that a random box of a training image is replaced by the mean colour.
        mixup: the α of mixup, 0 for none.  Each training batch is averaged with itself in reverse order, images
            and labels.
        cutmix: the α of cutmix, 0 for none.  A box of each image is taken from its partner in the reversed batch.
            With both, each batch uses one of the two with equal probability.
    """

    classes: Sequence[str]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int
    channels: int = 3
    crop_pct: float = 1.0  # share of the shorter side that evaluation keeps, as in timm
    autoaugment_policy = AutoAugmentPolicy.CIFAR10
    train_set: Any = None  # set by `setup`, as the next two
    val_set: Any = None
    test_set: Any = None

    def __init__(
        self,
        *,
        batch_size: int = 64,
        num_workers: int = 0,
        val_size: int | float = 0.1,
        limit: int | None = None,
        seed: int = 0,
        augment: PolicyName | None = None,
        autoaugment: bool = False,
        random_erasing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ) -> None:
        super().__init__()
        self._require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}")
        self._require(num_workers >= 0, f"num_workers must be at least 0, got {num_workers}")
        self._require(limit is None or limit >= 1, f"limit must be at least 1, or null for all, got {limit}")
        self._require(0 <= seed < 2**63, f"seed must be in [0, 2^63), got {seed}")
        self._require(
            0 <= val_size < (1 if isinstance(val_size, float) else math.inf),
            f"val_size must be a count of at least 0 or a share in [0, 1), got {val_size}",
        )
        known = get_args(PolicyName)
        self._require(
            augment in (None, *known), f"augment must be one of {', '.join(known)}, got {augment!r}"
        )
        self._require(
            not autoaugment or augment in (None, "autoaugment"),
            f"autoaugment=True and augment={augment!r} exclude each other; set autoaugment to false",
        )
        self._require(0 <= random_erasing <= 1, f"random_erasing must be in [0, 1], got {random_erasing}")
        for name, alpha in (("mixup", mixup), ("cutmix", cutmix)):
            self._require(0 <= alpha < math.inf, f"{name} must be at least 0, got {alpha}")
        self.batch_size, self.num_workers, self.val_size = batch_size, num_workers, val_size
        self.limit, self.seed = limit, seed
        self.augment: PolicyName | None = "autoaugment" if autoaugment else augment
        self.random_erasing, self.mixup, self.cutmix = random_erasing, mixup, cutmix
        self._limit_val_batches: int | float | None = None  # the trainer's own, while there is no validation

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def autoaugment(self) -> bool:
        return self.augment == "autoaugment"

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{type(self).__name__}: {message}")

    def _split(self, labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Indices of the (training, validation) set, before `limit`."""
        size = len(labels)
        held_out = round(self.val_size * size) if isinstance(self.val_size, float) else self.val_size
        self._require(
            held_out < size, f"val_size must be in [0, {size}) for {size} images, got {self.val_size}"
        )
        self._require(
            held_out > 0 or self.val_size == 0,
            f"val_size={self.val_size} of {size} images rounds to 0; give a count, or 0 to train without validation",
        )
        validation, training = hold_out(labels, held_out, self.seed)
        return training, validation

    def _limited(self, rows: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
        """At most `limit` of the rows, every class in its proportion."""
        if self.limit is None or self.limit >= len(rows):
            return rows
        return rows[hold_out(labels[rows], self.limit, self.seed)[0]]

    def _augmentation(self, train: bool, **kwargs: Any) -> Augmentation:
        """The augmentation of a training set; for other sets only the normalisation."""
        if not train:
            return Augmentation(self.mean, self.std)
        return Augmentation(
            self.mean,
            self.std,
            policy=make_policy(self.augment, self.autoaugment_policy),
            erasing=self.random_erasing,
            mixup=self.mixup,
            cutmix=self.cutmix,
            num_classes=self.num_classes,
            seed=self.seed,
            **kwargs,
        )

    @property
    @abstractmethod
    def source(self) -> str:
        """Where the images come from."""

    @abstractmethod
    def _load(self, stage: str | None) -> None:
        """Fill the sets that a stage needs (None: all of them), unless they are filled already."""

    @abstractmethod
    def _batches(self, dataset: Any, train: bool = False) -> Loader:
        """A loader of `(images, labels)`."""

    def setup(self, stage: str | None = None) -> None:
        self._load(stage)
        if stage == "fit" and self.trainer and not len(self.val_set):
            self._limit_val_batches = self.trainer.limit_val_batches
            self.trainer.limit_val_batches = 0  # how Lightning is told that there is no validation

    def teardown(self, stage: str | None = None) -> None:
        if stage == "fit" and self.trainer and self._limit_val_batches is not None:
            self.trainer.limit_val_batches, self._limit_val_batches = self._limit_val_batches, None

    def describe(self) -> str:
        """One line: the data that `setup` has found, its classes and sets, where it is, and what was skipped."""
        sets = {"training": self.train_set, "validation": self.val_set, "test": self.test_set}
        parts = [f"{len(dataset):,} {name}" for name, dataset in sets.items() if dataset is not None]
        if self.test_set is not None and self.test_set is self.val_set:
            parts[-1] = "test on the validation images"
        counted = self.train_set if self.train_set is not None else self.test_set
        counts = np.bincount(counted.labels, minlength=self.num_classes) if counted is not None else ()
        named = [f"{name} {count:,}" for name, count in zip(self.classes, counts, strict=False)][
            :NAMED_CLASSES
        ]
        if named and self.num_classes > NAMED_CLASSES:
            named.append("…")
        classes = f"{self.num_classes} classes" + (f" ({', '.join(named)})" if named else "")
        return printable(f"{type(self).__name__}: {'; '.join([classes, ', '.join(parts), self.source])}")

    def digest(self) -> str | None:
        """A hash of the training and validation images by their names and labels, or None before `setup("fit")`.

        A file is known by its own name, so that the folders above it may be moved and renamed.
        """
        if self.train_set is None or self.val_set is None:
            return None
        found = hashlib.sha256()
        for dataset in (self.train_set, self.val_set):
            names = [os.path.basename(str(name)) for name in dataset.names(np.arange(len(dataset)))]
            found.update(repr((names, dataset.labels.tolist())).encode())
        return found.hexdigest()

    def _ready(self, dataset: Any, stage: str) -> Any:
        if dataset is None:
            raise RuntimeError(f'{type(self).__name__}: call setup("{stage}") first')
        return dataset

    def train_dataloader(self) -> Loader:
        return self._batches(self._ready(self.train_set, "fit"), train=True)

    def val_dataloader(self) -> Loader | list[Loader]:
        """The images held out of the training set; no loader, an empty list, if there are none."""
        dataset = self._ready(self.val_set, "validate")
        if not len(dataset):
            asked_for = self.trainer is not None and self.trainer.state.fn == "validate"
            self._require(not asked_for, "nothing to validate on with val_size=0; set it, or use test")
            return []
        return self._batches(dataset)

    def test_dataloader(self) -> Loader:
        dataset = self._ready(self.test_set, "test")
        self._require(len(dataset) > 0, "nothing to test on: no test images, and val_size=0")
        return self._batches(dataset)

    def _loader(self, dataset: Any, *, train: bool = False, num_workers: int = 0, **kwargs: Any) -> Loader:
        trainer, device = self.trainer, self._device()
        if num_workers and device.type == "cpu":
            dataset.augmentation.prepare(self.image_size)
        sampler = EpochSampler(
            len(dataset),
            batch_size=self.batch_size,
            shuffle=train and not getattr(trainer, "overfit_batches", 0),
            seed=self.seed,
            rank=trainer.global_rank if trainer else 0,
            world_size=trainer.world_size if trainer else 1,
        )
        position = self._batches_done if train else None
        return Loader(dataset, sampler, device=device, num_workers=num_workers, position=position, **kwargs)

    def _device(self) -> torch.device:
        """The trainer's device while it runs, otherwise the CPU."""
        trainer = self.trainer
        running = trainer is not None and trainer.state.status == TrainerStatus.RUNNING
        return trainer.strategy.root_device if trainer is not None and running else torch.device("cpu")

    def _batches_done(self) -> int:
        """How many batches of this epoch the trainer has finished: above 0 where it resumes mid-epoch."""
        return self.trainer.fit_loop.batch_idx + 1 if self.trainer else 0


@dataclass(eq=False)
class TensorSet(BatchSet):
    """Some rows of uint8 images held in memory, on any device, with the labels of these rows."""

    images: Tensor
    rows: NDArray[np.int64]

    def __getitem__(self, key: Key) -> Batch:
        rows = self.rows[key.samples]
        labels = torch.from_numpy(self.labels[key.samples])
        return Batch(take(self.images, rows), labels, Key(key.epoch, rows), [])

    def names(self, samples: NDArray[np.int64]) -> list[int]:
        """The positions of the samples in the official set."""
        return self.rows[samples].tolist()


class TensorDataModule(ImageDataModule):
    """A data module whose sets fit in memory.

    Only training uses workers: evaluation has nothing slow to do.

    Args:
        crop: shift training images at random, by up to `padding` pixels in both directions.
        flip: mirror half of the training images.
        device_resident: keep the images on the trainer's device, so that a batch needs no transfer.
        kwargs: see `ImageDataModule`.
    """

    padding: int

    def __init__(
        self, *, crop: bool = True, flip: bool = False, device_resident: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.crop, self.flip, self.device_resident = crop, flip, device_resident

    @abstractmethod
    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        """The official training or test set: uint8 images `(N, C, H, W)` and int64 labels `(N,)`."""

    def _load(self, stage: str | None) -> None:
        if stage in (None, "fit", "validate") and self.train_set is None:
            images, labels = self.read(train=True)
            training, validation = self._split(labels.numpy())
            self.train_set = self._set(images, labels.numpy(), training, train=True)
            self.val_set = self._set(images, labels.numpy(), validation)
        if stage in (None, "test", "predict") and self.test_set is None:
            images, labels = self.read(train=False)
            self.test_set = self._set(images, labels.numpy(), np.arange(len(labels)))

    def _set(
        self, images: Tensor, labels: NDArray[np.int64], rows: NDArray[np.int64], *, train: bool = False
    ) -> TensorSet:
        rows, padding = self._limited(rows, labels), self.padding if self.crop else 0
        return TensorSet(
            labels[rows], self._augmentation(train, padding=padding, flip=self.flip), images, rows
        )

    def _batches(self, dataset: TensorSet, train: bool = False) -> Loader:
        resident = self.device_resident and self._device().type != "cpu"
        if resident:
            self._move_sets(self._device())
        return self._loader(
            dataset, train=train, num_workers=self.num_workers if train and not resident else 0
        )

    def _move_sets(self, device: torch.device) -> None:
        """Move the images to the device; training and validation share theirs, which are moved once."""
        sets = [dataset for dataset in (self.train_set, self.val_set, self.test_set) if dataset is not None]
        held = {id(dataset.images): dataset.images for dataset in sets}
        moved = {number: images.to(device) for number, images in held.items()}
        for dataset in sets:
            dataset.images = moved[id(dataset.images)]

    def predict_dataloader(self) -> Loader:
        """The test set's images, named by their position."""

        def receive(batch: Batch) -> tuple[Tensor, list[str]]:
            return batch.images, [f"test/{row:05d}" for row in batch.key.samples]

        return self._loader(self._ready(self.test_set, "predict"), receive=receive)
