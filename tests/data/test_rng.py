import numpy as np
import pytest

from ortho_vit.data.rng import _GOLDEN, _mix, hold_out, permutation, uniform


def test_a_number_depends_on_its_address_alone():
    whole = uniform(7, "augment", 3, np.arange(1000), 8)
    part = uniform(7, "augment", 3, np.array([999, 5, 5]), 2)
    assert np.array_equal(part, whole[[999, 5, 5], :2])


@pytest.mark.parametrize("other", [(8, "augment", 3), (7, "order", 3), (7, "augment", 4), (3, "augment", 7)])
def test_another_seed_stream_or_epoch_gives_unrelated_numbers(other):
    here, there = (uniform(*key, np.arange(10_000))[:, 0] for key in [(7, "augment", 3), other])
    assert abs(np.corrcoef(here, there)[0, 1]) < 0.05  # five standard deviations


def test_numbers_are_uniform_and_neighbours_are_unrelated():
    noise = uniform(0, "augment", 0, np.arange(100_000), 4)
    assert noise.min() >= 0
    assert noise.max() < 1
    counts = np.stack([np.histogram(column, bins=50, range=(0, 1))[0] for column in noise.T])
    chi_squared = ((counts - 2000) ** 2 / 2000).sum(1)
    assert chi_squared.max() < 100  # 49 degrees of freedom: larger with probability 2e-5
    assert abs(np.corrcoef(noise.T) - np.eye(4)).max() < 0.02
    assert abs(np.corrcoef(noise[:-1, 0], noise[1:, 0])[0, 1]) < 0.02


def test_the_numbers_of_a_seed_never_change():
    expected = [[0.24326223, 0.15901831], [0.94707411, 0.84216337]]
    assert np.allclose(uniform(1, "augment", 2, np.arange(2), 2), expected, atol=1e-8)


def test_the_hash_is_splitmix64():
    # Its first three outputs for seed 0
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert _mix(_GOLDEN * np.arange(1, 4, dtype=np.uint64)).tolist() == published


@pytest.mark.parametrize("size", [0, 1, 2, 1000])
def test_a_permutation_has_everything_once(size):
    assert np.array_equal(np.sort(permutation(0, "order", 0, size)), np.arange(size))


@pytest.mark.parametrize("size", [0, 1, 13, 100, 199, 200])
def test_a_held_out_set_and_the_rest_are_disjoint_and_complete(size):
    labels = np.random.default_rng(0).integers(0, 7, 200)
    held_out, rest = hold_out(labels, size, seed=3)
    assert len(held_out) == size
    assert np.array_equal(np.sort(np.concatenate([held_out, rest])), np.arange(200))


def test_a_held_out_set_has_every_class_in_its_proportion():
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    held_out, _ = hold_out(labels, 100, seed=0)
    assert np.array_equal(np.bincount(labels[held_out]), [60, 30, 10])


def test_splits_follow_the_seed():
    labels = np.zeros(100, np.int64)
    assert np.array_equal(hold_out(labels, 50, 1)[0], hold_out(labels, 50, 1)[0])
    assert not np.array_equal(hold_out(labels, 50, 1)[0], hold_out(labels, 50, 2)[0])
