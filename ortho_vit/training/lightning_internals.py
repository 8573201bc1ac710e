"""Every private or undocumented name of Lightning and torch that training uses, one small function each.

A public hook is used wherever there is one; each function says why there is none for it.  The tests of this file run a
small fit and fail where a new version of a library has changed what a function relies on.  One name is elsewhere:
`fit_loop.batch_idx` in `ortho_vit.data.datamodule`, which must not import this package.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loops.evaluation_loop import RestartStage
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

# ---------------------------------------------------------------------------------------------------------- Lightning


def batches_per_epoch(trainer: L.Trainer) -> float:
    """The number of training batches of this process in one epoch, also before training has started.

    `trainer.num_training_batches` is infinite until the training data is set up.
    """
    trainer.fit_loop.setup_data()
    return trainer.num_training_batches


def is_accumulating(trainer: L.Trainer) -> bool:
    """Whether the last batch made no optimizer step, as its gradients are still being accumulated; no hook says so."""
    return (
        bool((trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches) and not trainer.is_last_batch
    )


def validation_is_due(trainer: L.Trainer) -> bool:
    """Whether validation follows this training batch by the trainer's settings, not because the run is stopping.

    Lightning decides this after `on_train_batch_end`, from five settings, and tells no hook before it starts.
    """
    stop, trainer.should_stop = trainer.should_stop, False
    try:
        loop = trainer.fit_loop
        assert loop._data_fetcher is not None
        return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
    finally:
        trainer.should_stop = stop


def count_finished_epoch_once(trainer: L.Trainer) -> None:
    """Correct the counters of a run that continues at the end of an epoch; to be called in `on_train_start`.

    Where a run is measured in steps, Lightning runs that epoch once more, without batches, and counts it again: the
    progress of loops has no public interface.
    """
    loop = trainer.fit_loop
    if loop.restarted_on_epoch_end:
        for epochs in (loop.epoch_progress.current, loop.epoch_progress.total):
            epochs.processed -= 1  # type: ignore[attr-defined]
        loop.epoch_loop._batches_that_stepped -= 1


def run_validation_again(trainer: L.Trainer) -> None:
    """Begin a run that was stopped within a validation with that validation; to be called in `on_train_start`.

    By itself Lightning would continue after the validation.  This is what it does for a checkpoint that it has written
    within a validation, but from the first batch: a checkpoint does not hold the metrics of the batches before the stop.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    total, current = loop.batch_progress.total, loop.batch_progress.current
    for name, count in vars(current).items():
        setattr(total, name, getattr(total, name) - count)
    loop.restarting = False
    loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION


def begins_with_validation(trainer: L.Trainer) -> bool:
    """Whether a run that is resumed validates before it trains; known from `on_train_start` on."""
    return trainer.fit_loop.epoch_loop.val_loop.restarted_mid_evaluation


def after_signal_handlers(trainer: L.Trainer, install: Callable[[], None]) -> None:
    """Call `install` whenever Lightning has registered its own signal handlers; to be called in `setup`.

    No hook runs between this registration and the first barrier of a run.  Lightning's registration is kept, as it
    serves SLURM's requeueing on SIGUSR1 too.
    """
    connector = trainer._signal_connector
    connector.register_signal_handlers = partial(_register, connector, install)  # type: ignore[method-assign]


def _register(connector: Any, install: Callable[[], None]) -> None:
    type(connector).register_signal_handlers(connector)
    install()


def averaged_model(callback: WeightAveraging) -> AveragedModel:
    """The average that a callback of Lightning's keeps during a fit; it offers no access to it."""
    assert callback._average_model is not None
    return callback._average_model


# -------------------------------------------------------------------------------------------------------------- torch


def expect_no_first_step(optimizer: Optimizer) -> None:
    """Let a schedule advance before the optimizer's first step, which may be skipped, without torch's warning.

    To ignore the warning around each call would make Python forget which other warnings it has shown already.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]
