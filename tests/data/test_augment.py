import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision import transforms

from ortho_vit.data.augment import AutoAugment, normalize, random_crop, random_flip
from ortho_vit.data.datamodule import Recipe
from ortho_vit.data.sampling import Key


@pytest.fixture
def images():
    return torch.randint(
        0, 256, (64, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )


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


def test_normalisation_is_torchvisions_to_the_bit(images):
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    theirs = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])
    expected = torch.stack([theirs(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in images])
    assert torch.equal(normalize(images, mean, std), expected)


def test_autoaugment_is_torchvisions_given_the_same_numbers(images, monkeypatch):
    policy = transforms.AutoAugmentPolicy.CIFAR10
    ours, theirs = AutoAugment(policy), transforms.AutoAugment(policy)
    numbers = noise(64, 5)
    expected = []
    for image, (which, *rest) in zip(images, numbers, strict=True):
        drawn = int(which * 25), torch.tensor(rest[:2]), (torch.tensor(rest[2:]) >= 0.5).long()
        monkeypatch.setattr(theirs, "get_params", lambda _, drawn=drawn: drawn)
        picture = theirs(Image.fromarray(image.permute(1, 2, 0).numpy()))
        expected.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1))
    augmented = ours.batch(images, numbers)
    assert torch.equal(augmented, torch.stack(expected))
    assert not torch.equal(augmented, images)


@pytest.mark.parametrize("autoaugment", [False, True])
def test_a_sample_is_augmented_alike_in_any_batch(images, autoaugment):
    recipe = Recipe((0.5,) * 3, (0.2,) * 3, padding=4, flip=True, autoaugment=autoaugment, seed=1)
    whole = recipe(images, Key(5, np.arange(64)))
    assert torch.equal(recipe(images[[40, 3]], Key(5, np.array([40, 3]))), whole[[40, 3]])
    assert not torch.equal(recipe(images, Key(6, np.arange(64))), whole)


def test_augmentation_leaves_the_global_random_state_alone(images):
    before = torch.get_rng_state()
    Recipe((0.5,) * 3, (0.2,) * 3, padding=4, flip=True, autoaugment=True)(images, Key(0, np.arange(64)))
    assert torch.equal(torch.get_rng_state(), before)
