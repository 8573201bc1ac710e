"""Callbacks that measure orthogonality and average weights during a run."""

from collections.abc import Iterable, Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks import WeightAveraging as LightningWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim.swa_utils import get_ema_avg_fn

from ortho_vit.errors import DivergedError
from ortho_vit.parameter import project_, stiefel_parameters
from ortho_vit.stiefel import nan_first, orthogonality_error
from ortho_vit.training.lightning_internals import averaged_model


class OrthogonalityMonitor(Callback):
    """Measures every constrained parameter, logs its error, and stops the run when one has left the manifold.

    It logs `orthogonality/<parameter>`, the largest |(X Xᵀ − I)ᵢⱼ|, and the largest of these, `orthogonality`.

    Args:
        every_n_steps: the number of steps between two measurements; the end of each epoch is measured too.
        threshold: the largest error that is allowed, beyond the rounding error of the parameter's precision; null for
            optimizers that do not claim to stay on the manifold.
    """

    def __init__(self, every_n_steps: int = 50, threshold: float | None = 1e-3) -> None:
        if every_n_steps < 1:
            raise ValueError(f"OrthogonalityMonitor: every_n_steps must be at least 1, got {every_n_steps}")
        if threshold is not None and not threshold > 0:
            raise ValueError(f"OrthogonalityMonitor: threshold must be positive or null, got {threshold}")
        self.every_n_steps, self.threshold = every_n_steps, threshold

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step % self.every_n_steps == 0:
            self._measure(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._measure(trainer, pl_module)

    def _measure(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        parameters = dict(stiefel_parameters(pl_module))
        if not parameters:
            return
        errors = {name: orthogonality_error(p) for name, p in parameters.items()}
        values = {f"orthogonality/{name}": value for name, value in errors.items()}
        values["orthogonality"] = max(errors.values(), key=nan_first)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        # for other callbacks; the loggers have it
        pl_module.log("orthogonality", values["orthogonality"], logger=False, reduce_fx="max", sync_dist=True)
        if self.threshold is None:
            return
        excess = {name: errors[name] - rounding_error(p.dtype) for name, p in parameters.items()}
        worst = max(excess, key=lambda name: nan_first(excess[name]))
        if not excess[worst] <= self.threshold:
            raise DivergedError(
                f"{worst} has left the manifold at step {trainer.global_step}: its orthogonality error is "
                f"{errors[worst]:.3g}, more than the threshold {self.threshold:g} of OrthogonalityMonitor"
            )


def rounding_error(dtype: torch.dtype) -> float:
    """The most that rounding an orthonormal X to `dtype` adds to |(X Xᵀ − I)ᵢⱼ|: 2u + u², u the unit roundoff.

    Each entry changes by at most u times itself; the scalar product of the absolute values of two unit rows is at most 1.
    """
    u = torch.finfo(dtype).eps / 2
    return 2 * u + u * u


class WeightAveraging(LightningWeightAveraging):
    """An average of the weights, by default an exponential moving one, which is validated, saved and kept at the end.

    The mean of orthonormal matrices is not orthonormal, so each constrained block of the average is replaced by its
    polar factor, the nearest orthonormal one, whenever the average has moved.

    Args:
        decay: how much of the average remains at each update; null weighs all updates equally (stochastic weight averaging).
        every_n_steps: the number of optimizer steps between two updates.
        start_step: the step of the first update; before it the average follows the weights.
    """

    def __init__(self, decay: float | None = 0.999, every_n_steps: int = 1, start_step: int = 0) -> None:
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(f"WeightAveraging: decay must be in [0, 1) or null, got {decay}")
        if every_n_steps < 1:
            raise ValueError(f"WeightAveraging: every_n_steps must be at least 1, got {every_n_steps}")
        # torch's default: equal weights
        weighing = {} if decay is None else {"avg_fn": get_ema_avg_fn(decay)}
        super().__init__(**weighing)
        self.every_n_steps, self.start_step = every_n_steps, start_step
        self._updated = False
        self._current: list[Tensor] = []  # the weights, while the average is validated in their place

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        self._updated = (
            step_idx is not None and step_idx >= self.start_step and step_idx % self.every_n_steps == 0
        )
        return self._updated

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        average, self._updated = averaged_model(self), False
        if trainer.global_step <= self.start_step:
            _copy(_tensors(pl_module), average.module)
            return
        super().on_train_batch_end(trainer, pl_module, *args)
        if self._updated:
            project_(average.module)

    # Lightning's callback is active outside of `fit` too, so the same trainer would afterwards test weights that are not
    # averaged; and its swap with bfloat16 weights would round the average, which is float32.

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._current = [tensor.detach().clone() for tensor in _tensors(pl_module)]
            _copy(_tensors(averaged_model(self).module), pl_module)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            _copy(self._current, pl_module)
            self._current = []

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._current:  # the run is being stopped within a validation
            _copy(self._current, pl_module)  # of which checkpoint["state_dict"] is a view
            self._current = []
        super().on_save_checkpoint(trainer, pl_module, checkpoint)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)


def _tensors(module: torch.nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


@torch.no_grad()
def _copy(source: Iterable[Tensor], target: torch.nn.Module) -> None:
    for new, tensor in zip(source, _tensors(target), strict=True):
        tensor.copy_(new)
