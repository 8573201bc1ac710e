"""SIGTERM and Ctrl-C: a run ends after an optimizer step, in all its processes, with a checkpoint of that step.

During training a signal is only recorded.  The processes of a run agree on it in the reduction that each optimizer step
has anyway (finite_steps.py), so a signal to one of them is enough, and all end after the same step: `Checkpoints` writes
`last.ckpt`, and `Stopped` is raised before the next batch.  During validation they agree before each batch; the checkpoint
is of the step before the validation, which a resumed run begins with.  A second Ctrl-C ends the process at once.  At any
other time there is nothing to save, and `Stopped` is raised wherever the signal arrives.

Lightning's own handler of SIGTERM starts a broadcast wherever the signal arrives, which the other processes do not
expect, and ends the run without an exit code; so it is replaced.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from ortho_vit.training.lightning_internals import after_signal_handlers, is_accumulating

NUMBERS = (signal.SIGINT, signal.SIGTERM)
ONE_PRESS = 1.0  # seconds within which a second SIGINT is the same Ctrl-C, forwarded by a launcher
WORKER_SECONDS = 10  # that a data loader's worker survives SIGTERM, so that the run can stop first


class Stopped(SystemExit):
    """A signal has ended a command.  The exit code is the shell's for that signal: 130 or 143.

    `step` of `steps` is where training stopped, in all processes; None where it was not under way.
    """

    def __init__(self, signum: int, step: int | None = None, steps: float | None = None) -> None:
        super().__init__(128 + signum)
        self.signum, self.step, self.steps = signum, step, steps


class Signals:
    """The signals that this process has received, and what the processes of the run have agreed on."""

    def __init__(self) -> None:
        self.received = 0  # the number of the signal
        self.agreed = 0  # by all processes of the run
        self.interrupts_validation = False  # the one that is under way
        self._at_step = False  # whether to wait for the end of an optimizer step
        self._since = 0.0
        self._process = os.getpid()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Raise Stopped for a signal that arrives within this context."""
        before = {number: signal.getsignal(number) for number in NUMBERS}
        self.received = self.agreed = 0
        self.install()
        try:
            yield
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in before.items():
                    signal.signal(number, handler)

    def install(self) -> None:
        """Handle the signals that are not ignored, as SIGINT is in a shell's background jobs."""
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self._handle)

    def wait_for_step(self, wait: bool) -> None:
        """From now on, record signals until the end of a step (or, if not `wait`, raise Stopped at once)."""
        self._at_step, self.interrupts_validation = wait, False
        if wait:
            self.received = self.agreed = 0

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker of a data loader, which has inherited the handler
            if signum == signal.SIGTERM:
                signal.alarm(WORKER_SECONDS)
            return
        first, now = not self.received, time.monotonic()
        if signum == signal.SIGINT and not first and now - self._since > ONE_PRESS:
            os._exit(128 + signum)
        self.received = max(self.received, signum)
        if not first:
            return
        self._since = now
        if not self._at_step:
            raise Stopped(signum)
        if signum == signal.SIGINT and sys.stderr.isatty():  # not by `print`, which may have been interrupted
            os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")


signals = Signals()


class StopOnSignal(Callback):
    """Ends training where the processes of the run have agreed to stop."""

    def __init__(self) -> None:
        self._can_interrupt = False  # this validation

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        after_signal_handlers(trainer, signals.install)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        signals.wait_for_step(True)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if signals.agreed:
            self._stop(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Decide whether this validation may be interrupted.

        A run cannot be resumed while gradients are being accumulated, nor after its last step.
        """
        training = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        ended = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        self._can_interrupt = (
            training and not ended and not is_accumulating(trainer) and _same_number_of_batches(trainer)
        )

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self._can_interrupt:
            (signals.agreed,) = largest(trainer, signals.received)
            signals.interrupts_validation = bool(signals.agreed)  # `Checkpoints` runs next and saves

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if signals.interrupts_validation:
            self._stop(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (signals.agreed,) = largest(trainer, signals.received)
        if signals.agreed:
            self._stop(trainer)
        signals.wait_for_step(False)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            signals.wait_for_step(False)

    def _stop(self, trainer: L.Trainer) -> None:
        raise Stopped(signals.agreed, trainer.global_step, trainer.estimated_stepping_batches)


def largest(trainer: L.Trainer, *values: int) -> list[int]:
    """The largest of each value over all processes, in one reduction.  Every process must call this."""
    if trainer.world_size == 1:
        return list(values)
    strategy = trainer.strategy
    return strategy.reduce(torch.tensor(values, device=strategy.root_device), reduce_op="max").tolist()


def _same_number_of_batches(trainer: L.Trainer) -> bool:
    """Whether all processes validate on the same number of batches, so that they can agree before each."""
    count = sum(trainer.num_val_batches)
    if trainer.world_size == 1:
        return True
    if count == math.inf:
        return False
    most, least = largest(trainer, int(count), -int(count))
    return most == -least
