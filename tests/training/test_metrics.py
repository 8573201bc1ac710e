import pytest
import torch

from ortho_vit.training.metrics import Mean, restore, state_of


def mean_of(*losses):
    mean = Mean()
    for loss in losses:
        mean.update(torch.tensor(loss), 4)
    return mean


def test_a_mean_weighs_batches_by_their_size():
    mean = mean_of(1.0)
    mean.update(torch.tensor(3.0), 12)
    assert mean.compute() == 2.5


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_means_continue_with_any_number_of_processes(world_size):
    states = state_of(mean_of(1.0, 2.0)) + state_of(mean_of(6.0))
    means = [Mean() for _ in range(world_size)]
    for rank, mean in enumerate(means):
        restore(mean, states, rank, world_size)
    assert sum(mean.total for mean in means) / sum(mean.weight for mean in means) == 3.0
    if world_size == len(states):
        assert [mean.total.item() for mean in means] == [12.0, 24.0]


def test_what_is_restored_is_a_copy():
    states = state_of(mean_of(1.0))
    mean = Mean()
    restore(mean, states, 0, 1)
    mean.total += 1
    assert states[0]["total"] == 4.0
