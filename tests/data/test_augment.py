"""Crop, flip, normalisation, erasing and mixing against torchvision and timm; whole batches on any device."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from torchvision import transforms

from ortho_vit.data.augment import (
    Augmentation,
    Mix,
    erasing_boxes,
    inside,
    random_crop,
    random_flip,
)
from ortho_vit.data.policies import AutoAugment, RandAugment, TrivialAugment
from ortho_vit.data.sampling import Key
from ortho_vit.pixels import normalize, to_pixels
from tests.helpers.dispatch import OTHER, other_device
from tests.helpers.images import noise, photographs

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@pytest.fixture
def images():
    return photographs(64)


def test_a_crop_is_the_window_of_the_padded_image_that_its_numbers_name(images):
    numbers = noise(64, 2)
    padded = F.pad(images, (4, 4, 4, 4))
    for image, (u, v), crop in zip(padded, numbers, random_crop(images, 4, numbers), strict=True):
        top, left = int(u * 9), int(v * 9)
        assert torch.equal(crop, image[:, top : top + 32, left : left + 32])


def test_crops_reach_every_offset_and_no_further(images):
    extremes = np.array([[0.0, 0.0], [0.999999, 0.999999], [0.5, 0.5]])
    first, last, middle = random_crop(images[:3], 4, extremes)
    assert torch.equal(first[:, 4:, 4:], images[0, :, :28, :28])
    assert torch.equal(last[:, :28, :28], images[1, :, 4:, 4:])
    assert torch.equal(middle, images[2])


def test_a_flip_mirrors_the_images_whose_number_is_below_a_half(images):
    numbers = noise(64)
    flipped = random_flip(images, numbers)
    assert torch.equal(flipped[numbers < 0.5], images[numbers < 0.5].flip(-1))
    assert torch.equal(flipped[numbers >= 0.5], images[numbers >= 0.5])


def test_normalisation_is_torchvisions_to_the_bit_and_can_be_undone(images):
    theirs = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    expected = torch.stack([theirs(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in images])
    assert torch.equal(normalize(images, MEAN, STD), expected)
    assert torch.equal(to_pixels(expected, MEAN, STD), images)


# --------------------------------------------------------------------------------------------- erasing, mixing


def test_erased_boxes_have_timms_areas_aspects_and_frequency(images):
    numbers = noise(20_000, 41)
    boxes = erasing_boxes(numbers, 0.25, 32, 32)
    top, left, bottom, right = boxes.T
    used = bottom > top
    assert abs(used.mean() - 0.25) < 0.015  # five standard deviations
    areas = ((bottom - top) * (right - left))[used] / 1024
    theirs = RandomErasing(probability=1, device="cpu")
    torch.manual_seed(0)
    erased = theirs(torch.ones(4000, 1, 32, 32)).eq(0).flatten(1).float().mean(1)
    assert abs(areas.mean() - erased.mean().item()) < 0.01
    assert abs(areas.std() - erased.std().item()) < 0.01
    assert boxes.min() >= 0
    assert boxes.max() <= 32
    assert ((bottom == 32) & used).any()
    assert ((top == 0) & used).any()


def test_an_erased_box_is_where_its_numbers_say():
    found = inside(np.array([[1, 2, 3, 5], [0, 0, 0, 0]]), torch.zeros(2, 3, 6, 7))
    expected = torch.zeros(2, 1, 6, 7, dtype=torch.bool)
    expected[0, :, 1:3, 2:5] = True
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixing_is_timms_given_the_same_numbers(images, mixup, cutmix, monkeypatch):
    labels = torch.arange(64) % 10
    theirs = Mixup(mixup, cutmix, label_smoothing=0, num_classes=10)
    for seed in range(20):
        mix = Mix.draw(np.random.default_rng(seed), mixup, cutmix, 32, 32)
        rng = np.random.default_rng(seed)
        monkeypatch.setattr(np.random, "beta", rng.beta)
        monkeypatch.setattr(np.random, "randint", lambda low, high, size, rng=rng: rng.integers(low, high))
        numbers = iter([0.0, rng.random()] if mixup and cutmix else [0.0])  # always mix; which of the two
        monkeypatch.setattr(np.random, "rand", lambda numbers=numbers: next(numbers))
        batch = normalize(images, MEAN, STD)
        expected, targets = theirs(batch.clone(), labels)
        torch.testing.assert_close(mix.images(batch), expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(mix.labels(labels, 10), targets)


# --------------------------------------------------------------------------------------------------- all of it

POLICIES = {
    "AutoAugment": AutoAugment(),
    "RandAugment": RandAugment(),
    "TrivialAugment": TrivialAugment(),
}
EVERYTHING = {"padding": 4, "flip": True, "erasing": 0.5, "mixup": 0.8, "cutmix": 1.0, "num_classes": 10}


@pytest.mark.parametrize("name", [None, *POLICIES])
def test_a_sample_is_augmented_alike_in_any_batch(images, name):
    policy = POLICIES[name] if name else None
    augment = Augmentation(MEAN, STD, padding=4, flip=True, policy=policy, erasing=0.5, seed=1)
    whole, _ = augment(images, None, Key(5, np.arange(64)))
    rows = [40, 3]
    assert torch.equal(augment(images[rows], None, Key(5, np.array(rows)))[0], whole[rows])
    assert not torch.equal(augment(images, None, Key(6, np.arange(64)))[0], whole)


def test_augmentation_leaves_the_global_random_state_and_its_input_alone(images):
    before, numpy_before, copy = torch.get_rng_state(), np.random.get_state()[1].copy(), images.clone()
    augment = Augmentation(MEAN, STD, policy=AutoAugment(), **EVERYTHING)
    augment(images, torch.zeros(64, dtype=torch.int64), Key(0, np.arange(64)))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    assert torch.equal(images, copy)


@pytest.mark.parametrize("name", POLICIES)
def test_on_another_device_batches_are_the_same_and_nothing_is_read_back(images, name):
    augment = Augmentation(MEAN, STD, policy=POLICIES[name], **EVERYTHING)
    labels = torch.arange(64) % 10
    for epoch in range(3):
        key = Key(epoch, np.arange(64))
        expected = augment(images, labels, key)
        with other_device():
            found = augment(images.to(OTHER), labels.to(OTHER), key)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.device == OTHER
            assert torch.equal(ours.values, theirs)


READS = {
    "item": lambda x: x.max().item(),
    "a condition": lambda x: bool((x > 0).all()),
    "a copy": lambda x: x.cpu(),
    "a mask": lambda x: x[x > 0],
    "positions": lambda x: x.nonzero(),
    "values": lambda x: x.unique(),
    "both devices": lambda x: x + torch.zeros(64, 1, 1, 1),
}


@pytest.mark.parametrize("read", READS)
def test_the_other_device_refuses_to_be_read(images, read):
    with other_device():
        there = images.to(OTHER)
        assert (there + 1).device == OTHER
        with pytest.raises(AssertionError, match=r"reads the device|copies to|both devices"):
            READS[read](there)


def test_labels_become_probabilities_only_where_batches_are_mixed(images):
    labels = torch.arange(64) % 10
    plain = Augmentation(MEAN, STD, flip=True)
    assert plain(images, labels, Key(0, np.arange(64)))[1] is labels
    mixed = Augmentation(MEAN, STD, mixup=1.0, num_classes=10)(images, labels, Key(0, np.arange(64)))[1]
    assert mixed.shape == (64, 10)
    torch.testing.assert_close(mixed.sum(1), torch.ones(64))
