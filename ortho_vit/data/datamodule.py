"""What the data modules share: loaders, splits, sets held in memory.

Batches are `(images, labels)`: normalised float32 `(B, C, H, W)` and int64 `(B,)`; those of `predict` are
`(images, names)`.  The validation set is held out of the training set by seed; the test set serves `test` and
`predict` only.

A data module works without a trainer too: `data.prepare_data(); data.setup("fit"); data.train_dataloader()`.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ortho_vit.data.augment import AutoAugment, normalize, random_crop, random_flip
from ortho_vit.data.rng import hold_out, uniform
from ortho_vit.data.sampling import EpochSampler, Key, Loader


class ImageDataModule(L.LightningDataModule):
    """The arguments and the loaders of every data module.

    Args:
        batch_size: pictures in a batch, for each process.
        num_workers: processes that prepare training batches; 0 prepares them in the training process.  The
            batches are the same with any number.
        val_size: how much of the training set to hold out for validation: a count, or a share below 1.  0
            trains on everything and validates on nothing.
        limit: use at most so many pictures of each set, for a quick look.
        seed: decides the splits, the order of the training set and its augmentation.
    """

    classes: Sequence[str]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int
    channels: int = 3
    train_set: Any = None  # these three by setup
    val_set: Any = None
    test_set: Any = None

    def __init__(
        self, *, batch_size: int, num_workers: int, val_size: int | float, limit: int | None, seed: int
    ) -> None:
        super().__init__()
        self._require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}")
        self._require(num_workers >= 0, f"num_workers must be at least 0, got {num_workers}")
        self._require(limit is None or limit >= 1, f"limit must be at least 1, or null for all, got {limit}")
        self._require(0 <= seed < 2**63, f"seed must be in [0, 2^63), got {seed}")
        share = isinstance(val_size, float)
        self._require(
            0 <= val_size < 1 if share else val_size >= 0,
            f"val_size must be a count of at least 0 or a share in [0, 1), got {val_size}",
        )
        self.batch_size, self.num_workers, self.val_size = batch_size, num_workers, val_size
        self.limit, self.seed = limit, seed
        self._limit_val_batches: int | float | None = None  # the trainer's own, while there is no validation

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{type(self).__name__}: {message}")

    def _split(self, labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Indices of the (training, validation) set, before `limit`."""
        size = len(labels)
        held_out = round(self.val_size * size) if isinstance(self.val_size, float) else self.val_size
        self._require(
            held_out < size, f"val_size must be in [0, {size}) for {size} pictures, got {self.val_size}"
        )
        validation, training = hold_out(labels, held_out, self.seed)
        return training, validation

    def _limited(self, rows: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
        """At most `limit` of the rows, every class in its proportion."""
        if self.limit is None or self.limit >= len(rows):
            return rows
        return rows[hold_out(labels[rows], self.limit, self.seed)[0]]

    @abstractmethod
    def _load(self, stage: str | None) -> None:
        """Fill the sets that a stage needs, all for None, unless they are there."""

    @abstractmethod
    def _batches(self, dataset: Any, train: bool = False) -> Loader:
        """A loader of `(images, labels)`."""

    def setup(self, stage: str | None = None) -> None:
        self._load(stage)
        if stage == "fit" and self.trainer and not len(self.val_set):
            self._limit_val_batches = self.trainer.limit_val_batches
            self.trainer.limit_val_batches = 0  # Lightning's way to say that there is no validation

    def teardown(self, stage: str | None = None) -> None:
        if stage == "fit" and self.trainer and self._limit_val_batches is not None:
            self.trainer.limit_val_batches, self._limit_val_batches = self._limit_val_batches, None

    def _ready(self, dataset: Any, stage: str) -> Any:
        if dataset is None:
            raise RuntimeError(f'{type(self).__name__}: call setup("{stage}") first')
        return dataset

    def train_dataloader(self) -> Loader:
        return self._batches(self._ready(self.train_set, "fit"), train=True)

    def val_dataloader(self) -> Loader | list[Loader]:
        """The pictures held out of the training set; no loader, an empty list, if there are none."""
        dataset = self._ready(self.val_set, "validate")
        if not len(dataset):
            asked_for = self.trainer is not None and self.trainer.state.fn == "validate"
            self._require(not asked_for, "nothing to validate on with val_size=0; set it, or use test")
            return []
        return self._batches(dataset)

    def test_dataloader(self) -> Loader:
        dataset = self._ready(self.test_set, "test")
        self._require(len(dataset) > 0, "nothing to test on: no test pictures, and val_size=0")
        return self._batches(dataset)

    def _loader(
        self,
        dataset: Any,
        *,
        train: bool = False,
        num_workers: int = 0,
        receive: Callable[[Any], Any] | None = None,
    ) -> Loader:
        trainer = self.trainer
        sampler = EpochSampler(
            len(dataset),
            batch_size=self.batch_size,
            shuffle=train and not getattr(trainer, "overfit_batches", 0),
            seed=self.seed,
            rank=trainer.global_rank if trainer else 0,
            world_size=trainer.world_size if trainer else 1,
        )
        return Loader(
            dataset,
            sampler,
            num_workers=num_workers,
            position=self._batches_done if train else None,
            receive=receive,
        )

    def _batches_done(self) -> int:
        """How many batches of this epoch the trainer has finished: not 0 where it resumes in the middle of
        one.
        """
        return self.trainer.fit_loop.epoch_loop.batch_progress.current.ready if self.trainer else 0


class TensorSet(Dataset[Any]):
    """Some rows of images held in memory as uint8; indexed by a `Key`, it makes the whole batch at once."""

    def __init__(
        self,
        images: Tensor,
        targets: Tensor | Sequence[str],
        rows: NDArray[np.int64],
        transform: Callable[[Tensor, Key], Tensor],
    ) -> None:
        self.images, self.targets, self.rows, self.transform = images, targets, rows, transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor | list[str]]:
        rows = self.rows[key.samples]
        images = self.transform(self.images[torch.from_numpy(rows)], Key(key.epoch, rows))
        if isinstance(self.targets, Tensor):
            return images, self.targets[torch.from_numpy(rows)]
        return images, [self.targets[row] for row in rows]

    def names(self, samples: NDArray[np.int64]) -> list[int]:
        """Their places in the official set."""
        return self.rows[samples].tolist()


class Recipe:
    """Random crop, random flip, AutoAugment, normalisation, in this order, as a function of a batch and its
    key.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        padding: int = 0,
        flip: bool = False,
        autoaugment: bool = False,
        seed: int = 0,
    ) -> None:
        self.mean, self.std, self.padding, self.flip, self.seed = mean, std, padding, flip, seed
        self.policy = AutoAugment() if autoaugment else None

    def __call__(self, images: Tensor, key: Key) -> Tensor:
        noise = uniform(self.seed, "augment", key.epoch, key.samples, 3 + AutoAugment.columns)
        if self.padding:
            images = random_crop(images, self.padding, noise[:, 0:2])
        if self.flip:
            images = random_flip(images, noise[:, 2])
        if self.policy is not None:
            images = self.policy.batch(images, noise[:, 3:])
        return normalize(images, self.mean, self.std)


class TensorDataModule(ImageDataModule):
    """A data module whose sets fit in memory.  Only training batches use workers: evaluation has nothing slow
    to do.
    """

    padding: int

    def __init__(self, *, crop: bool, flip: bool, autoaugment: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.crop, self.flip, self.autoaugment = crop, flip, autoaugment

    @abstractmethod
    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        """The official training or test set: uint8 images `(N, C, H, W)` and int64 labels `(N,)`."""

    def _load(self, stage: str | None) -> None:
        if stage in (None, "fit", "validate") and self.train_set is None:
            images, labels = self.read(train=True)
            training, validation = self._split(labels.numpy())
            self.train_set = self._set(images, labels, training, augmented=True)
            self.val_set = self._set(images, labels, validation)
        if stage in (None, "test", "predict") and self.test_set is None:
            images, labels = self.read(train=False)
            self.test_set = self._set(images, labels, np.arange(len(labels)))

    def _set(
        self, images: Tensor, labels: Tensor, rows: NDArray[np.int64], *, augmented: bool = False
    ) -> TensorSet:
        recipe = Recipe(self.mean, self.std)
        if augmented:
            padding = self.padding if self.crop else 0
            recipe = Recipe(
                self.mean,
                self.std,
                padding=padding,
                flip=self.flip,
                autoaugment=self.autoaugment,
                seed=self.seed,
            )
        return TensorSet(images, labels, self._limited(rows, labels.numpy()), recipe)

    def _batches(self, dataset: TensorSet, train: bool = False) -> Loader:
        return self._loader(dataset, train=train, num_workers=self.num_workers if train else 0)

    def predict_dataloader(self) -> Loader:
        """The test set's pictures, named by their place in it."""
        test = self._ready(self.test_set, "predict")
        names = [f"test/{row:05d}" for row in range(len(test.images))]
        return self._loader(TensorSet(test.images, names, test.rows, test.transform))
