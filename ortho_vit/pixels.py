"""Images as uint8 pixels, and as the numbers that a network sees: `(x / 255 − mean) / std`."""

from collections.abc import Sequence

import torch
from torch import Tensor


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 images (..., C, H, W) as float32, in units of the data set's standard deviation."""
    shift, scale = _per_channel(images, mean, std)
    return images.to(torch.float32, copy=True).div_(255).sub_(shift).div_(scale)


def to_pixels(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """The inverse of `normalize`: uint8 images."""
    shift, scale = _per_channel(images, mean, std)
    return (images * scale + shift).mul(255).round().clamp(0, 255).to(torch.uint8)


def _per_channel(images: Tensor, *values: Sequence[float]) -> list[Tensor]:
    return [torch.tensor(x, device=images.device).view(-1, 1, 1) for x in values]
