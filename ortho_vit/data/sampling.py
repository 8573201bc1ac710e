"""A loader whose batches depend on (seed, epoch, number) alone, and which can start anywhere in an epoch.

A run that was killed and resumed must see the batches it would have seen without the interruption.  `EpochSampler`
therefore computes the order of an epoch from the seed and the epoch, data sets compute augmentation from the seed, the
epoch and the sample (see `rng`), and `Loader` can start an epoch at any batch without computing the earlier ones.

A Lightning trainer needs no extra code for it.  On resuming, Lightning restores its count of finished batches and
continues `batch_idx` from there, but it iterates a plain DataLoader from the beginning, and it calls `iter()` before it
tells the sampler the epoch.  `Loader.__iter__` is a generator, so nothing is decided before the first batch is requested;
by then epoch and count are both right, and the loader starts at the count.  The count is the trainer's and not one of the
loader's own, because a checkpoint may be written in the middle of a step: its batch was handed out but not trained on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ortho_vit.data.rng import permutation


def take(images: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """The images with these numbers, copied; on a CPU by numpy, in a fifth of the time that torch takes."""
    if images.is_cpu:
        return torch.from_numpy(images.numpy()[rows])
    return images.index_select(0, torch.from_numpy(rows).to(images.device))


class Key(NamedTuple):
    """What a data set needs to know to make one batch."""

    epoch: int
    samples: NDArray[np.int64]


class Batch(NamedTuple):
    """Images with their labels: uint8 from the data set, normalised float32 after augmentation.

    `failures` are messages about files that could not be read.  They travel with the batch and are handled in the main
    process, because an exception raised in a worker arrives wrapped in a page of traceback.
    """

    images: Tensor
    labels: Tensor
    key: Key  # its samples are those of the images
    failures: list[str]

    def pin_memory(self) -> "Batch":
        """The batch in pinned memory, for `DataLoader`; resident images are on the device already and stay there."""
        images = self.images.pin_memory() if self.images.is_cpu else self.images
        return self._replace(images=images, labels=self.labels.pin_memory())


@dataclass(eq=False)
class BatchSet(Dataset[Batch]):
    """A data set that is indexed by `Key`, and whose batches `augmentation` prepares for a network."""

    labels: NDArray[np.int64]
    augmentation: Callable[[Tensor, Tensor, Key], tuple[Tensor, Tensor]]

    def __len__(self) -> int:
        return len(self.labels)

    def names(self, samples: NDArray[np.int64]) -> list[Any]:
        """How messages refer to these samples."""
        raise NotImplementedError

    def augment(self, batch: Batch, device: torch.device) -> Batch:
        """The batch on a device, augmented there."""
        images, labels = (x.to(device, non_blocking=True) for x in (batch.images, batch.labels))
        images, labels = self.augmentation(images, labels, batch.key)
        return batch._replace(images=images, labels=labels)


class EpochSampler(Sampler[Key]):
    """The batches of one rank in one epoch, as keys, from batch number `start` on.

    With `shuffle` (training) all ranks get the same number of samples; the remainder, fewer than `world_size` samples
    and different ones in each epoch, is not used.  Without it (evaluation) every sample is used exactly once, and the
    shares are split so that all ranks still have the same number of batches.
    """

    def __init__(
        self, size: int, *, batch_size: int, shuffle: bool, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        if size < world_size:
            raise ValueError(f"{size} images cannot be shared by {world_size} processes; use fewer")
        self.size, self.batch_size, self.shuffle, self.seed = size, batch_size, shuffle, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = self.start = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        share = self.size // self.world_size if self.shuffle else -(-self.size // self.world_size)
        return -(-share // self.batch_size)

    def batches(self, epoch: int) -> list[NDArray[np.int64]]:
        """The samples of each batch of an epoch."""
        if self.shuffle:
            order = permutation(self.seed, "order", epoch, self.size)
            order = order[: self.size - self.size % self.world_size]
        else:
            order = np.arange(self.size)
        share = order[self.rank :: self.world_size]
        if self.shuffle or self.world_size == 1:
            return np.split(share, range(self.batch_size, len(share), self.batch_size))
        return np.array_split(share, len(self))

    def __iter__(self) -> Iterator[Key]:
        for samples in self.batches(self.epoch)[self.start :]:
            yield Key(self.epoch, samples)


def _unchanged(batch: Any) -> Any:
    return batch


def _images_and_labels(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch.images, batch.labels


class Loader:
    """Batches of a `BatchSet`, read in this process or in workers, and augmented on the device that uses them.

    For the CPU, workers read and augment.  For another device, workers read uint8 images, which are moved to the device
    and augmented there.  Both give the same batches, to the bit on a CPU.

    It holds a DataLoader and is not one: Lightning rebuilds DataLoaders with its own samplers, which do not produce keys.

    Args:
        device: where batches are augmented.
        position: called when the first batch of an epoch is requested; returns how many batches to skip.
        receive: converts each batch, in the main process, to what the loader yields; None drops the batch.
    """

    def __init__(
        self,
        dataset: BatchSet,
        sampler: EpochSampler,
        *,
        device: torch.device | str = "cpu",
        num_workers: int = 0,
        position: Callable[[], int] | None = None,
        receive: Callable[[Batch], Any] = _images_and_labels,
    ) -> None:
        self.sampler = sampler  # under this name, as Lightning calls its set_epoch
        self.batch_sampler = None  # which Lightning looks for beside it
        self._position = position
        self._receive = receive
        device = torch.device(device)
        self._augment = partial(dataset.augment, device=device)
        self._in_workers = device.type == "cpu"
        self._dataset = dataset
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=self._augment if self._in_workers else _unchanged,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # an iterator draws a seed; not from the global generator
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self.sampler.start = self._position() if self._position else 0
        iterator = iter(self._loader)
        try:
            for batch in iterator:
                received = self._receive(batch if self._in_workers else self._augment(batch))
                if received is not None:
                    yield received
        finally:  # the garbage collector would need ten seconds to end the workers of an unfinished epoch
            if isinstance(iterator, _MultiProcessingDataLoaderIter):
                iterator._shutdown_workers()

    def samples(self, epoch: int, batch: int) -> list[Any]:
        """The names of the samples in batch number `batch` of an epoch."""
        return self._dataset.names(self.sampler.batches(epoch)[batch])

    def state_dict(self) -> dict[str, Any]:
        """Empty, as the trainer keeps the position.  Lightning regards a loader with this method as resumable."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore; see `state_dict`."""
