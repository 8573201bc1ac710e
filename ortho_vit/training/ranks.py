"""What the processes of a run tell each other."""

from typing import Any

import torch.distributed as dist


def gathered(value: Any) -> list[Any]:
    """The value of every process, by rank; all of them must call this."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
