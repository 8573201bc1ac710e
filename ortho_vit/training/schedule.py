"""The learning rate: a linear warm-up, then half a cosine, by optimizer step; or any scheduler of torch or timm."""

import math
from collections.abc import Callable
from typing import Any, Literal

import lightning as L
from timm.scheduler.scheduler import Scheduler as TimmScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from ortho_vit.training.lightning_internals import batches_per_epoch

# parsed from `class_path` and `init_args` in YAML
SchedulerFactory = Callable[[Optimizer], LRScheduler | TimmScheduler]
SCHEDULERS = (LRScheduler, TimmScheduler)
Interval = Literal["epoch", "step"]

FLOOR = 0.01  # where the cosine ends, as a share of the peak


def warmup_cosine(step: int, *, warmup: int, total: int) -> float:
    """The learning rate of step number `step` (from 0) of `total`, as a share of its peak.

    The first step has 1/warmup of the peak, the last step of the warm-up the peak, the last step of the run FLOOR.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step + 1 - warmup) / (total - warmup), 1.0) if total > warmup else 1.0
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2


def warmup_cosine_config(optimizer: Optimizer, trainer: L.Trainer, warmup_epochs: float) -> dict[str, Any]:
    """How Lightning is to run warm-up and cosine, over the length of this run."""
    total = trainer.estimated_stepping_batches
    if not math.isfinite(total):
        raise ValueError(
            "Classifier: the schedule needs to know its end: set trainer.max_epochs or trainer.max_steps"
        )
    steps_per_epoch = math.ceil(batches_per_epoch(trainer) / trainer.accumulate_grad_batches)
    warmup = min(round(warmup_epochs * steps_per_epoch), int(total))
    schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, warmup=warmup, total=int(total)))
    return {"scheduler": schedule, "interval": "step"}


class Adapted:
    """Lets Lightning run, save and restore a scheduler of timm, or one that watches a metric.

    It counts its steps, which timm's schedulers do not.  A scheduler that watches a metric advances once per epoch with a
    validation, before the checkpoint of that epoch is written; Lightning would advance it afterwards, and a resumed run
    would miss that step.
    """

    def __init__(self, scheduler: LRScheduler | TimmScheduler) -> None:
        self.scheduler, self.optimizer, self.count = scheduler, scheduler.optimizer, 0
        self.score: float | None = None  # of this epoch's validation, where a metric is watched

    @property
    def plateau(self) -> ReduceLROnPlateau | None:
        """Torch's ReduceLROnPlateau: the scheduler itself, or the one inside timm's, which saves only a part of it."""
        inner = getattr(self.scheduler, "lr_scheduler", self.scheduler)
        return inner if isinstance(inner, ReduceLROnPlateau) else None

    @property
    def watches(self) -> str | None:
        """The metric that decides when the rate falls."""
        if self.plateau is None:
            return None
        return "val/loss" if self.plateau.mode == "min" else "val/accuracy"

    @property
    def by_step(self) -> bool:
        return isinstance(self.scheduler, TimmScheduler) and not self.scheduler.t_in_epochs

    def step(self) -> None:
        self.count += 1
        score, self.score = self.score, None
        if not isinstance(self.scheduler, TimmScheduler):
            self.scheduler.step(score)  # type: ignore[arg-type]
        elif self.by_step:
            self.scheduler.step_update(self.count, score)
        else:
            self.scheduler.step(self.count, score)

    def state_dict(self) -> dict[str, Any]:
        state = {"count": self.count, "score": self.score, "scheduler": self.scheduler.state_dict()}
        if self.plateau is not None:
            state |= {"plateau": self.plateau.state_dict()}
        return state | {"restore_lr": getattr(self.scheduler, "restore_lr", None)}  # timm's, before its noise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count, self.score = state_dict["count"], state_dict["score"]
        self.scheduler.load_state_dict(state_dict["scheduler"])
        if self.plateau is not None:
            self.plateau.load_state_dict(state_dict["plateau"])
        if hasattr(self.scheduler, "restore_lr"):
            self.scheduler.restore_lr = state_dict["restore_lr"]


def scheduler_config(scheduler: LRScheduler | TimmScheduler, interval: Interval | None) -> dict[str, Any]:
    """How Lightning is to run a scheduler: after each epoch or after each step.

    By default OneCycleLR, CyclicLR and those of timm that count updates advance by step, all others by epoch.
    """
    if not isinstance(scheduler, TimmScheduler | ReduceLROnPlateau):
        default = "step" if isinstance(scheduler, OneCycleLR | CyclicLR) else "epoch"
        return {"scheduler": scheduler, "interval": interval or default}
    adapted = Adapted(scheduler)
    only = "step" if adapted.by_step else "epoch"
    if interval not in (None, only):
        raise ValueError(
            f"{type(scheduler).__name__} advances by {only}, and scheduler_interval is {interval!r}; leave it out"
        )
    return {"scheduler": adapted, "interval": only}
