"""Means over an epoch, and how a checkpoint keeps those of an epoch that is not finished.

Each process sees other images and keeps its own sums.  A run that is resumed with the same number of processes restores
them in each process, so that the means end with the same bits.  With another number of processes, the first one gets the
totals.
"""

import torch
from torch import Tensor
from torchmetrics import Metric

from ortho_vit.training.lightning_internals import restore_metric
from ortho_vit.training.ranks import gathered

State = dict[str, Tensor]


class Mean(Metric):
    """The mean of losses, summed in float32 at any precision of the run; torchmetrics' own takes the model's precision."""

    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "weight"):
            self.add_state(name, torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value: Tensor, weight: int) -> None:
        self.total = self.total + value.float() * weight
        self.weight = self.weight.float() + weight

    def compute(self) -> Tensor:
        return self.total / self.weight


def state_of(metric: Metric) -> list[State]:
    """The state of a metric whose parts are sums, one per rank.  Every process must call this."""
    parts = {name: value.cpu().clone() for name, value in metric.metric_state.items()}  # type: ignore[union-attr]
    return gathered(parts | {"count": torch.tensor(metric.update_count)})


def restore(metric: Metric, states: list[State], rank: int, world_size: int) -> None:
    """Restore a metric from what `state_of` returned."""
    if len(states) != world_size:
        total = {name: torch.stack([state[name] for state in states]).sum(0) for name in states[0]}
        empty = {name: torch.zeros_like(value) for name, value in total.items()}
        states = [total, *[empty] * (world_size - 1)]
    restore_metric(metric, states[rank], int(states[rank]["count"]))
