"""Random numbers without a generator: each is a pure function of where it is used.

The numbers of a generator depend on all earlier draws, and so on the number of workers and ranks and on whether the run
was interrupted.  Here a number is the hash of its address `(seed, stream, epoch, sample, column)`: any process can
compute it, in any order, and gets the same value.  The hash is SplitMix64 (Steele, Lea and Flood, 2014), computed for all
samples of a batch at once.
"""

import zlib
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Stream = Literal["split", "order", "augment", "erase", "mix"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ / golden ratio, SplitMix64's increment


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every bit depends on every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(
    seed: int, stream: Stream, epoch: int, samples: NDArray[np.int64], columns: int = 1
) -> NDArray[np.float64]:
    """Numbers in [0, 1), one row for each sample: `(len(samples), columns)`."""
    state = np.zeros(1, np.uint64)
    for part in (seed, zlib.crc32(stream.encode()), epoch):
        state = _mix((state ^ np.uint64(part)) + _GOLDEN)
    rows = _mix(state + _GOLDEN * (samples.astype(np.uint64) + np.uint64(1)))
    cells = _mix(rows[:, None] + _GOLDEN * np.arange(1, columns + 1, dtype=np.uint64))
    return (cells >> np.uint64(11)).astype(np.float64) * 2.0**-53


def generator(seed: int, stream: Stream, epoch: int, sample: int) -> np.random.Generator:
    """A generator for distributions other than the uniform one, seeded by the number at this address."""
    number = uniform(seed, stream, epoch, np.array([sample]))[0, 0]
    return np.random.default_rng(int(number * 2**53))


def permutation(seed: int, stream: Stream, epoch: int, size: int) -> NDArray[np.int64]:
    """A random order of `range(size)`."""
    return np.argsort(uniform(seed, stream, epoch, np.arange(size))[:, 0], kind="stable")


def hold_out(labels: NDArray[np.int64], size: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split into (held out, rest), both sorted: exactly `size` samples are held out, every class in its proportion.

    Each sample gets its place in a random order of its own class, as a share of the class; the lowest shares are held out.
    """
    noise = uniform(seed, "split", 0, np.arange(len(labels)))[:, 0]
    share = np.empty(len(labels))
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = members[np.argsort(noise[members], kind="stable")]
        share[order] = (np.arange(len(members)) + 0.5) / len(members)
    order = np.lexsort((noise, share))
    return np.sort(order[:size]), np.sort(order[size:])
