"""A loader whose batches depend on (seed, epoch, number) alone, and which can start anywhere in an epoch.

A run that was killed and resumed must see the batches it would have seen.  `EpochSampler` therefore computes
the order of an epoch from the seed and the epoch, data sets compute augmentation from the seed, the epoch and
the sample (see `rng`), and `Loader` begins an epoch at whatever batch it is told, without making those before
it.

Under a Lightning trainer nothing has to be done for it.  Lightning restores its own count of finished
batches, continues `batch_idx` from there, but iterates a plain DataLoader from its beginning; and it calls
`iter()` before it tells the sampler the epoch.  `Loader.__iter__` is a generator, so that nothing is decided
before the first batch is asked for; by then both the epoch and the count are right, and the loader starts at
the count.  Reading the trainer's count, rather than storing one of its own, stays exact for a checkpoint
written in the middle of a step, whose batch was handed out but not learned from.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ortho_vit.data.rng import permutation


class Key(NamedTuple):
    """What a data set needs to know to make one batch."""

    epoch: int
    samples: NDArray[np.int64]


class Batch(NamedTuple):
    """Images with their labels or names; uint8 as a data set gives them, normalised once they are augmented.

    What went wrong travels with the batch, to be handled in the main process: an exception that leaves a
    worker arrives wrapped in a page of traceback.
    """

    images: Tensor
    targets: Tensor | list[str]
    key: Key  # its samples are those of the images
    failures: list[str]

    def pin_memory(self) -> "Batch":
        """The batch in pinned memory, for `DataLoader`; resident images are on the device already and stay there."""
        images, targets = (
            x.pin_memory() if isinstance(x, Tensor) and x.is_cpu else x for x in (self.images, self.targets)
        )
        return self._replace(images=images, targets=targets)


class BatchSet(Dataset[Batch]):
    """A data set that is indexed by `Key`, and whose batches `augment` makes ready for a network."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, key: Key) -> Batch:
        raise NotImplementedError

    def augment(self, batch: Batch, device: torch.device) -> Batch:
        raise NotImplementedError

    def names(self, samples: NDArray[np.int64]) -> list[Any]:
        """What a message calls these samples."""
        return samples.tolist()


class EpochSampler(Sampler[Key]):
    """The batches of one rank in one epoch, as keys, from batch number `start` on.

    Shuffled (training), all ranks have the same number of samples: the remainder of an equal division, fewer
    than `world_size` samples and different ones in each epoch, is not used.  In order (evaluation), every
    sample is used exactly once, and the shares are cut so that all ranks still have the same number of batches.
    """

    def __init__(
        self, size: int, *, batch_size: int, shuffle: bool, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        if size < world_size:
            raise ValueError(f"{size} images cannot be shared by {world_size} processes; use fewer")
        self.size, self.batch_size, self.shuffle, self.seed = size, batch_size, shuffle, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self.start = 0

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


def _images_and_targets(batch: Batch) -> tuple[Tensor, Tensor | list[str]]:
    return batch.images, batch.targets


class Loader:
    """Batches of a `BatchSet`, read here or in workers, and augmented where they are used.

    For the CPU, workers augment what they have read; for another device, workers read uint8 images, which are
    moved to it and augmented there.  The batches are the same, to the bit on a CPU.

    It owns a DataLoader instead of being one: Lightning takes DataLoaders apart, to inject samplers that know
    nothing of keys.

    Args:
        device: where the batches are made.
        position: returns, when the first batch of an epoch is asked for, how many batches to skip.
        receive: makes of each batch, in the main process, what is handed out; None drops the batch.
    """

    def __init__(
        self,
        dataset: BatchSet,
        sampler: EpochSampler,
        *,
        device: torch.device | str = "cpu",
        num_workers: int = 0,
        position: Callable[[], int] | None = None,
        receive: Callable[[Batch], Any] = _images_and_targets,
    ) -> None:
        self.sampler = sampler  # under this name, as Lightning calls its set_epoch
        self.batch_sampler = None  # which Lightning looks for beside it
        self._position = position
        self._receive = receive
        device = torch.device(device)
        self._augment: Callable[[Any], Batch] = partial(dataset.augment, device=device)
        self._in_workers = device.type == "cpu"
        self._dataset = dataset
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=self._augment if self._in_workers else _unchanged,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # its own, as making an iterator draws a number; not the global one
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
        finally:  # left to the garbage collector, workers of an unfinished epoch take ten seconds to end
            if isinstance(iterator, _MultiProcessingDataLoaderIter):
                iterator._shutdown_workers()

    def samples(self, epoch: int, batch: int) -> list[Any]:
        """What batch number `batch` of an epoch is made of, as the data set calls it."""
        return self._dataset.names(self.sampler.batches(epoch)[batch])

    def state_dict(self) -> dict[str, Any]:
        """Empty: the position is the trainer's.  Lightning regards a loader with this method as resumable."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore; see `state_dict`."""
