"""Every augmentation against its oracle: torchvision's transforms image by image, and timm's mixing and erasing."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import transforms
from torchvision.transforms import v2

from ortho_vit.data.augment import (
    ALL,
    Augmentation,
    AutoAugment,
    AutoAugmentPolicy,
    Mix,
    RandAugment,
    TrivialAugment,
    erasing_boxes,
    inside,
    normalize,
    random_crop,
    random_flip,
    to_pixels,
)
from ortho_vit.data.sampling import Key

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def photographs(count, height=32, width=32, channels=3):
    """Smooth random images, which have the histograms and edges that noise has not."""
    coarse = torch.rand(count, channels, 5, 5, generator=torch.Generator().manual_seed(0))
    fine = F.interpolate(coarse, (height, width), mode="bicubic")
    return (fine * 300 - 20).clamp(0, 255).to(torch.uint8)


@pytest.fixture
def images():
    return photographs(64)


def noise(*shape):
    return np.random.default_rng(0).random(shape)


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


# ------------------------------------------------------------------------------------------------- policies


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


def test_autoaugment_is_close_to_torchvisions_on_pil_images(images):
    """The operations on PIL images were used before; they round differently, and rotate about another centre."""
    ours, theirs = AutoAugment(), transforms.AutoAugment(AutoAugmentPolicy.CIFAR10)
    numbers = noise(64, 5)
    differences = []
    for image, augmented, (which, *rest) in zip(images, ours(images, numbers), numbers, strict=True):
        drawn = int(which * 25), torch.tensor(rest[:2]), (torch.tensor(rest[2:]) >= 0.5).long()
        theirs.get_params = lambda _, drawn=drawn: drawn
        picture = torch.from_numpy(np.array(theirs(Image.fromarray(image.permute(1, 2, 0).numpy()))))
        differences.append((picture.permute(2, 0, 1).int() - augmented.int()).abs().float().mean().item())
    assert np.median(differences) < 0.1  # of 255
    assert np.mean(differences) < 3


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

EVERYTHING = {"padding": 4, "flip": True, "erasing": 0.5, "mixup": 0.8, "cutmix": 1.0, "num_classes": 10}


@pytest.mark.parametrize("name", [None, *POLICIES])
def test_a_sample_is_augmented_alike_in_any_batch(images, name):
    policy = POLICIES[name][0] if name else None
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


class NoHostRead(TorchDispatchMode):
    """Refuses the operations that make the host wait for the device."""

    forbidden = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.forbidden, f"{func} reads from the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_read_back_from_the_device(images, name):
    augment = Augmentation(MEAN, STD, policy=POLICIES[name][0], **EVERYTHING)
    augment.policy.choices(32, 32)  # magnitudes are computed on the host, once
    labels = torch.zeros(64, dtype=torch.int64)
    with NoHostRead():
        for epoch in range(3):
            augment(images, labels, Key(epoch, np.arange(64)))
    with pytest.raises(AssertionError, match="reads from the device"), NoHostRead():
        images.max().item()


def test_labels_become_probabilities_only_where_batches_are_mixed(images):
    labels = torch.arange(64) % 10
    plain = Augmentation(MEAN, STD, flip=True)
    assert plain(images, labels, Key(0, np.arange(64)))[1] is labels
    mixed = Augmentation(MEAN, STD, mixup=1.0, num_classes=10)(images, labels, Key(0, np.arange(64)))[1]
    assert mixed.shape == (64, 10)
    torch.testing.assert_close(mixed.sum(1), torch.ones(64))
