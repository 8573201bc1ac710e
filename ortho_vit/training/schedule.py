"""The learning rate: a linear warm-up, then half a cosine, by optimizer step."""

import math

FLOOR = 0.01  # where the cosine ends, as a share of the peak


def warmup_cosine(step: int, *, warmup: int, total: int, floor: float = FLOOR) -> float:
    """The share of the peak learning rate that step number `step` (from 0) of `total` takes.

    The first step already takes 1/warmup, the last of the warm-up the peak, the very last `floor`.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step + 1 - warmup) / (total - warmup), 1.0) if total > warmup else 1.0
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
