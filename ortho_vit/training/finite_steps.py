"""Steps that are not finite: a loss or gradient that is nan or inf stops the run, or is left out of it.

This is decided once for each optimizer step, after the backward pass of its last batch and before clipping, and by all
processes alike; whether a signal has asked the run to stop is part of the same reduction.  The norms are passed on to the
optimizer, if it is one of this package, which would compute them again otherwise.  A step that is left out changes no
weight, no state of the optimizer and no statistics of the model; it has a number as any other, so the learning rate goes
on.  Where batches are accumulated, all of the step is left out.

Under `16-mixed` an infinite gradient is how the scale of the loss is found.  That is left to the scaler, which leaves
out such steps by itself; only the loss is checked here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ortho_vit.errors import DivergedError
from ortho_vit.optim.base import StiefelOptimizer, all_finite, norms_of
from ortho_vit.training.ranks import gathered, largest
from ortho_vit.training.stopping import signals

PATIENCE = 100  # steps in a row that may be left out; a scale of 2^16 has come down to 2^-84 by then


@dataclass
class Seen:
    """What a training step leaves behind for its optimizer step."""

    batch: int
    loss: Tensor
    logits: Tensor
    labels: Tensor


class FiniteSteps:
    """Makes the optimizer steps of a module that are finite, and counts those that are not.

    Args:
        skip: whether to leave out the others, instead of raising DivergedError.
    """

    def __init__(self, skip: bool) -> None:
        self.skip, self.skipped, self.in_a_row = skip, 0, 0
        self._seen: list[Seen] = []
        self._buffers: list[Tensor] = []

    def before_batch(self, module: L.LightningModule) -> None:
        """Remember the statistics that a forward pass may change."""
        if self.skip and not self._seen:
            self._buffers = [buffer.clone() for buffer in module.buffers()]

    def saw(self, seen: Seen) -> None:
        """Take note of a batch, without waiting for the device to finish it."""
        self._seen.append(seen)

    def run(self, module: L.LightningModule, step: Callable[[], None]) -> list[Seen]:
        """Make the step for the batches seen, if it is finite; those of them whose loss is finite."""
        seen, scaler = self._seen, getattr(module.trainer.precision_plugin, "scaler", None)
        losses = [s.loss for s in seen]
        finite = all_finite(losses) if scaler else _look(losses, module)
        bad, signals.agreed = largest(module.trainer, not finite, signals.received)
        if not bad:
            scale = scaler.get_scale() if scaler else 0.0
            step()
            if scaler and scaler.get_scale() < scale:
                self._wait(f"the gradient is not finite at a scale of {scale:.3g}{_where(module, [])}")
            else:
                self.in_a_row = 0
        else:
            self._leave_out(module, seen)
            seen = [s for s in seen if s.loss.isfinite()]
        self._seen = []
        return seen

    def _leave_out(self, module: L.LightningModule, seen: list[Seen]) -> None:
        problem = _problem(module, seen)
        if not self.skip:
            raise DivergedError(
                f"{problem}; nothing was changed, the last checkpoint is good: lower the learning rate or correct the "
                "data, or leave out such steps with --model.skip_nonfinite true"
            )
        self.skipped += 1
        self._wait(problem)
        for buffer, before in zip(module.buffers(), self._buffers, strict=True):
            buffer.copy_(before)
        rank_zero_warn(f"step left out, {self.skipped} so far: {problem}")

    def _wait(self, problem: str) -> None:
        self.in_a_row += 1
        if self.in_a_row >= PATIENCE:
            raise DivergedError(
                f"{problem}, as in all of the last {PATIENCE} steps, so leaving them out does not help; "
                "the weights are as they were before: lower the learning rate or correct the data"
            )

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]


def _look(losses: list[Tensor], module: L.LightningModule) -> bool:
    """Whether losses and gradients are finite; the optimizer is told the norms."""
    parameters = [p for p in module.parameters() if p.grad is not None]
    tensors = [*losses, *(p.grad for p in parameters if p.grad is not None)]
    norms = norms_of(tensors)
    for optimizer in module.trainer.optimizers:
        if isinstance(optimizer, StiefelOptimizer):
            optimizer.known_norms = dict(zip(parameters, norms[len(losses) :], strict=True))
    return all_finite(tensors, norms)


def _problem(module: L.LightningModule, seen: list[Seen]) -> str:
    """What is not finite, when, and in which samples of which process."""
    bad = next((s for s in seen if not s.loss.isfinite()), None)
    batches = _batches(module, [bad] if bad else seen)
    found = gathered((f"the loss is {bad.loss.item()}" if bad else None, batches))
    losses = [what for what, _ in found if what]
    where = [batches if what or not losses else None for what, batches in found]
    if losses:
        return losses[0] + _where(module, where)
    name = next(n for n, p in module.named_parameters() if p.grad is not None and not p.grad.isfinite().all())
    return f"the gradient of {name} is not finite" + _where(module, where)


def _where(module: L.LightningModule, batches: list[str | None]) -> str:
    ranks = [
        f"rank {rank}, {text}" if len(batches) > 1 else text for rank, text in enumerate(batches) if text
    ]
    return f" at step {module.global_step} ({'; '.join([f'epoch {module.current_epoch}', *ranks])})"


def _batches(module: L.LightningModule, seen: list[Seen]) -> str:
    """The numbers of batches and, where the loader can tell, of their samples: those to blame by themselves first."""
    numbers = ", ".join(str(s.batch) for s in seen)
    text = f"batch {numbers}"
    samples_of: Any = getattr(module.trainer.train_dataloader, "samples", None)
    if samples_of is None:
        return text
    samples = [sample for s in seen for sample in samples_of(module.current_epoch, s.batch)]
    finite = torch.cat([F.cross_entropy(s.logits, s.labels, reduction="none").isfinite() for s in seen])
    blamed = [sample for sample, good in zip(samples, finite.tolist(), strict=True) if not good]
    if blamed and len(blamed) < len(samples):
        text += f" because of {_listed(blamed)}"
    return f"{text} with samples {_listed(samples)}"


def _listed(samples: list[Any]) -> str:
    return ", ".join(map(str, samples))
