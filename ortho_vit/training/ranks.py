"""Communication between the processes of a run."""

from typing import Any

import lightning as L
import torch
import torch.distributed as dist


def gathered(value: Any) -> list[Any]:
    """The values of all processes, in the order of their ranks.  Every process must call this."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def largest(trainer: L.Trainer, *values: int) -> list[int]:
    """The largest of each value over all processes, in one reduction.  Every process must call this."""
    if trainer.world_size == 1:
        return list(values)
    strategy = trainer.strategy
    return strategy.reduce(torch.tensor(values, device=strategy.root_device), reduce_op="max").tolist()
