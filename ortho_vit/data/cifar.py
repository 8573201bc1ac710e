"""CIFAR-10 and CIFAR-100 from their official files, in either layout, extracted or still in the archive."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ortho_vit.data.archive import download, read_archive, read_folder
from ortho_vit.data.cifar_pickle import read_pickle
from ortho_vit.data.datamodule import TensorDataModule

HOST = "https://www.cs.toronto.edu/~kriz"
PIXELS = 3 * 32 * 32

Records = tuple[NDArray[np.uint8], NDArray[np.int64]]  # pixels (n, 3072) and labels (n,)


class Layout(NamedTuple):
    """One of the official archives: its name, its folder, its files, and how to read them."""

    archive: str
    md5: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[bytes], Records]


def read_binary(content: bytes, *, label_bytes: int) -> Records:
    """Records of `label_bytes` labels, the last being the one to use, and 3,072 bytes of pixels, a channel at
    a time.
    """
    record = label_bytes + PIXELS
    if not content or len(content) % record:
        raise ValueError(f"{len(content)} bytes are not a number of whole records of {record}")
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return records[:, label_bytes:], records[:, label_bytes - 1].astype(np.int64)


class _CIFAR(TensorDataModule):
    layouts: ClassVar[tuple[Layout, ...]]  # the first is the one to download
    image_size, channels, padding = 32, 3, 4

    def __init__(
        self,
        root: str = "data",
        *,
        download: bool = False,
        batch_size: int = 128,
        num_workers: int = 0,
        crop: bool = True,
        flip: bool = True,
        autoaugment: bool = False,
        val_size: int | float = 0.1,
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            num_workers=num_workers,
            crop=crop,
            flip=flip,
            autoaugment=autoaugment,
            val_size=val_size,
            limit=limit,
            seed=seed,
        )
        self.root = Path(root)
        self.download = download

    def prepare_data(self) -> None:
        if self.download and self._find() is None:
            layout = self.layouts[0]
            download(f"{HOST}/{layout.archive}", self.root / layout.archive, layout.md5)

    def _find(self) -> tuple[Layout, Path] | None:
        """A layout and the folder or archive that has it; folders first, they are quicker to read."""
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
                f"(as it is, or extracted), or set download=True to fetch it from {HOST}"
            )
        layout, path = found
        names = layout.train if train else layout.test
        contents = read_folder(path, names) if path.is_dir() else read_archive(path, layout.folder, names)
        records = [
            self._records(layout, path, name, data) for name, data in zip(names, contents, strict=True)
        ]
        pixels, labels = (np.concatenate(part) for part in zip(*records, strict=True))
        return torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.from_numpy(labels)

    def _records(self, layout: Layout, path: Path, name: str, content: bytes) -> Records:
        try:
            pixels, labels = layout.read(content)
            if labels.min() < 0 or labels.max() >= self.num_classes:
                raise ValueError(f"it has labels outside [0, {self.num_classes})")
        except ValueError as error:
            raise ValueError(f"{path / name} is damaged: {error}; fetch it again") from error
        return pixels, labels


class CIFAR10(_CIFAR):
    """60,000 colour 32×32 images of 10 classes, 10,000 of them the test set.

    Args:
        root: where `cifar-10-binary.tar.gz` or `cifar-10-python.tar.gz` lies, or the folder extracted from
            it; may be that folder itself.
        download: fetch the binary archive into `root` if nothing is there.
        crop: pad training images by 4 black pixels and cut a random 32×32 window.
        flip: mirror half of the training images.
        autoaugment: apply AutoAugment's CIFAR-10 policy to training images; some hundred µs an image, so give
            it workers.
        batch_size, num_workers, val_size, limit, seed: see `ImageDataModule`.
    """

    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    layouts = (
        Layout(
            "cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            "cifar-10-batches-bin",
            tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
            ("test_batch.bin",),
            lambda content: read_binary(content, label_bytes=1),
        ),
        Layout(
            "cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            "cifar-10-batches-py",
            tuple(f"data_batch_{i}" for i in range(1, 6)),
            ("test_batch",),
            lambda content: read_pickle(content, "labels"),
        ),
    )


class CIFAR100(_CIFAR):
    """60,000 colour 32×32 images of 100 classes (the fine labels), 10,000 of them the test set.

    Args:
        root: where `cifar-100-binary.tar.gz` or `cifar-100-python.tar.gz` lies, or the folder extracted from
            it; may be that folder itself.
        download, crop, flip, autoaugment: see `CIFAR10`.
        batch_size, num_workers, val_size, limit, seed: see `ImageDataModule`.
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
            "cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            "cifar-100-binary",
            ("train.bin",),
            ("test.bin",),
            lambda content: read_binary(content, label_bytes=2),
        ),
        Layout(
            "cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            "cifar-100-python",
            ("train",),
            ("test",),
            lambda content: read_pickle(content, "fine_labels"),
        ),
    )
