import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy

from ortho_vit.training.metrics import Mean


def mean_of(*losses):
    mean = Mean()
    for loss in losses:
        mean.update(torch.tensor(4 * loss), 4)
    return mean


def test_a_mean_weighs_batches_by_their_size():
    mean = mean_of(1.0)
    mean.update(torch.tensor(36.0), 12)
    assert mean.compute() == 2.5


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_means_continue_with_any_number_of_processes(world_size):
    states = mean_of(1.0, 2.0).sums() + mean_of(6.0).sums()
    means = [Mean() for _ in range(world_size)]
    for rank, mean in enumerate(means):
        mean.restore(states, rank, world_size)
        assert mean.update_called  # without which `compute` warns
    assert sum(mean.total for mean in means) / sum(mean.weight for mean in means) == 3.0
    if world_size == len(states):
        assert [mean.total.item() for mean in means] == [12.0, 24.0]


def test_what_is_restored_is_a_copy():
    states = mean_of(1.0).sums()
    mean = Mean()
    mean.restore(states, 0, 1)
    mean.total += 1
    assert states[0]["total"] == 4.0


def test_an_accuracy_of_an_earlier_version_goes_on():
    counts = MulticlassAccuracy(3, average="micro", validate_args=False)
    counts.update(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2]))
    accuracy = Mean()
    accuracy.restore([dict(counts.metric_state) | {"count": torch.tensor(1)}], 0, 1)
    assert accuracy.compute() == counts.compute() == 0.75
    accuracy.update(torch.tensor(4), 4)
    assert accuracy.compute() == 7 / 8
