"""AutoAugment, RandAugment and TrivialAugment for whole batches, through torchvision's kernels.

A policy draws one or two choices for each image; a choice is an operation with its magnitude.  The images of a batch
that need the same kernel go through it in one call, and most kernels handle all magnitudes at once:

* Shear, translation and rotation with nearest interpolation only move pixels.  torchvision's kernel is
  applied to an image of pixel numbers, which gives a map; one gather then moves the pixels of all images.
* Brightness, posterize, solarize and invert map each level to a level.  torchvision's kernel is applied to
  the 256 levels, which gives a table.
* Sharpness and colour blend each level with that of a second image, blurred or gray, which is torchvision's
  kernel at strength 0.  The kernel applied to an image with all pairs of levels gives a table of pairs.

Contrast is called once per magnitude; autocontrast and equalize have none.  In every case an image gets the same bits as
from torchvision's transform of that image alone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms import AutoAugment as TorchvisionAutoAugment
from torchvision.transforms import AutoAugmentPolicy
from torchvision.transforms.v2 import functional as K

from ortho_vit.data.sampling import take

PolicyName = Literal["autoaugment", "randaugment", "trivialaugment"]
Noise = NDArray[np.float64]
Integers = NDArray[np.int64]

# --------------------------------------------------------------------------------------------------- operations


def _shear(x: Tensor, across: float, down: float) -> Tensor:
    angles = [math.degrees(math.atan(across)), math.degrees(math.atan(down))]
    return K.affine(x, angle=0.0, translate=[0, 0], scale=1.0, shear=angles, center=[0, 0])


def _translate(x: Tensor, across: float, down: float) -> Tensor:
    return K.affine(x, angle=0.0, translate=[int(across), int(down)], scale=1.0, shear=[0.0, 0.0])


OPERATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {  # in torchvision's order, which numbers them
    "Identity": lambda x, m: x,
    "ShearX": lambda x, m: _shear(x, m, 0.0),
    "ShearY": lambda x, m: _shear(x, 0.0, m),
    "TranslateX": lambda x, m: _translate(x, m, 0.0),
    "TranslateY": lambda x, m: _translate(x, 0.0, m),
    "Rotate": lambda x, m: K.rotate(x, angle=m),
    "Brightness": lambda x, m: K.adjust_brightness(x, 1.0 + m),
    "Color": lambda x, m: K.adjust_saturation(x, 1.0 + m),
    "Contrast": lambda x, m: K.adjust_contrast(x, 1.0 + m),
    "Sharpness": lambda x, m: K.adjust_sharpness(x, 1.0 + m),
    "Posterize": lambda x, m: K.posterize(x, int(m)),
    "Solarize": lambda x, m: K.solarize(x, 255 * m),
    "AutoContrast": lambda x, m: K.autocontrast(x),
    "Equalize": lambda x, m: K.equalize(x),
    "Invert": lambda x, m: K.invert(x),  # in AutoAugment only
}
ALL = tuple(OPERATIONS)[:-1]  # those of RandAugment and TrivialAugment


class Choice(NamedTuple):
    """An operation with its signed magnitude."""

    operation: str
    magnitude: float = 0.0

    def __call__(self, images: Tensor) -> Tensor:
        return OPERATIONS[self.operation](images, self.magnitude)


# --------------------------------------------------------------------------------- many images in one call


class Move:
    """Shear, translation and rotation: each pixel of the result is a pixel of the image, or black."""

    def __init__(self, choices: Sequence[Choice], size: tuple[int, int], device: torch.device) -> None:
        height, width = size
        numbers = torch.arange(1, height * width + 1, dtype=torch.float32).view(1, height, width)
        maps = [choice(numbers).to(torch.int32).flatten() for choice in choices]  # counted from 1; 0 is black
        self.maps = torch.stack(maps).to(device)

    def __call__(self, images: Tensor, which: Tensor) -> Tensor:
        pixels = F.pad(images.flatten(2), (1, 0))  # B, C, 1 + H·W: black has the number 0
        maps = self.maps.index_select(0, which).long()[:, None].expand(-1, images.shape[1], -1)
        return pixels.gather(2, maps).view_as(images)


class Table:
    """Each value of the result depends on the value in its place; with colour or sharpness also on the second image's."""

    def __init__(self, choices: Sequence[Choice], size: tuple[int, int], device: torch.device) -> None:
        operation = choices[0].operation
        self.second = Choice(operation, -1.0) if operation in ("Color", "Sharpness") else None
        pixels = all_pairs(operation) if self.second else torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
        places = self._places(pixels).flatten().long()
        tables = torch.zeros(len(choices), 256**2 if self.second else 256, dtype=torch.uint8)
        for table, choice in zip(tables, choices, strict=True):
            table.scatter_(0, places, choice(pixels).flatten())
        self.tables = tables.to(device)

    def _places(self, images: Tensor) -> Tensor:
        places = images.int()
        return places.mul_(256).add_(self.second(images)) if self.second else places

    def __call__(self, images: Tensor, which: Tensor) -> Tensor:
        if self.second and self.second.operation == "Color" and images.shape[1] == 1:
            return images  # gray already
        places = self._places(images).add_((which.int() * self.tables.shape[1]).view(-1, 1, 1, 1))
        return self.tables.flatten().index_select(0, places.flatten()).view_as(images)


class Single:
    """One choice, through torchvision's kernel."""

    def __init__(self, choices: Sequence[Choice], size: tuple[int, int], device: torch.device) -> None:
        (self.choice,) = choices

    def __call__(self, images: Tensor, which: Tensor) -> Tensor:
        return self.choice(images)


def all_pairs(operation: str) -> Tensor:
    """An image that has every level beside every level of the second image that it can be blended with."""
    first, second = (x.flatten() for x in torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij"))
    if operation == "Color":
        # One level more of red and green changes gray by less than 1, so every gray occurs.
        return torch.stack([second, second, first]).view(3, 256, 256).to(torch.uint8)
    # Blurred is (5 · centre + sum of the 8 neighbours) / 13: patches of 3×3 pixels, side by side.
    total = (13 * second - 5 * first).clamp(0, 8 * 255)
    neighbours = (total + torch.arange(8)[:, None]) // 8
    patches = torch.cat([neighbours[:4], first[None], neighbours[4:]]).view(3, 3, -1)
    return patches.transpose(1, 2).reshape(1, 3, -1).to(torch.uint8)


# Pixels × channels in one call on a CPU: larger temporaries leave the cache, which takes twice the time
AT_ONCE = 2**18

Kernel = Single | Table | Move
KERNELS: tuple[tuple[type[Kernel], set[str]], ...] = (
    (Single, {"Identity", "Contrast", "AutoContrast", "Equalize"}),
    (Table, {"Brightness", "Posterize", "Solarize", "Invert"}),
    (Move, {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"}),
    (Table, {"Color"}),
    (Table, {"Sharpness"}),
)


class Operations:
    """All choices of a policy for images of one size, in groups that are applied by one call each."""

    def __init__(self, choices: Iterable[Choice], size: tuple[int, int], device: torch.device) -> None:
        distinct = dict.fromkeys([Choice("Identity"), *choices])
        groups: list[tuple[type[Kernel], list[Choice]]] = []
        for kernel, operations in KERNELS:
            members = [choice for choice in distinct if choice.operation in operations]
            if kernel is Single:
                groups += [(kernel, [choice]) for choice in members]
            elif members:
                groups.append((kernel, members))
        self._groups = [kernel(members, size, device) for kernel, members in groups]
        ordered = [choice for _, members in groups for choice in members]
        self.number = {choice: i for i, choice in enumerate(ordered)}  # 0 is the identity
        places = [(group, i) for group, (_, members) in enumerate(groups) for i in range(len(members))]
        self._group, self._place = np.array(places).T  # of each choice, and its number in the group

    def __call__(self, images: Tensor, chosen: Integers) -> Tensor:
        """Apply the choices with the numbers `chosen[i]`, one after another, to image i.

        For each step the images are sorted by group, so that a call reads and writes one range of them.  Those of
        group 0, the identity, come first and are left as they are.
        """
        most = max(1, AT_ONCE // images[0].numel()) if len(images) and images.is_cpu else len(images)
        at = np.arange(len(images))  # the image that is now in each place
        for numbers in chosen.T:
            group = self._group[numbers[at]]
            order = np.argsort(group, kind="stable")
            at, group, images = at[order], group[order], take(images, order)
            places = torch.from_numpy(self._place[numbers[at]]).to(images.device)
            for first, last in pairwise([*np.flatnonzero(np.diff(group, prepend=0)), len(group)]):
                apply = self._groups[group[first]]
                for start in range(first, last, most):
                    part = slice(start, min(start + most, last))
                    images[part] = apply(images[part], places[part])
        return take(images, np.argsort(at))


# ------------------------------------------------------------------------------------------------------------ policies


class Policy:
    """Random operations, one or two after another, as torchvision's class of the same name draws them.

    A subclass lists its alternatives, each an operation with a level, and chooses among them.
    """

    columns: int  # of random numbers for each image
    bins = 10  # levels of each operation
    # The largest magnitudes; a shift below 1 is a share of the side, not a number of pixels.
    shear, shift, degrees, colour, bits = 0.3, 150.0 / 331.0, 30.0, 0.9, 4

    def __init__(self) -> None:
        self._operations: dict[tuple[int, int, torch.device], tuple[Operations, Integers]] = {}

    def alternatives(self) -> list[tuple[str, int]]:
        """Operations with the numbers of their levels."""
        raise NotImplementedError

    def choose(self, noise: Noise) -> tuple[Integers, NDArray[np.bool_], NDArray[np.bool_] | bool]:
        """Numbers of alternatives, their signs (True is positive), and whether to apply them: each `(B, operations)`."""
        raise NotImplementedError

    def operations(self, height: int, width: int, device: torch.device) -> tuple[Operations, Integers]:
        """The operations for images of a size, and the numbers there of each alternative: negative, positive."""
        key = height, width, device
        if key not in self._operations:
            pairs = self._signed_choices(height, width)
            operations = Operations((choice for pair in pairs for choice in pair), (height, width), device)
            numbers = np.array([[operations.number[choice] for choice in pair] for pair in pairs])
            self._operations[key] = operations, numbers
        return self._operations[key]

    def _signed_choices(self, height: int, width: int) -> list[tuple[Choice, Choice]]:
        """Each alternative with the negative and the positive magnitude of its level."""
        across, down = (self.shift if self.shift >= 1 else self.shift * side for side in (width, height))
        signed = dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), self.colour)
        signed |= {"ShearX": self.shear, "ShearY": self.shear, "Rotate": self.degrees}
        signed |= {"TranslateX": across, "TranslateY": down}
        levels = dict.fromkeys(OPERATIONS, torch.zeros(self.bins))
        levels |= {operation: torch.linspace(0.0, most, self.bins) for operation, most in signed.items()}
        levels["Posterize"] = (8 - torch.arange(self.bins) / ((self.bins - 1) / self.bits)).round()
        levels["Solarize"] = torch.linspace(1.0, 0.0, self.bins)
        pairs = []
        for operation, level in self.alternatives():
            magnitude = levels[operation][level].item()
            negative = -magnitude if operation in signed else magnitude
            pairs.append((Choice(operation, negative), Choice(operation, magnitude)))
        return pairs

    def __call__(self, images: Tensor, noise: Noise) -> Tensor:
        """Augment uint8 images; `noise` is `(B, columns)`."""
        height, width = images.shape[-2:]
        operations, numbers = self.operations(height, width, images.device)
        alternative, positive, applied = self.choose(noise)
        return operations(images, np.where(applied, numbers[alternative, positive * 1], 0))


class AutoAugment(Policy):
    """One of 25 pairs of operations, each applied with a probability of its own."""

    columns = 5

    def __init__(self, policy: AutoAugmentPolicy = AutoAugmentPolicy.CIFAR10) -> None:
        super().__init__()
        self.pairs = TorchvisionAutoAugment(policy).policies
        self._probability = np.array([[probability for _, probability, _ in pair] for pair in self.pairs])

    def alternatives(self) -> list[tuple[str, int]]:
        return [(operation, level or 0) for pair in self.pairs for operation, _, level in pair]

    def choose(self, noise: Noise) -> tuple[Integers, NDArray[np.bool_], NDArray[np.bool_]]:
        pair = (noise[:, 0] * len(self.pairs)).astype(np.int64)
        applied = noise[:, 1:3] <= self._probability[pair]
        return 2 * pair[:, None] + np.arange(2), noise[:, 3:5] >= 0.5, applied


class RandAugment(Policy):
    """Two operations, at the tenth of 31 levels."""

    columns, bins = 4, 31

    def alternatives(self) -> list[tuple[str, int]]:
        return [(operation, 9) for operation in ALL]

    def choose(self, noise: Noise) -> tuple[Integers, NDArray[np.bool_], bool]:
        return (noise[:, :2] * len(ALL)).astype(np.int64), noise[:, 2:] >= 0.5, True


class TrivialAugment(Policy):
    """One operation, at one of 31 levels of a wide range."""

    columns, bins = 3, 31
    shear, shift, degrees, colour, bits = 0.99, 32.0, 135.0, 0.99, 6

    def alternatives(self) -> list[tuple[str, int]]:
        return [(operation, level) for operation in ALL for level in range(self.bins)]

    def choose(self, noise: Noise) -> tuple[Integers, NDArray[np.bool_], bool]:
        operation, level = (noise[:, :2] * [len(ALL), self.bins]).astype(np.int64).T
        return (operation * self.bins + level)[:, None], noise[:, 2:] >= 0.5, True


def make_policy(name: PolicyName | None, autoaugment: AutoAugmentPolicy) -> Policy | None:
    """The policy of that name; `autoaugment` says which of AutoAugment's."""
    if name is None:
        return None
    if name == "autoaugment":
        return AutoAugment(autoaugment)
    return RandAugment() if name == "randaugment" else TrivialAugment()
