"""Image files in folders: with one folder for each class, and one file whose header promises too many pixels."""

import struct
import zlib

import numpy as np
from PIL import Image

from ortho_vit.data import ImageFolder

RNG = np.random.default_rng(0)


def image_file(path, size=(24, 20), mode="RGB", colour=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    width, height = size
    pixels = RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(pixels) if colour is None else Image.new("RGB", size, colour)
    image.convert(mode).save(path)
    return path


def class_folders(root, parts=("",), classes=("cat", "dog"), count=6):
    for part in parts:
        for name in classes:
            for i in range(count):
                image_file(root / part / name / f"{i}.png")
    return root


def image_folder(root, stage="fit", **kwargs):
    data = ImageFolder(str(root), **{"image_size": 16, "batch_size": 4, **kwargs})
    data.setup(stage)
    return data


def huge_png():
    """A PNG of 60,000 × 60,000 pixels, by its header; it has no content."""

    def chunk(kind, content):
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
