"""Augmentation of whole batches, on the device where the batch is.

`Augmentation` draws all random decisions of a batch on the host, from the addressable numbers of `rng`, and then runs
tensor operations only: crop and flip by indexing, AutoAugment or a similar policy (see `policies`), normalisation, random
erasing, mixup or cutmix.  After the draws nothing is read back from the device.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ortho_vit.data.policies import Noise, Policy
from ortho_vit.data.rng import generator, uniform
from ortho_vit.data.sampling import Key, take
from ortho_vit.pixels import normalize

# --------------------------------------------------------------------------------------------------- crop and flip


def random_crop(images: Tensor, padding: int, noise: Noise) -> Tensor:
    """Pad with black on all sides and cut a window of the old size from each image; `noise` is `(B, 2)`."""
    B, C, height, width = images.shape
    top, left = (noise * (2 * padding + 1)).astype(np.int64).T
    first = torch.from_numpy(top * (width + 2 * padding) + left).to(images.device)
    y, x = (torch.arange(side, device=images.device) for side in (height, width))
    window = (y[:, None] * (width + 2 * padding) + x).flatten()  # counted from its first pixel
    pixels = (first[:, None] + window)[:, None].expand(B, C, -1)
    return F.pad(images, (padding,) * 4).flatten(2).gather(2, pixels).view_as(images)


def random_flip(images: Tensor, noise: Noise) -> Tensor:
    """Mirror the images whose number is below a half, left to right; `noise` is `(B,)`."""
    rows = np.arange(len(images)) + len(images) * (noise < 0.5)
    return take(torch.cat([images, images.flip(-1)]), rows)


# ----------------------------------------------------------------------------------------------- erasing and mixing

Boxes = NDArray[np.int64]  # one row per image: top, left, bottom, right
MIN_ERASED, MAX_ERASED, MIN_ASPECT, ATTEMPTS = 0.02, 1 / 3, 0.3, 10  # timm's


def erasing_boxes(noise: Noise, probability: float, height: int, width: int) -> Boxes:
    """Boxes to erase, empty in images that are left alone; `noise` is `(B, 1 + 4 · ATTEMPTS)`.

    As in timm, a box covers 2 % to a third of the image at an aspect ratio between 0.3 and 1/0.3, and is
    drawn up to ten times until it fits.
    """
    area, aspect, top, left = np.moveaxis(noise[:, 1:].reshape(len(noise), ATTEMPTS, 4), 2, 0)
    area = (MIN_ERASED + (MAX_ERASED - MIN_ERASED) * area) * height * width
    ratio = np.exp((1 - 2 * aspect) * math.log(MIN_ASPECT))
    h, w = np.rint(np.sqrt(area * ratio)).astype(np.int64), np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (h < height) & (w < width)
    rows, first = np.arange(len(noise)), fits.argmax(1)
    h, w = h[rows, first], w[rows, first]
    top = (top[rows, first] * (height - h + 1)).astype(np.int64)
    left = (left[rows, first] * (width - w + 1)).astype(np.int64)
    used = (noise[:, 0] < probability) & fits.any(1)
    return np.where(used[:, None], np.stack([top, left, top + h, left + w], 1), 0)


def inside(boxes: Boxes, images: Tensor) -> Tensor:
    """Which pixels lie in their image's box: bool, `(B, 1, H, W)`."""
    top, left, bottom, right = torch.from_numpy(boxes).to(images.device).view(-1, 4, 1, 1, 1).unbind(1)
    y = torch.arange(images.shape[-2], device=images.device)[:, None]
    x = torch.arange(images.shape[-1], device=images.device)
    return (y >= top) & (y < bottom) & (x >= left) & (x < right)


class Mix(NamedTuple):
    """How a batch is mixed with itself in reverse order: `share` of each image is its own, the rest comes from another.

    With a box (cutmix) the partner's pixels replace those inside it; without (mixup) all pixels are averaged.
    """

    share: float
    box: Boxes | None

    @classmethod
    def draw(cls, rng: np.random.Generator, mixup: float, cutmix: float, height: int, width: int) -> "Mix":
        """One draw for a batch, as timm's `Mixup` in batch mode; with both, either has probability ½."""
        use_cutmix = cutmix > 0 and (mixup == 0 or rng.random() < 0.5)
        alpha = cutmix if use_cutmix else mixup
        share = float(rng.beta(alpha, alpha))
        if not use_cutmix:
            return cls(share, None)
        cut_h, cut_w = int(height * math.sqrt(1 - share)), int(width * math.sqrt(1 - share))
        y, x = rng.integers(height), rng.integers(width)
        top, bottom = np.clip([y - cut_h // 2, y + (cut_h + 1) // 2], 0, height)
        left, right = np.clip([x - cut_w // 2, x + (cut_w + 1) // 2], 0, width)
        share = 1 - (bottom - top) * (right - left) / (height * width)
        return cls(share, np.array([[top, left, bottom, right]]))

    def images(self, images: Tensor) -> Tensor:
        partners = images.flip(0)
        if self.box is not None:
            return torch.where(inside(self.box, images), partners, images)
        return images * self.share + partners * (1 - self.share)

    def labels(self, labels: Tensor, num_classes: int) -> Tensor:
        """Probabilities `(B, num_classes)`."""
        classes = torch.arange(num_classes, device=labels.device)  # `one_hot` would read the largest label
        own = (labels[:, None] == classes).float()
        return own * self.share + own.flip(0) * (1 - self.share)


# ------------------------------------------------------------------------------------------------------- all of it


@dataclass
class Augmentation:
    """Turns uint8 images into the batch that a network sees; a function of the images and their `Key`.

    Args:
        mean, std: of the pixels in [0, 1], by which images are normalised.
        padding: black pixels added on each side before a random window of the old size is cut out; 0 for no
            crop.
        flip: mirror half of the images.
        policy: AutoAugment or one of its relatives, or None.
        erasing: probability of random erasing; erased pixels have the mean colour.
        mixup, cutmix: the α of each, 0 for none; labels become probabilities of the `num_classes` classes.
        crop_columns: how many of an image's random numbers are for its crop; those for the flip and the policy follow.
            The crop here uses two, that of `ImageFolder` four.
    """

    mean: Sequence[float]
    std: Sequence[float]
    _: KW_ONLY
    padding: int = 0
    flip: bool = False
    policy: Policy | None = None
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    num_classes: int = 0
    seed: int = 0
    crop_columns: int = 2

    def prepare(self, size: int) -> None:
        """Build the policy's tables for squares on the CPU before workers start, so that they inherit them."""
        if self.policy is not None:
            self.policy.operations(size, size, torch.device("cpu"))

    def __call__(self, images: Tensor, labels: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        height, width = images.shape[-2:]
        columns = self.crop_columns + 1 + (self.policy.columns if self.policy else 0)
        noise = uniform(self.seed, "augment", key.epoch, key.samples, columns)
        if self.padding:
            images = random_crop(images, self.padding, noise[:, :2])
        if self.flip:
            images = random_flip(images, noise[:, self.crop_columns])
        if self.policy is not None:
            images = self.policy(images, noise[:, self.crop_columns + 1 :])
        images = normalize(images, self.mean, self.std)
        if self.erasing:
            noise = uniform(self.seed, "erase", key.epoch, key.samples, 1 + 4 * ATTEMPTS)
            boxes = erasing_boxes(noise, self.erasing, height, width)
            images = images.masked_fill(inside(boxes, images), 0.0)
        if (self.mixup or self.cutmix) and len(images):
            rng = generator(self.seed, "mix", key.epoch, int(key.samples[0]))
            mix = Mix.draw(rng, self.mixup, self.cutmix, height, width)
            images, labels = mix.images(images), mix.labels(labels, self.num_classes)
        return images, labels
