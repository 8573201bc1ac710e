"""CIFAR-10 and CIFAR-100 from their official files, in either layout, extracted or still in the archive.

The files may come from anywhere and are not trusted.  An archive is read without extracting it, so a hostile one cannot
write files, and a damaged one leaves nothing behind.  The python layout is pickle, which can run code, but it is the
layout that most people have, so it has a reader of its own, `_Unpickler`: it accepts the five names with which numpy
pickles an array, replaces each by a stand-in that only keeps its arguments, and refuses every other name.
Errors are one line that names the file.
"""

import gzip
import io
import pickle
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ortho_vit.data.datamodule import TensorDataModule
from ortho_vit.files import download

HOST = "https://www.cs.toronto.edu/~kriz"
PIXELS = 3 * 32 * 32
MAX_BYTES = 2**28  # of one file in an archive; the largest official one has 153,700,000
MAX_TOTAL = 2**30  # of all of them

Records = tuple[NDArray[np.uint8], NDArray[np.int64]]  # pixels (n, 3072) and labels (n,)


class Layout(NamedTuple):
    """One of the official archives: its name, its folder, and its files."""

    archive: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    # The number of bytes before each image, of which the last is its label; or the key of the labels in a pickle
    label: int | str
    md5: str = ""  # of an archive to download


class _CIFAR(TensorDataModule):
    layouts: ClassVar[tuple[Layout, ...]]  # the first is the one to download
    image_size, channels, padding = 32, 3, 4

    def __init__(
        self,
        root: str = "data",
        *,
        download: bool = False,
        batch_size: int = 128,
        crop: bool = True,
        flip: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, crop=crop, flip=flip, **kwargs)
        self.root = Path(root)
        self.download = download

    @property
    def source(self) -> str:
        found = self._find()
        return f"in {(found[1] if found else self.root).absolute()}"

    def prepare_data(self) -> None:
        if self.download and self._find() is None:
            layout = self.layouts[0]
            try:
                download(f"{HOST}/{layout.archive}", self.root / layout.archive, "md5", layout.md5)
            except ConnectionError as error:
                raise ConnectionError(f"{error}; fetch it by hand and put it into {self.root}") from error

    def _find(self) -> tuple[Layout, Path] | None:
        """A layout and the folder or archive that has it; folders first, which are faster to read."""
        for layout in self.layouts:
            for folder in (self.root / layout.folder, self.root):
                if any((folder / name).is_file() for name in layout.train + layout.test):
                    return layout, folder
        for layout in self.layouts:
            if (self.root / layout.archive).is_file():
                return layout, self.root / layout.archive
        return None

    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        found = self._find()
        if found is None:
            archives = " or ".join(layout.archive for layout in self.layouts)
            raise FileNotFoundError(
                f"{type(self).__name__}: nothing found in {self.root.absolute()}; put {archives} there "
                f"(as it is, or extracted), or fetch it from {HOST}: download=True, "
                "on the command line --data.download true"
            )
        layout, path = found
        names = layout.train if train else layout.test
        contents = read_folder(path, names) if path.is_dir() else read_archive(path, layout.folder, names)
        records = [self._records(layout, path / name, contents[name]) for name in names]
        pixels, labels = (np.concatenate(part) for part in zip(*records, strict=True))
        return torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.from_numpy(labels)

    def _records(self, layout: Layout, path: Path, content: bytes) -> Records:
        try:
            if isinstance(layout.label, int):
                pixels, labels = read_binary(content, layout.label)
            else:
                pixels, labels = read_pickle(content, layout.label)
            if labels.min() < 0 or labels.max() >= self.num_classes:
                raise ValueError(f"it has labels outside [0, {self.num_classes})")
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}; fetch it again") from error
        return pixels, labels


# ------------------------------------------------------------------------------------------- folders and archives


def read_folder(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The contents of the named files of a folder."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} is incomplete: it has no {', '.join(missing)}; extract the archive again"
        )
    return {name: (folder / name).read_bytes() for name in names}


def read_archive(archive: Path, folder: str, names: Sequence[str]) -> dict[str, bytes]:
    """The contents of `folder/name` for each name, from a `.tar.gz`."""
    try:
        members = _read_members(archive, [f"{folder}/{name}" for name in names])
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ValueError(f"{archive} is damaged ({error}); delete it and download it again") from error
    missing = [name for name in names if f"{folder}/{name}" not in members]
    if missing:
        raise ValueError(f"{archive} is incomplete: it has no {folder}/{missing[0]}; download it again")
    return {name: members[f"{folder}/{name}"] for name in names}


def _read_members(archive: Path, wanted: Sequence[str]) -> dict[str, bytes]:
    """Read the whole archive: the wanted members, a check for unsafe ones, and the checksum at the end."""
    contents = {}
    with _Limited(archive) as stream:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                    raise tarfile.TarError(
                        f"refused: its member {member.name!r} could leave the folder it belongs to"
                    )
                _require_size(member.size, MAX_BYTES)  # also of those that tarfile would skip, block by block
                if str(path) in wanted and (file := tar.extractfile(member)):
                    contents[str(path)] = file.read()
        while stream.read(2**20):  # tarfile stops before the end, where gzip keeps its checksum
            pass
    return contents


class _Limited(gzip.GzipFile):
    """Raises an error after `MAX_TOTAL` bytes, whatever sizes the archive states."""

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        _require_size(self.tell(), MAX_TOTAL)
        return content


def _require_size(size: int, most: int) -> None:
    if size > most:
        raise tarfile.TarError(f"refused: it unpacks to more than {most} bytes")


# ------------------------------------------------------------------------------------------------- the two formats


def read_binary(content: bytes, label_bytes: int) -> Records:
    """Records of `label_bytes` labels, of which the last is used, and 3,072 bytes of pixels, channel by channel."""
    record = label_bytes + PIXELS
    if not content or len(content) % record:
        raise ValueError(f"{len(content)} bytes are not a number of whole records of {record}")
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return records[:, label_bytes:], records[:, label_bytes - 1].astype(np.int64)


def read_pickle(content: bytes, labels_key: str) -> Records:
    """Pixels and labels of one pickled batch; a ValueError for anything else in it."""
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        entries = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        pixels = entries["data"].pixels()
        labels = np.array(entries[labels_key], dtype=np.int64)
    except Exception as error:  # a hostile pickle can raise anything; it only must not do anything
        raise ValueError(f"it is not a batch of CIFAR in its python layout ({error})") from error
    if labels.shape != pixels.shape[:1] or not len(labels):
        raise ValueError(f"it has {len(pixels)} images and labels of shape {labels.shape}")
    return pixels, labels


class _Array:
    """What a pickle says of an array, or of the type of one: the arguments it is created from, then its state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.arguments += tuple(state)

    def pixels(self) -> NDArray[np.uint8]:
        if len(self.arguments) == 4:  # protocol 5, which has no state
            content, dtype, shape, order = self.arguments
            fortran = order != "C"
        else:
            *_, shape, dtype, fortran, content = self.arguments
        if dtype.arguments[0] not in ("u1", b"u1") or fortran or shape[1:] != (PIXELS,):
            raise ValueError("its array does not have 3,072 bytes for each image")
        return np.frombuffer(content, np.uint8).reshape(shape)


class _Unpickler(pickle.Unpickler):
    """Reads arrays and plain values, and runs nothing: what it calls are its own methods, which a pickle cannot change."""

    names = (
        "numpy.core.multiarray._reconstruct", "numpy.core.numeric._frombuffer", "numpy.dtype", "numpy.ndarray",
        "_codecs.encode",
    )  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}".replace("numpy._core", "numpy.core") not in self.names:
            raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'!r}, which no data file needs")
        return self._encode if name == "encode" else self._array

    def _array(self, *arguments: Any) -> _Array:
        return _Array(*arguments)

    def _encode(self, text: str, _: str) -> bytes:
        return text.encode("latin1")  # how Python 3 writes bytes in the protocols of Python 2


# --------------------------------------------------------------------------------------------------- the data sets


class CIFAR10(_CIFAR):
    """60,000 colour 32×32 images of 10 classes, 10,000 of them the test set.

    Args:
        root: where `cifar-10-binary.tar.gz` or `cifar-10-python.tar.gz` lies, or the folder extracted from
            it; may be that folder itself.
        download: fetch the binary archive into `root` if nothing is there.
        crop: pad training images by 4 black pixels and cut a random 32×32 window.
        flip: mirror half of the training images.
        batch_size, kwargs: see `TensorDataModule` and `ImageDataModule`.
    """

    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    layouts = (
        Layout(
            "cifar-10-binary.tar.gz", "cifar-10-batches-bin", tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
            ("test_batch.bin",), label=1, md5="c32a1d4ab5d03f1284b67883e8d87530",
        ),
        Layout(
            "cifar-10-python.tar.gz", "cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)),
            ("test_batch",), label="labels",
        ),
    )  # fmt: skip


class CIFAR100(_CIFAR):
    """60,000 colour 32×32 images of 100 classes (the fine labels), 10,000 of them the test set.

    Args:
        root: where `cifar-100-binary.tar.gz` or `cifar-100-python.tar.gz` lies, or the folder extracted from
            it; may be that folder itself.
        download, crop, flip: see `CIFAR10`.
        batch_size, kwargs: see `TensorDataModule` and `ImageDataModule`.
    """

    # fmt: off
    classes = (
        "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle",
        "bottle", "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle",
        "caterpillar", "cattle", "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch",
        "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest", "fox",
        "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
        "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom",
        "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree",
        "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road",
        "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake",
        "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
        "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle",
        "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
    )
    # fmt: on
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    layouts = (
        Layout(
            "cifar-100-binary.tar.gz", "cifar-100-binary", ("train.bin",), ("test.bin",), label=2,
            md5="03b5dce01913d631647c71ecec9e9cb8",
        ),
        Layout("cifar-100-python.tar.gz", "cifar-100-python", ("train",), ("test",), label="fine_labels"),
    )  # fmt: skip
