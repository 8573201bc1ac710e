"""The python layout of CIFAR is pickle, and a pickle can run code: this reader of it cannot.

The unpickler knows the five names by which numpy writes an array, and for each returns a stand-in that keeps
what it is given; any other name is refused.  Neither numpy nor any other code is called by the file; the
array is made from the bytes afterwards.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIXELS = 3 * 32 * 32


class _Array:
    """An array, or the type of one, as its pickle describes it."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        self.state = tuple(state)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Callable[..., Any] | None] = {
            (
                "multiarray",
                "_reconstruct",
            ): self._array,  # protocols up to 4: the bytes come as the last item of the state
            ("numeric", "_frombuffer"): self._array,  # protocol 5: they are the first argument
            ("numpy", "dtype"): self._array,
            ("numpy", "ndarray"): None,  # only named, never called
            ("_codecs", "encode"): self._encode,
        }
        package, _, submodule = module.rpartition(".")
        key = (submodule if package in ("numpy.core", "numpy._core") else module, name)
        if key not in known:
            raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'!r}, which no data file needs")
        return known[key]

    def _array(self, *arguments: Any) -> _Array:
        return _Array(*arguments)

    def _encode(self, text: str, _: str) -> bytes:
        return text.encode("latin1")  # how Python 3 writes bytes in the protocols of Python 2


def _pixels(array: _Array) -> NDArray[np.uint8]:
    if len(array.state) == 5:
        _, shape, dtype, fortran, content = array.state
    else:
        content, dtype, shape, order = array.arguments
        fortran = order != "C"
    if dtype.arguments[0] not in ("u1", b"u1") or fortran or shape[1:] != (PIXELS,):
        raise ValueError("its array is not one of bytes, a row of 3,072 for each image")
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_pickle(content: bytes, labels_key: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels `(n, 3072)` and labels `(n,)` of one batch file; a ValueError for anything else in it."""
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        entries = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        pixels = _pixels(entries["data"])
        labels = np.array(entries[labels_key], dtype=np.int64)
    except Exception as error:  # a hostile pickle can raise anything; it only must not do anything
        raise ValueError(f"it is not a batch of CIFAR in its python layout ({error})") from error
    if labels.shape != pixels.shape[:1] or not len(labels):
        raise ValueError(f"it has {len(pixels)} images and labels of shape {labels.shape}")
    return pixels, labels
