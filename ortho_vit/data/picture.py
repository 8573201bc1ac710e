"""One picture from a file that may be anything: decoded to RGB and cut to a square, or a ValueError that
names it.
"""

import math
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
EVAL_SHARE = 0.875  # of the shorter side, in evaluation: 224 of 256, as is usual on ImageNet
MIN_AREA, MAX_ASPECT = 0.08, 4 / 3  # of a random crop, likewise

Box = tuple[float, float, float, float]  # left, top, right, bottom


def decode(path: Path) -> Image.Image:
    """The picture in RGB and upright, whatever mode it was stored in."""
    try:
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")  # about metadata; what matters comes as an error
            warnings.simplefilter(
                "error", Image.DecompressionBombWarning
            )  # 89 million pixels: Pillow's own limit
            with Image.open(file) as image:
                image.load()
                return _to_rgb(ImageOps.exif_transpose(image))
    except Image.UnidentifiedImageError:
        reason = "the file is empty" if not path.stat().st_size else "not a picture in a known format"
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        reason = "too many pixels"
    except FileNotFoundError:
        reason = "no such file"
    except Exception as error:  # decoders raise all sorts on damaged input
        reason = " ".join(str(error).split()) or type(error).__name__
    raise ValueError(f"cannot read {path}: {reason}")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits a pixel, which `convert` would clip at 255
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels; save it with 8 or 16 bits")
    return image.convert("RGB")


def centre_box(width: int, height: int, share: float = EVAL_SHARE) -> Box:
    """The central square that evaluation looks at."""
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, noise: NDArray[np.float64]) -> Box:
    """A random part of 8 % to 100 % of the area and of aspect 3:4 to 4:3, cut where it does not fit; `noise`
    is `(4,)`.
    """
    area = width * height * (MIN_AREA + (1 - MIN_AREA) * noise[0])
    aspect = MAX_ASPECT ** (2 * noise[1] - 1)
    w, h = min(width, math.sqrt(area * aspect)), min(height, math.sqrt(area / aspect))
    left, top = noise[2] * (width - w), noise[3] * (height - h)
    return left, top, min(left + w, width), min(top + h, height)


def resized(image: Image.Image, size: int, box: Box) -> Image.Image:
    """That part of the picture as a square of `size` pixels: crop and resize in one resampling."""
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box)
