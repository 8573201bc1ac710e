"""Augmentation of whole batches, on the device where the batch is.

`Augmentation` draws every random decision of a batch on the host, with the addressable numbers of `rng`, and
then runs tensor operations only: crop and flip by indexing, AutoAugment and its relatives through
torchvision's kernels, normalisation, random erasing, mixup or cutmix.  After the draws nothing is read back
from the device.

The policies (AutoAugment, RandAugment, TrivialAugment) have few distinct (operation, magnitude) pairs, so a
batch is sorted by them and each group goes through torchvision's kernel in one call.  Two kinds of operations
need no call per magnitude:

* Shear, translation and rotation with nearest interpolation only move pixels.  torchvision's kernel is
  applied to an image of pixel numbers, which gives a map; one gather then serves all such images, whatever
  their magnitudes.
* Brightness, posterize, solarize and invert map each level to a level.  torchvision's kernel is applied to
  the 256 levels, which gives a table; again one gather serves all images.

Either way each image has the bits that torchvision gives it alone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms import AutoAugment as TorchvisionAutoAugment
from torchvision.transforms import AutoAugmentPolicy
from torchvision.transforms.v2 import functional as K

from ortho_vit.data.rng import generator, uniform
from ortho_vit.data.sampling import Key

PolicyName = Literal["autoaugment", "randaugment", "trivialaugment"]
Noise = NDArray[np.float64]

# ------------------------------------------------------------------------------------ crop, flip, normalisation


def random_crop(images: Tensor, padding: int, noise: Noise) -> Tensor:
    """Pad with black on all sides and cut a window of the old size from each image; `noise` is `(B, 2)`."""
    B, C, height, width = images.shape
    top, left = (noise * (2 * padding + 1)).astype(np.int64).T
    first = torch.from_numpy(top * (width + 2 * padding) + left).to(images.device)
    y, x = (torch.arange(side, device=images.device) for side in (height, width))
    window = (
        y[:, None] * (width + 2 * padding) + x
    ).flatten()  # of the padded image, as far as its first pixel
    pixels = (first[:, None] + window)[:, None].expand(B, C, -1)
    return F.pad(images, (padding,) * 4).flatten(2).gather(2, pixels).view_as(images)


def random_flip(images: Tensor, noise: Noise) -> Tensor:
    """Mirror the images whose number is below a half, left to right; `noise` is `(B,)`."""
    rows = np.arange(len(images)) + len(images) * (noise < 0.5)
    return torch.cat([images, images.flip(-1)]).index_select(0, torch.from_numpy(rows).to(images.device))


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """To float32 in units of the data set's standard deviation: `(x / 255 − mean) / std`."""
    shift, scale = (torch.tensor(x, device=images.device).view(-1, 1, 1) for x in (mean, std))
    return images.float().div_(255).sub_(shift).div_(scale)


def to_pixels(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """The uint8 images that `normalize` made these of."""
    shift, scale = (torch.tensor(x, device=images.device).view(-1, 1, 1) for x in (mean, std))
    return (images * scale + shift).mul(255).round().clamp(0, 255).to(torch.uint8)


# ------------------------------------------------------------------------------------------- operations of the policies


def _shear(x: Tensor, across: float, down: float) -> Tensor:
    angles = [math.degrees(math.atan(across)), math.degrees(math.atan(down))]
    return K.affine(x, angle=0.0, translate=[0, 0], scale=1.0, shear=angles, center=[0, 0])


def _translate(x: Tensor, across: float, down: float) -> Tensor:
    return K.affine(x, angle=0.0, translate=[int(across), int(down)], scale=1.0, shear=[0.0, 0.0])


Operation = Callable[[Tensor, float], Tensor]
MOVES: dict[str, Operation] = {  # each pixel of the result is a pixel of the image, or black
    "ShearX": lambda x, m: _shear(x, m, 0.0),
    "ShearY": lambda x, m: _shear(x, 0.0, m),
    "TranslateX": lambda x, m: _translate(x, m, 0.0),
    "TranslateY": lambda x, m: _translate(x, 0.0, m),
    "Rotate": lambda x, m: K.rotate(x, angle=m),
}
LEVELS: dict[str, Operation] = {  # each value of the result depends on the value in the same place alone
    "Brightness": lambda x, m: K.adjust_brightness(x, 1.0 + m),
    "Posterize": lambda x, m: K.posterize(x, int(m)),
    "Solarize": lambda x, m: K.solarize(x, 255 * m),
    "Invert": lambda x, m: K.invert(x),
}
OTHERS: dict[str, Operation] = {
    "Color": lambda x, m: K.adjust_saturation(x, 1.0 + m),
    "Contrast": lambda x, m: K.adjust_contrast(x, 1.0 + m),
    "Sharpness": lambda x, m: K.adjust_sharpness(x, 1.0 + m),
    "AutoContrast": lambda x, m: K.autocontrast(x),
    "Equalize": lambda x, m: K.equalize(x),
}
SIGNED = {*MOVES, "Brightness", "Color", "Contrast", "Sharpness"}


@lru_cache(maxsize=128)  # at 224×224 each has 400 kB
def _pixel_map(name: str, magnitude: float, height: int, width: int, device: torch.device) -> Tensor:
    """Where each pixel of the result comes from, counted from 1; 0 is black."""
    numbers = torch.arange(1, height * width + 1, dtype=torch.float32, device=device).view(1, height, width)
    return MOVES[name](numbers, magnitude).long().flatten()


@lru_cache(maxsize=512)
def _level_table(name: str, magnitude: float, device: torch.device) -> Tensor:
    levels = torch.arange(256, dtype=torch.uint8, device=device).view(1, 16, 16)
    return LEVELS[name](levels, magnitude).flatten()


class Choice(NamedTuple):
    """An operation with its signed magnitude; `IDENTITY` does nothing."""

    operation: str
    magnitude: float = 0.0


IDENTITY = Choice("Identity")


def _move_pixels(images: Tensor, choices: Sequence[Choice], which: Tensor) -> Tensor:
    B, C, height, width = images.shape
    maps = torch.stack([_pixel_map(*choice, height, width, images.device) for choice in choices])
    pixels = F.pad(images.flatten(2), (1, 0))  # B, C, 1 + H·W: black has the number 0
    return pixels.gather(2, maps[which][:, None].expand(-1, C, -1)).view(B, C, height, width)


def _map_levels(images: Tensor, choices: Sequence[Choice], which: Tensor) -> Tensor:
    tables = torch.stack([_level_table(*choice, images.device) for choice in choices])
    return tables[which].gather(1, images.flatten(1).long()).view_as(images)


class Choices:
    """Choices, sorted so that those of one group follow each other: nothing, moves, levels, all others."""

    def __init__(self, choices: Iterable[Choice]) -> None:
        self.choices = sorted({IDENTITY, *choices}, key=lambda choice: (_kind(choice), choice))
        self.number = {choice: i for i, choice in enumerate(self.choices)}
        kinds = [_kind(choice) for choice in self.choices]
        self.first_level, self.first_other = kinds.count(0) + kinds.count(1), len(kinds) - kinds.count(3)

    def apply(self, images: Tensor, chosen: NDArray[np.int64]) -> Tensor:
        """Apply `choices[chosen[i]]` to image i.

        The images are sorted by choice, so that each group is a slice, which its operation overwrites.
        """
        order = np.argsort(chosen, kind="stable")
        chosen = chosen[order]
        images = images.index_select(0, torch.from_numpy(order).to(images.device))
        moves, levels, others = np.searchsorted(chosen, [1, self.first_level, self.first_other])
        self._gather(_move_pixels, images[moves:levels], chosen[moves:levels])
        self._gather(_map_levels, images[levels:others], chosen[levels:others])
        distinct, starts = np.unique(chosen[others:], return_index=True)
        stops = [*(others + starts[1:]), len(chosen)]
        for number, start, stop in zip(distinct, others + starts, stops, strict=False):
            operation, magnitude = self.choices[number]
            images[start:stop] = OTHERS[operation](images[start:stop], magnitude)
        return images.index_select(0, torch.from_numpy(np.argsort(order)).to(images.device))

    def _gather(self, operation: Callable[..., Tensor], images: Tensor, chosen: NDArray[np.int64]) -> None:
        if len(chosen):
            distinct, which = np.unique(chosen, return_inverse=True)
            choices = [self.choices[number] for number in distinct]
            images.copy_(operation(images, choices, torch.from_numpy(which).to(images.device)))


def _kind(choice: Choice) -> int:
    if choice is IDENTITY:
        return 0
    return 1 if choice.operation in MOVES else 2 if choice.operation in LEVELS else 3


# ------------------------------------------------------------------------------------------------------------ policies


class Space(NamedTuple):
    """The largest magnitude of each operation; `pixels` of a translation, or a share of the side if below
    1.
    """

    shear: float
    pixels: float
    degrees: float
    colour: float
    bits: int

    def magnitude(self, operation: str, level: int, bins: int, side: int) -> float:
        """Level number `level` of `bins` on the way from no change to the largest."""
        if operation == "Posterize":
            return float((8 - torch.arange(bins) / ((bins - 1) / self.bits)).round()[level])
        if operation == "Solarize":
            return float(torch.linspace(1.0, 0.0, bins)[level])
        if operation.startswith("Translate"):
            largest = self.pixels if self.pixels >= 1 else self.pixels * side
        elif operation.startswith("Shear"):
            largest = self.shear
        else:
            largest = self.degrees if operation == "Rotate" else self.colour
        return float(torch.linspace(0.0, largest, bins)[level])


USUAL = Space(shear=0.3, pixels=150.0 / 331.0, degrees=30.0, colour=0.9, bits=4)
WIDE = Space(shear=0.99, pixels=32.0, degrees=135.0, colour=0.99, bits=6)
WITHOUT_MAGNITUDE = {"AutoContrast", "Equalize", "Invert"}
ALL = (  # in torchvision's order, which numbers them
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
    "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip


class Policy:
    """Random operations, one or two after another: AutoAugment, RandAugment or TrivialAugment (Wide), as in
    torchvision.

    A subclass has alternatives, which are operations with their levels, and chooses among them.
    """

    columns: int  # of random numbers for each image
    space, bins = USUAL, 10

    def __init__(self) -> None:
        self._tables: dict[tuple[int, int], tuple[Choices, NDArray[np.int64]]] = {}

    def alternatives(self) -> list[tuple[str, int]]:
        """Operations with the numbers of their levels."""
        raise NotImplementedError

    def choose(self, noise: Noise) -> list[tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]]:
        """For each operation in turn: which alternative, whether its sign is positive, whether it is applied
        at all.
        """
        raise NotImplementedError

    def choices(self, height: int, width: int) -> tuple[Choices, NDArray[np.int64]]:
        """All choices for images of a size, and the number of each alternative, negative and positive."""
        if (height, width) not in self._tables:
            pairs = [self._signed(*alternative, height, width) for alternative in self.alternatives()]
            choices = Choices(choice for pair in pairs for choice in pair)
            table = np.array([[choices.number[choice] for choice in pair] for pair in pairs])
            self._tables[height, width] = choices, table
        return self._tables[height, width]

    def _signed(self, operation: str, level: int, height: int, width: int) -> tuple[Choice, Choice]:
        if operation == "Identity":
            return IDENTITY, IDENTITY
        if operation in WITHOUT_MAGNITUDE:
            return Choice(operation), Choice(operation)
        side = width if operation == "TranslateX" else height
        magnitude = self.space.magnitude(operation, level, self.bins, side)
        return Choice(operation, -magnitude if operation in SIGNED else magnitude), Choice(
            operation, magnitude
        )

    def __call__(self, images: Tensor, noise: Noise) -> Tensor:
        """Augment uint8 images; `noise` is `(B, columns)`."""
        choices, table = self.choices(*images.shape[-2:])
        for alternative, positive, applied in self.choose(noise):
            chosen = np.where(applied, table[alternative, positive.astype(np.int64)], 0)
            images = choices.apply(images, chosen)
        return images


class AutoAugment(Policy):
    """One of 25 pairs of operations, each applied with a probability of its own."""

    columns = 5

    def __init__(self, policy: AutoAugmentPolicy = AutoAugmentPolicy.CIFAR10) -> None:
        super().__init__()
        self.pairs = TorchvisionAutoAugment(policy).policies
        self._probability = np.array([[probability for _, probability, _ in pair] for pair in self.pairs])

    def alternatives(self) -> list[tuple[str, int]]:
        return [(operation, level or 0) for pair in self.pairs for operation, _, level in pair]

    def choose(self, noise: Noise) -> list[tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]]:
        pair = (noise[:, 0] * len(self.pairs)).astype(np.int64)
        return [
            (2 * pair + i, noise[:, 3 + i] >= 0.5, noise[:, 1 + i] <= self._probability[pair, i])
            for i in range(2)
        ]


class RandAugment(Policy):
    """Two operations, at the tenth of 31 levels."""

    columns, bins = 4, 31
    level, count = 9, 2

    def alternatives(self) -> list[tuple[str, int]]:
        return [(operation, self.level) for operation in ALL]

    def choose(self, noise: Noise) -> list[tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]]:
        everywhere = np.ones(len(noise), np.bool_)
        which = (noise[:, : self.count] * len(ALL)).astype(np.int64)
        return [(which[:, i], noise[:, self.count + i] >= 0.5, everywhere) for i in range(self.count)]


class TrivialAugment(Policy):
    """One operation, at one of 31 levels of a wide range."""

    columns, bins, space = 3, 31, WIDE

    def alternatives(self) -> list[tuple[str, int]]:
        return [(operation, level) for operation in ALL for level in range(self.bins)]

    def choose(self, noise: Noise) -> list[tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]]:
        operation, level = ((noise[:, i] * n).astype(np.int64) for i, n in ((0, len(ALL)), (1, self.bins)))
        return [(operation * self.bins + level, noise[:, 2] >= 0.5, np.ones(len(noise), np.bool_))]


def make_policy(name: PolicyName | None, autoaugment: AutoAugmentPolicy) -> Policy | None:
    """The policy of that name; `autoaugment` says which of AutoAugment's."""
    if name is None:
        return None
    if name == "autoaugment":
        return AutoAugment(autoaugment)
    return RandAugment() if name == "randaugment" else TrivialAugment()


# ----------------------------------------------------------------------------------------------- erasing and mixing

Boxes = NDArray[np.int64]  # a row for each image: top, left, bottom, right
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
    """How a batch is mixed with itself in reverse order: `share` of each image is its own, the rest its
    partner's.

    With a box (cutmix) the partner's pixels replace those inside it; without (mixup) all pixels are averaged.
    """

    share: float
    box: Boxes | None

    @classmethod
    def draw(cls, rng: np.random.Generator, mixup: float, cutmix: float, height: int, width: int) -> "Mix":
        """One draw for a batch, as timm's `Mixup` in batch mode; where both are wanted, each has half of the
        batches.
        """
        use_cutmix = cutmix > 0 and (mixup == 0 or rng.random() < 0.5)
        alpha = cutmix if use_cutmix else mixup
        share = float(rng.beta(alpha, alpha))
        if not use_cutmix:
            return cls(share, None)
        cut_h, cut_w = int(height * math.sqrt(1 - share)), int(width * math.sqrt(1 - share))
        y, x = rng.integers(height), rng.integers(width)
        top, bottom = np.clip([y - cut_h // 2, y + (cut_h + 1) // 2], 0, height)
        left, right = np.clip([x - cut_w // 2, x + (cut_w + 1) // 2], 0, width)
        return cls(
            1 - (bottom - top) * (right - left) / (height * width), np.array([[top, left, bottom, right]])
        )

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


class Augmentation:
    """Makes the batch that a network sees from uint8 images, as a function of the images and their `Key`.

    Args:
        mean, std: of the pixels in [0, 1], by which images are normalised.
        padding: black pixels on each side before a window of the old size is cut out at random; 0 for no
            crop.
        flip: mirror half of the images.
        policy: AutoAugment or one of its relatives, or None.
        erasing: probability of random erasing; erased pixels have the mean colour.
        mixup, cutmix: the α of each, 0 for none; labels become probabilities of the `num_classes` classes.
        first_column: the first of each image's random numbers that is used here: two for the crop, one for
            the flip, then the policy's.  A data set that cuts random boxes itself has used four and passes 2,
            as nothing is cropped here.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        padding: int = 0,
        flip: bool = False,
        policy: Policy | None = None,
        erasing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        num_classes: int = 0,
        seed: int = 0,
        first_column: int = 0,
    ) -> None:
        self.mean, self.std, self.padding, self.flip, self.policy = mean, std, padding, flip, policy
        self.erasing, self.mixup, self.cutmix, self.num_classes = erasing, mixup, cutmix, num_classes
        self.seed, self.first_column = seed, first_column

    def __call__(self, images: Tensor, labels: Tensor | None, key: Key) -> tuple[Tensor, Tensor | None]:
        height, width = images.shape[-2:]
        columns = self.first_column + 3 + (self.policy.columns if self.policy else 0)
        noise = uniform(self.seed, "augment", key.epoch, key.samples, columns)[:, self.first_column :]
        if self.padding:
            images = random_crop(images, self.padding, noise[:, 0:2])
        if self.flip:
            images = random_flip(images, noise[:, 2])
        if self.policy is not None:
            images = self.policy(images, noise[:, 3:])
        images = normalize(images, self.mean, self.std)
        if self.erasing:
            noise = uniform(self.seed, "erase", key.epoch, key.samples, 1 + 4 * ATTEMPTS)
            images = images.masked_fill(
                inside(erasing_boxes(noise, self.erasing, height, width), images), 0.0
            )
        if (self.mixup or self.cutmix) and labels is not None and len(images):
            rng = generator(self.seed, "mix", key.epoch, int(key.samples[0]))
            mix = Mix.draw(rng, self.mixup, self.cutmix, height, width)
            images, labels = mix.images(images), mix.labels(labels, self.num_classes)
        return images, labels
