"""An image file, decoded to RGB and cropped to a square; a ValueError names a file that cannot be read."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.functional import InterpolationMode, center_crop, resize

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
CROP_PCT = 0.875  # of the shorter side, in evaluation: 224 of 256, as is usual on ImageNet
MIN_AREA, MAX_ASPECT = 0.08, 4 / 3  # of a random crop, likewise


def decode(path: Path) -> Image.Image:
    """The image in RGB and upright, whatever mode it was stored in."""
    with _opened(path) as image:
        image.load()
        return _to_rgb(ImageOps.exif_transpose(image))


def why_unreadable(path: Path) -> str | None:
    """What is wrong with a file, by its name and header alone, or None; much quicker than `decode`."""
    if path.suffix.lower() not in SUFFIXES:
        return f"{path} is not an image"
    try:
        with _opened(path):
            return None
    except ValueError as error:
        return str(error)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")  # about metadata; real problems are errors
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # above 89 million pixels
            with Image.open(file) as image:
                if image.mode == "F":
                    raise ValueError("floating-point pixels; save it with 8 or 16 bits")
                yield image
        return
    except Image.UnidentifiedImageError:
        reason = "the file is empty" if not path.stat().st_size else "not an image in a known format"
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        reason = "too many pixels"
    except FileNotFoundError:
        reason = "no such file"
    except Exception as error:  # decoders raise all sorts on damaged input
        reason = " ".join(str(error).split()) or type(error).__name__
    raise ValueError(f"cannot read {path}: {reason}")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # more than 8 bits, which `convert` would clip at 255
        values = np.asarray(image).astype(np.int64)
        if image.mode == "I" and values.size and (values.min() < 0 or values.max() > 0xFFFF):
            raise ValueError("pixels of 32 bits; save it with 8 or 16 bits")
        few = image.mode == "I" and values.max(initial=0) <= 255  # 32 bits that hold levels of 8
        image = Image.fromarray((values if few else values >> 8).astype(np.uint8))
    return image.convert("RGB")


def central_square(image: Image.Image, size: int, crop_pct: float = CROP_PCT) -> Image.Image:
    """The crop for evaluation, as in timm's transform.

    The shorter side is resized to `size / crop_pct` pixels, and the central `size` × `size` pixels are cut out.
    """
    resized = resize(image, [math.floor(size / crop_pct)], InterpolationMode.BICUBIC)
    return center_crop(resized, [size, size])


def as_tensor(image: Image.Image, channels: int) -> Tensor:
    """The pixels of an RGB image, uint8 (channels, height, width): 3 channels, or 1 for grey."""
    pixels = torch.from_numpy(np.array(image.convert("L") if channels == 1 else image))
    return pixels.view(image.height, image.width, channels).permute(2, 0, 1)


def random_box(width: int, height: int, noise: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a random box in an image; `noise` is `(4,)`.

    It has 8 % to 100 % of the area and an aspect of 3:4 to 4:3, and is clipped to the image.
    """
    area = width * height * (MIN_AREA + (1 - MIN_AREA) * noise[0])
    aspect = MAX_ASPECT ** (2 * noise[1] - 1)
    w, h = min(width, math.sqrt(area * aspect)), min(height, math.sqrt(area / aspect))
    left, top = noise[2] * (width - w), noise[3] * (height - h)
    return left, top, min(left + w, width), min(top + h, height)
