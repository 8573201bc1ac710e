"""A loader whose batches depend on (seed, epoch, number) alone, and which can start anywhere in an epoch.

A run that was killed and resumed must see the batches it would have seen.  `EpochSampler` therefore computes
the order of an epoch from the seed and the epoch, data sets compute augmentation from the seed, the epoch and
the sample (see `noise`), and `Loader` begins an epoch at whatever batch it is told, without making those
before it.

Under a Lightning trainer nothing has to be done for it.  Lightning restores its own count of finished
batches, continues `batch_idx` from there, but iterates a plain DataLoader from its beginning; and it calls
`iter()` before it tells the sampler the epoch.  `Loader.__iter__` is a generator, so that nothing is decided
before the first batch is asked for; by then both the epoch and the count are right, and the loader starts at
the count.  Reading the trainer's count, rather than storing one of its own, stays exact for a checkpoint
written in the middle of a step, whose batch was handed out but not learned from.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ortho_vit.data.rng import permutation


class Key(NamedTuple):
    """What a data set needs to know to make one batch."""

    epoch: int
    samples: NDArray[np.int64]


class EpochSampler(Sampler[Key]):
    """The batches of one rank in one epoch, as keys, from batch number `start` on.

    Shuffled (training), all ranks have the same number of samples: what is left over after an equal division,
    fewer than `world_size` samples and others in each epoch, is not used.  In order (evaluation), every
    sample is used exactly once, and the shares are cut so that all ranks still have the same number of
    batches.
    """

    def __init__(
        self, size: int, *, batch_size: int, shuffle: bool, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        if size < world_size:
            raise ValueError(f"{size} pictures cannot be shared by {world_size} processes; use fewer")
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


def _as_it_is(batch: Any) -> Any:
    return batch


class Loader:
    """Batches of a data set that is indexed by `Key`, made here or in workers.

    It owns a DataLoader instead of being one: Lightning takes DataLoaders apart, to inject samplers that know
    nothing of keys.  `position` tells, when the first batch of an epoch is asked for, how many batches to
    leave out; `receive` sees each batch in the main process, and drops it by returning None.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: EpochSampler,
        *,
        num_workers: int = 0,
        position: Callable[[], int] | None = None,
        receive: Callable[[Any], Any] | None = None,
    ) -> None:
        self.sampler = sampler  # under this name, as Lightning calls its set_epoch
        self.batch_sampler = None  # which Lightning looks for beside it
        self._position = position
        self._receive = receive
        self._resume_at = 0
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # its own, as making an iterator draws a number; not the global one
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        start, self._resume_at = self._resume_at, 0
        self.sampler.start = start or (self._position() if self._position else 0)
        iterator = iter(self._loader)
        try:
            for batch in iterator:
                received = self._receive(batch) if self._receive else batch
                if received is not None:
                    yield received
        finally:  # left to the garbage collector, workers of an unfinished epoch take ten seconds to end
            if isinstance(iterator, _MultiProcessingDataLoaderIter):
                iterator._shutdown_workers()

    def resume_at(self, epoch: int, batch: int) -> None:
        """Let the next iteration be that of `epoch`, from batch number `batch` on; the one after it starts at
        0 again.

        For training loops other than Lightning's, which needs no such call.
        """
        self.sampler.set_epoch(epoch)
        self._resume_at = batch

    def samples(self, epoch: int, batch: int) -> list[Any]:
        """What batch number `batch` of an epoch is made of, as the data set calls it, or else by number."""
        samples = self.sampler.batches(epoch)[batch]
        names = getattr(self._loader.dataset, "names", np.ndarray.tolist)
        return names(samples)

    def state_dict(self) -> dict[str, Any]:
        """Empty: the position is the trainer's.  Lightning takes a loader for resumable if it has this
        method.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore; see `state_dict`."""
