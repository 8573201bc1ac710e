"""Steps that are not finite: a NaN or infinite loss or gradient stops the run, or the step is skipped.

All processes decide this together, once per optimizer step, after the backward pass of its last batch and before clipping;
the same reduction tells whether a signal has asked the run to stop.  The norms of the gradients are passed on to optimizers
of this package, which would otherwise compute them again.  A skipped step changes no weight, no state of the optimizer and
no statistics of the model.  It is counted as a step, so the learning rate follows its schedule.  If gradients are
accumulated, all batches of the step are skipped.

Under `16-mixed`, infinite gradients are how the scaler finds the scale of the loss.  The scaler skips such steps by itself;
only the loss is checked here.
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
from ortho_vit.training.metrics import gathered
from ortho_vit.training.stopping import largest, signals

PATIENCE = 100  # steps in a row that may be skipped; by then a scale of 2^16 has come down to 2^-84


@dataclass
class BatchResult:
    """What a training step computed for one batch, kept until the optimizer step."""

    number: int
    loss: Tensor
    logits: Tensor
    labels: Tensor


class FiniteSteps:
    """Makes the optimizer steps of a module that are finite, and counts those that are not.

    Args:
        skip: whether to skip the others, instead of raising DivergedError.
    """

    def __init__(self, skip: bool) -> None:
        self.skip, self.skipped, self.in_a_row = skip, 0, 0
        self._results: list[BatchResult] = []
        self._buffers: list[Tensor] = []

    def before_batch(self, module: L.LightningModule) -> None:
        """Keep a copy of the statistics that a forward pass may change."""
        if self.skip and not self._results:
            self._buffers = [buffer.clone() for buffer in module.buffers()]

    def add(self, result: BatchResult) -> None:
        """Record a batch, without waiting for the device to finish it."""
        self._results.append(result)

    def run(self, module: L.LightningModule, step: Callable[[], None]) -> list[BatchResult]:
        """Make the step of the recorded batches, if it is finite.  Returns those of them whose loss is finite."""
        results, scaler = self._results, getattr(module.trainer.precision_plugin, "scaler", None)
        losses = [result.loss for result in results]
        finite = all_finite(losses) if scaler else _are_finite(losses, module)
        bad, signals.agreed = largest(module.trainer, not finite, signals.received)
        if not bad:
            scale = scaler.get_scale() if scaler else 0.0
            step()
            if scaler and scaler.get_scale() < scale:
                self._count_failure(
                    f"the gradient is not finite at a scale of {scale:.3g}{_where(module, [])}"
                )
            else:
                self.in_a_row = 0
        else:
            self._skip(module, results)
            results = [result for result in results if result.loss.isfinite()]
        self._results = []
        return results

    def _skip(self, module: L.LightningModule, results: list[BatchResult]) -> None:
        problem = _problem(module, results)
        if not self.skip:
            raise DivergedError(
                f"{problem}; nothing was changed, the last checkpoint is good: lower the learning rate or correct the "
                "data, or skip such steps with --model.skip_nonfinite true"
            )
        self.skipped += 1
        self._count_failure(problem)
        for buffer, before in zip(module.buffers(), self._buffers, strict=True):
            buffer.copy_(before)
        rank_zero_warn(f"step skipped, {self.skipped} so far: {problem}")

    def _count_failure(self, problem: str) -> None:
        self.in_a_row += 1
        if self.in_a_row >= PATIENCE:
            raise DivergedError(
                f"{problem}, as in all of the last {PATIENCE} steps, so skipping them does not help; "
                "the weights are as they were before: lower the learning rate or correct the data"
            )

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]


def _are_finite(losses: list[Tensor], module: L.LightningModule) -> bool:
    """Whether losses and gradients are finite; the norms are passed on to the optimizer."""
    parameters = [p for p in module.parameters() if p.grad is not None]
    tensors = [*losses, *(p.grad for p in parameters if p.grad is not None)]
    norms = norms_of(tensors)
    for optimizer in module.trainer.optimizers:
        if isinstance(optimizer, StiefelOptimizer):
            optimizer.known_norms = dict(zip(parameters, norms[len(losses) :], strict=True))
    return all_finite(tensors, norms)


def _problem(module: L.LightningModule, results: list[BatchResult]) -> str:
    """What is not finite, at which step, and in which samples of which process."""
    bad = next((result for result in results if not result.loss.isfinite()), None)
    batches = _describe(module, [bad] if bad else results)
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


def _describe(module: L.LightningModule, results: list[BatchResult]) -> str:
    """The numbers of batches and, if the loader knows them, of their samples, first those whose own loss is not finite."""
    text = f"batch {_listed([result.number for result in results])}"
    samples_of: Any = getattr(module.trainer.train_dataloader, "samples", None)
    if samples_of is None:
        return text
    samples = [sample for result in results for sample in samples_of(module.current_epoch, result.number)]
    losses = [F.cross_entropy(result.logits, result.labels, reduction="none") for result in results]
    finite = torch.cat(losses).isfinite()
    blamed = [sample for sample, good in zip(samples, finite.tolist(), strict=True) if not good]
    if blamed and len(blamed) < len(samples):
        text += f" because of {_listed(blamed)}"
    return f"{text} with samples {_listed(samples)}"


def _listed(numbers: list[Any]) -> str:
    return ", ".join(map(str, numbers))
