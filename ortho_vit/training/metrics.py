"""Means over an epoch, and how a checkpoint keeps those of an epoch that is not finished.

Each process sees other images and keeps its own sums.  A run that is resumed with the same number of processes restores
them in each process, so that the means end with the same bits.  With another number of processes, the first gets all.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

Sums = dict[str, Tensor]


class Mean(Metric):
    """A mean, summed in float32 at any precision of the run; torchmetrics' own takes the model's precision."""

    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "weight"):
            self.add_state(name, torch.zeros(()), dist_reduce_fx="sum")

    def update(self, total: Tensor, weight: Tensor | int) -> None:
        """Add `weight` values whose sum is `total`."""
        self.total = self.total.float() + total
        self.weight = self.weight.float() + weight

    def compute(self) -> Tensor:
        return self.total / self.weight

    def sums(self) -> list[Sums]:
        """The sums of every rank.  Every process must call this."""
        return gathered({"total": self.total.cpu().clone(), "weight": self.weight.cpu().clone()})

    def restore(self, sums: list[Sums], rank: int, world_size: int) -> None:
        """Continue from what `sums` returned."""
        self.reset()
        if len(sums) == world_size:
            sums = [sums[rank]]
        elif rank > 0:
            sums = [{"total": torch.tensor(0.0), "weight": torch.tensor(0.0)}]
        for each in sums:
            self.update(*_total_and_weight(each))


def gathered(value: Any) -> list[Any]:
    """The values of all processes, in the order of their ranks.  Every process must call this."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _total_and_weight(sums: Sums) -> tuple[Tensor, Tensor]:
    if "tp" in sums:  # of an earlier version: the numbers of images classified correctly and incorrectly
        return sums["tp"].sum(), (sums["tp"] + sums["fn"]).sum()
    return sums["total"], sums["weight"]
