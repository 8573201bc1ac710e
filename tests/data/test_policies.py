"""Policies on whole batches against torchvision's transforms, image by image."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as K

from ortho_vit.data.policies import (
    ALL,
    AutoAugment,
    AutoAugmentPolicy,
    Choice,
    Operations,
    RandAugment,
    TrivialAugment,
)
from tests.helpers.images import noise, photographs


class Scripted:
    """Stands for `torch.rand` and `torch.randint` while torchvision draws the numbers of one image."""

    def __init__(self, monkeypatch):
        self.queue = []
        monkeypatch.setattr(torch, "rand", lambda *_: torch.tensor(self.queue.pop(0)))
        monkeypatch.setattr(torch, "randint", lambda high, *_: torch.tensor(int(self.queue.pop(0) * high)))


def autoaugment_numbers(policy, row):
    """What torchvision draws, in its order, to make the decisions of our numbers."""
    pair, probabilities, signs = policy.pairs[int(row[0] * 25)], row[1:3], row[3:5]
    queue = [row[0]]
    for (operation, probability, _), p, sign in zip(pair, probabilities, signs, strict=True):
        queue.append(p)
        signed = operation not in ("Posterize", "Solarize", "AutoContrast", "Equalize", "Invert")
        if p <= probability and signed:
            queue.append(sign)  # below a half is negative in both
    return queue


UNSIGNED = ("Identity", "Posterize", "Solarize", "AutoContrast", "Equalize")


def randaugment_numbers(policy, row):
    queue = []
    for which, sign in zip(row[:2], row[2:], strict=True):
        queue += [which] + ([] if ALL[int(which * len(ALL))] in UNSIGNED else [sign])
    return queue


def trivialaugment_numbers(policy, row):
    which, level, sign = row
    operation = ALL[int(which * len(ALL))]
    level = [] if operation in ("Identity", "AutoContrast", "Equalize") else [level]
    return [which, *level, *([] if operation in UNSIGNED else [sign])]


POLICIES = {
    "AutoAugment, CIFAR-10": (AutoAugment(), v2.AutoAugment(AutoAugmentPolicy.CIFAR10), autoaugment_numbers),
    "AutoAugment, ImageNet": (
        AutoAugment(AutoAugmentPolicy.IMAGENET),
        v2.AutoAugment(AutoAugmentPolicy.IMAGENET),
        autoaugment_numbers,
    ),
    "RandAugment": (RandAugment(), v2.RandAugment(), randaugment_numbers),
    "TrivialAugment": (TrivialAugment(), v2.TrivialAugmentWide(), trivialaugment_numbers),
}


@pytest.mark.parametrize(("height", "width", "channels"), [(32, 32, 3), (23, 40, 3), (16, 16, 1)])
@pytest.mark.parametrize("name", POLICIES)
def test_each_image_of_a_batch_is_what_torchvision_makes_of_it_alone(
    name, height, width, channels, monkeypatch
):
    ours, theirs, numbers_of = POLICIES[name]
    images, numbers = photographs(400, height, width, channels), noise(400, ours.columns)
    augmented = ours(images, numbers)
    script, expected = Scripted(monkeypatch), []
    for image, row in zip(images, numbers, strict=True):
        script.queue = numbers_of(ours, row)
        expected.append(theirs(image))
        assert not script.queue
    assert torch.equal(augmented, torch.stack(expected))
    assert (augmented != images).flatten(1).any(1).float().mean() > 0.4


def test_autoaugment_is_close_to_torchvisions_on_pil_images():
    """The operations on PIL images were used before; they round differently, and rotate about another centre."""
    ours, theirs = AutoAugment(), transforms.AutoAugment(AutoAugmentPolicy.CIFAR10)
    images, numbers = photographs(64), noise(64, 5)
    differences = []
    for image, augmented, (which, *rest) in zip(images, ours(images, numbers), numbers, strict=True):
        drawn = int(which * 25), torch.tensor(rest[:2]), (torch.tensor(rest[2:]) >= 0.5).long()
        theirs.get_params = lambda _, drawn=drawn: drawn
        expected = torch.from_numpy(np.array(theirs(Image.fromarray(image.permute(1, 2, 0).numpy()))))
        differences.append((expected.permute(2, 0, 1).int() - augmented.int()).abs().float().mean().item())
    assert np.median(differences) < 0.1  # of 255
    assert np.mean(differences) < 3


def apply_to_all(choices, images):
    """Each choice to all images, in one call."""
    operations = Operations(choices, tuple(images.shape[-2:]), images.device)
    chosen = np.repeat([operations.number[choice] for choice in choices], len(images))
    return operations(images.repeat(len(choices), 1, 1, 1), chosen[:, None]).unflatten(0, (len(choices), -1))


def test_colours_are_blended_with_their_gray_as_torchvision_does():
    levels = torch.arange(256, dtype=torch.uint8)
    colours = torch.stack(torch.meshgrid(levels[::7], levels, levels, indexing="ij")).view(1, 3, -1, 256)
    strengths = [0.1, 1.9]
    found = apply_to_all([Choice("Color", strength - 1) for strength in strengths], colours)
    for strength, ours in zip(strengths, found, strict=True):
        assert torch.equal(ours, K.adjust_saturation(colours, strength))


def test_every_level_is_blended_with_every_blurred_level_as_torchvision_does():
    """All sums that the eight neighbours of a pixel can have, in other arrangements than those of the tables."""
    generator = torch.Generator().manual_seed(0)
    sums, centres = torch.meshgrid(torch.arange(8 * 255 + 1), torch.arange(256), indexing="ij")
    neighbours = (sums.flatten() + torch.arange(8)[:, None]) // 8
    bright = neighbours.clone()
    for i in range(0, 8, 2):  # move brightness from one neighbour to the next
        moved = torch.minimum(255 - bright[i], bright[i + 1])
        moved = (moved * torch.rand(moved.shape, generator=generator)).long()
        bright[i] += moved
        bright[i + 1] -= moved
    patches = torch.cat([bright[:4], centres.flatten()[None], bright[4:]]).to(torch.uint8)
    image = patches.view(3, 3, -1).transpose(1, 2).reshape(1, 1, 3, -1)
    strengths = [0.1, 1.9]
    found = apply_to_all([Choice("Sharpness", strength - 1) for strength in strengths], image)
    for strength, ours in zip(strengths, found, strict=True):
        assert torch.equal(ours, K.adjust_sharpness(image, strength))


def test_three_operations_in_a_row_are_applied_in_their_order(monkeypatch):
    """And with a few images in a call, as large images are."""
    images = photographs(40)
    choices = [Choice("Rotate", 30.0), Choice("Invert"), Choice("Equalize"), Choice("Contrast", 0.5)]
    operations = Operations(choices, (32, 32), images.device)
    chosen = np.random.default_rng(0).integers(0, 5, (40, 3))
    by_number = {number: choice for choice, number in operations.number.items()}
    expected = images.clone()
    for i in range(3):
        for row in range(40):
            expected[row] = by_number[chosen[row, i]](expected[row])
    assert torch.equal(operations(images, chosen), expected)
    monkeypatch.setattr("ortho_vit.data.policies.AT_ONCE", 3 * images[0].numel())
    assert torch.equal(operations(images, chosen), expected)
    assert torch.equal(operations(images[:0], chosen[:0]), images[:0])
