"""The names that configurations, checkpoints and cards have stored go on working."""

import importlib

import pytest

import ortho_vit.data
from ortho_vit._moved import MOVED

OLD = sorted(name for name in MOVED if name.startswith("ortho_vit.data."))


@pytest.mark.parametrize("name", ortho_vit.data.__all__)
def test_a_data_module_names_the_path_that_users_write(name):
    assert getattr(ortho_vit.data, name).__module__ == "ortho_vit.data"


def test_pictures_is_the_old_name_of_unlabelled_images():
    arguments = {"classes": ["a", "b"], "image_size": 8, "mean": [0.5], "std": [0.5]}
    assert ortho_vit.data.Pictures("x", **arguments, share=0.5).crop_pct == 0.5
    assert isinstance(ortho_vit.data.Pictures("x", **arguments), ortho_vit.data.UnlabelledImages)


@pytest.mark.parametrize("name", OLD)
def test_old_modules_are_found_with_a_warning(name, monkeypatch):
    monkeypatch.delitem(importlib.import_module("sys").modules, name, raising=False)
    with pytest.warns(FutureWarning, match=f"{name} is now {MOVED[name]}"):
        assert importlib.import_module(name) is importlib.import_module(MOVED[name])


def test_autoaugment_is_one_of_the_policies():
    data = ortho_vit.data.CIFAR10
    assert data(autoaugment=True).augment == "autoaugment"
    assert data(augment="autoaugment").autoaugment
    assert not data(augment="randaugment").autoaugment
    with pytest.raises(
        ValueError, match="CIFAR10: autoaugment=True and augment='randaugment' exclude each other"
    ):
        data(autoaugment=True, augment="randaugment")
    with pytest.raises(ValueError, match=r"CIFAR10: augment must be one of autoaugment, .*, got 'mixup'"):
        data(augment="mixup")
    with pytest.raises(ValueError, match=r"CIFAR10: random_erasing must be in \[0, 1\], got 2"):
        data(random_erasing=2)
    with pytest.raises(ValueError, match="CIFAR10: cutmix must be at least 0, got -1"):
        data(cutmix=-1)


def test_every_data_module_describes_itself_in_one_line():
    data = ortho_vit.data.Digits(limit=20)
    data.setup()
    assert data.describe() == (
        "Digits: 10 classes (0 2, 1 2, 2 2, 3 2, 4 2, 5 2, 6 2, 7 2, 8 2, 9 2); 20 training, 20 validation, 20 test; "
        "part of scikit-learn"
    )
    assert data.crop_pct == 1.0
