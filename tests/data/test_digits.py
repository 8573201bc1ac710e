import socket

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from ortho_vit.data import Digits


def sets(**kwargs):
    data = Digits(**kwargs)
    data.prepare_data()
    data.setup()
    return data


def labels(data, name):
    return torch.from_numpy(getattr(data, name).labels)


def test_digits_need_no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("asked for the network")

    monkeypatch.setattr(socket, "socket", refuse)
    images, _ = next(iter(sets().train_dataloader()))
    assert images.shape == (64, 1, 8, 8)


def test_the_sets_are_disjoint_and_are_scikit_learns():
    data = sets(val_size=0.25)
    found = [part.images[part.rows].flatten(1) for part in (data.train_set, data.val_set, data.test_set)]
    assert [len(part) for part in found] == [1078, 360, 359]
    ours = torch.cat(found).numpy()
    theirs = np.rint(load_digits().data * 255 / 16).astype(np.uint8)
    assert np.array_equal(ours[np.lexsort(ours.T)], theirs[np.lexsort(theirs.T)])


def test_every_set_has_every_class_in_its_proportion():
    data = sets()
    for name in ("train_set", "val_set", "test_set"):
        shares = labels(data, name).bincount() / len(labels(data, name))
        assert (shares - 0.1).abs().max() < 0.01


def test_the_test_set_does_not_depend_on_the_seed():
    one, other = sets(seed=1), sets(seed=2)
    assert torch.equal(one.test_set.images, other.test_set.images)
    assert not np.array_equal(one.train_set.rows, other.train_set.rows)


def test_pixels_are_normalised():
    data = sets(val_size=0, crop=False)
    pixels = torch.cat([images for images, _ in data.train_dataloader()])
    assert pixels.dtype == torch.float32
    assert abs(pixels.mean()) < 0.02  # the constants are those of all digits, the test set's among them
    assert abs(pixels.std() - 1) < 0.02


def test_only_training_is_augmented():
    data = sets(crop=True)
    plain = sets(crop=False)
    assert torch.equal(next(iter(data.test_dataloader()))[0], next(iter(plain.test_dataloader()))[0])
    assert torch.equal(next(iter(data.val_dataloader()))[0], next(iter(plain.val_dataloader()))[0])
    assert not torch.equal(next(iter(data.train_dataloader()))[0], next(iter(plain.train_dataloader()))[0])


def test_a_limit_keeps_every_class():
    data = sets(limit=20)
    for name in ("train_set", "val_set", "test_set"):
        assert labels(data, name).bincount().tolist() == [2] * 10


def test_prediction_batches_carry_names():
    data = sets(batch_size=200)
    (images, names), (rest, others) = data.predict_dataloader()
    assert names[:2] == ["test/00000", "test/00001"]
    assert (len(images), len(names), len(rest), len(others)) == (200, 200, 159, 159)
    assert torch.equal(images, next(iter(data.test_dataloader()))[0])


def test_it_describes_itself():
    data = Digits()
    assert (data.num_classes, data.image_size, data.channels) == (10, 8, 1)
    assert data.classes == tuple("0123456789")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_size": 0}, "Digits: batch_size must be at least 1, got 0"),
        ({"num_workers": -1}, "Digits: num_workers must be at least 0, got -1"),
        ({"val_size": -1}, "Digits: val_size must be a count of at least 0 or a share in [0, 1), got -1"),
        ({"val_size": 1.5}, "Digits: val_size must be a count of at least 0 or a share in [0, 1), got 1.5"),
        ({"val_size": 1438}, "Digits: val_size must be in [0, 1438) for 1438 images, got 1438"),
        ({"limit": 0}, "Digits: limit must be at least 1, or null for all, got 0"),
        ({"seed": -1}, "Digits: seed must be in [0, 2^63), got -1"),
    ],
)
def test_wrong_arguments_are_answered_in_one_line(kwargs, message):
    with pytest.raises(ValueError, match=r"^Digits") as caught:
        sets(**kwargs)
    assert str(caught.value) == message


def test_a_loader_before_setup_says_what_to_call():
    with pytest.raises(RuntimeError, match=r'Digits: call setup\("fit"\) first'):
        Digits().train_dataloader()


def test_enlarged_digits_are_the_same_images():
    small, large = Digits().read(train=False)[0], Digits(image_size=32).read(train=False)[0]
    assert large.shape == (359, 1, 32, 32)
    means = large.float().unflatten(-1, (8, 4)).mean(-1).unflatten(-2, (8, 4)).mean(-2)
    assert (means - small).abs().mean() < 30  # of 255: measured 18, two different digits 60
    data = sets(image_size=16, batch_size=4)
    assert next(iter(data.train_dataloader()))[0].shape == (4, 1, 16, 16)
    with pytest.raises(ValueError, match="Digits: image_size must be at least 8, got 4"):
        Digits(image_size=4)
