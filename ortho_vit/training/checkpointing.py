"""Checkpoints that a kill cannot damage: `last.ckpt` and `best.ckpt`, each complete at any time.

They are written at the end of an epoch, after validation, and every `every_n_steps` optimizer steps within one, never
between two batches whose gradients are being accumulated.  From any of them a run continues exactly as if it had not been
interrupted.  A run that a signal stops writes one where it stops; if that is within a validation, the resumed run begins
with this validation.  While a run is active, no other process can write into its folder.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from ortho_vit.errors import DivergedError, UsageError
from ortho_vit.files import lock, replacing
from ortho_vit.models.weights import read_checkpoint
from ortho_vit.optim.base import all_finite
from ortho_vit.training.lightning_internals import is_accumulating, run_validation_again, validation_is_due
from ortho_vit.training.stopping import signals


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames, and reads with `weights_only=True`.

    Lightning's own writes to the system's temporary folder first, from where a move to another disk is a copy that can
    be interrupted.
    """

    def __init__(self, preloaded: "Preloaded | None" = None) -> None:
        super().__init__()
        self._preloaded = preloaded

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        with _replacing(Path(path)) as partial, open(partial, "wb") as file:
            torch.save(checkpoint, file)

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        preloaded, self._preloaded = self._preloaded, None
        if preloaded is not None and preloaded.file == _identity(Path(path)):
            return preloaded.content
        return read_checkpoint(path, map_location)


class Preloaded:
    """A checkpoint that is read, with `read`, before the trainer asks for it, and the identity of its file at that time."""

    def __init__(self, path: Path, read: Callable[[str], dict[str, Any]]) -> None:
        self.file = _identity(path)
        self.content = read(str(path))


def _identity(path: Path) -> tuple[int, ...] | None:
    """Numbers that change when a file is replaced or modified; None where there is no file, which reading it reports."""
    if not path.is_file():
        return None
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Checkpoints(Checkpoint):
    """Keeps `last.ckpt` and, where there is validation, `best.ckpt` in the run's folder `checkpoints`.

    Args:
        monitor: the metric that decides which checkpoint is best.
        mode: whether a larger ("max") or a smaller ("min") value is better.
        every_n_steps: write `last.ckpt` also every this many optimizer steps; null: only at the ends of epochs.
    """

    def __init__(
        self,
        monitor: str = "val/accuracy",
        mode: Literal["max", "min"] = "max",
        every_n_steps: int | None = None,
    ) -> None:
        super().__init__()
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"Checkpoints: every_n_steps must be at least 1 or null, got {every_n_steps}")
        self.monitor, self.mode, self.every_n_steps = monitor, mode, every_n_steps
        self.best_score: float | None = None
        self.folder: Path | None = None
        self.preloaded: Preloaded | None = None  # what the trainer is going to load, if it was read already
        self._validated = False
        self._validating = False  # whether a resumed run has to run its validation again
        self._saved_step = -1
        self._claimed: Path | None = None
        self._lock: IO[str] | None = None

    # ----------------------------------------------------------------------------------- the run's folder

    def claim(self, folder: Path) -> None:
        """Lock the folder of a run until training ends.  Raises RuntimeError where another process trains in it."""
        if self._claimed == folder.resolve():
            return
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = lock(folder / ".lock")
        except BlockingIOError as error:
            raise RuntimeError(
                f"the run in {folder} is still going on ({error}); nothing was changed.  Wait until it has ended, or "
                "stop it; without --ckpt_path a new run starts in a folder of its own"
            ) from error
        self._claimed = folder.resolve()

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
        self._lock = self._claimed = None

    def _claim_for_all(self, trainer: L.Trainer, folder: Path) -> None:
        """Claim the folder in the first process; if that fails, all processes raise the error."""
        problem = None
        if trainer.is_global_zero:
            try:
                self.claim(folder)
            except RuntimeError as error:
                problem = str(error)
        problem = trainer.strategy.broadcast(problem)
        if problem is not None:
            raise RuntimeError(problem)

    def __getstate__(self) -> dict[str, Any]:
        """The state for spawned processes, without the lock, which stays with the process that starts them."""
        return self.__dict__ | {"_lock": None, "preloaded": None}

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.release()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self.release()

    # ------------------------------------------------------------------------------------------- writing

    @property
    def last_path(self) -> Path | None:
        return self._existing("last.ckpt")

    @property
    def best_path(self) -> Path | None:
        """The best checkpoint, or without validation the last."""
        return self._existing("best.ckpt") or self.last_path

    @property
    def best_model_path(self) -> str:
        """The same path, under the name that Lightning copies back from spawned processes."""
        return str(self.best_path or "")

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        self.folder = Path(path).parent if path else None

    def _existing(self, name: str) -> Path | None:
        path = self.folder / name if self.folder else None
        return path if path and path.is_file() else None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO(self.preloaded)
        self.preloaded = None
        if stage == "fit" and (run := run_folder(trainer)):
            self._claim_for_all(trainer, run)
            self.folder = run / "checkpoints"

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING and trainer.ckpt_path:
            refuse_to_lose_steps(Path(trainer.ckpt_path), checkpoint["global_step"])

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        last, resumed = self.last_path, trainer.ckpt_path
        if last and not (resumed and Path(resumed).resolve().parent == last.resolve().parent):
            other = "--trainer.default_root_dir"
            if trainer.logger:
                other = f"the save_dir, name or version of {type(trainer.logger).__name__}"
            raise FileExistsError(
                f"{last} is there already; nothing was overwritten.  "
                f"Continue it with --ckpt_path {last}, or choose another folder: {other}"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._validating:
            run_validation_again(trainer)
        self._validating = False

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        due = self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
        if not (due or _is_stopping(trainer)) or is_accumulating(trainer):
            return
        if not (trainer.is_last_batch or validation_is_due(trainer)):  # a run resumed from here would skip it
            self._save(trainer)

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if signals.interrupts_validation:
            self._validating = True
            self._save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save a better model now if this is mid-epoch; at the end of an epoch, `on_train_epoch_end` does."""
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        self._validated = trainer.is_last_batch
        if self._validated:
            return
        if self._improves(trainer):
            self._write(trainer, "best.ckpt")
        if _is_stopping(trainer) and not is_accumulating(trainer):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.should_stop and not trainer.is_last_batch:
            return  # stopped mid-epoch, and saved there: to resume as if it were over would leave out the rest
        validated, self._validated = self._validated, False
        improved = False
        try:
            improved = validated and self._improves(trainer)
        finally:  # the epoch is saved also where the monitor is missing
            self._save(trainer, improved)

    def _improves(self, trainer: L.Trainer) -> bool:
        """Whether the last score is the best so far, or equal to it; it then becomes `best_score`."""
        if self.monitor not in trainer.callback_metrics:
            have = ", ".join(sorted(trainer.callback_metrics))
            raise ValueError(f"Checkpoints: monitor {self.monitor!r} is not measured; there are {have}")
        score = trainer.callback_metrics[self.monitor].item()
        best = score if self.best_score is None else self.best_score
        improved = score >= best if self.mode == "max" else score <= best  # never where it is NaN
        if improved:
            self.best_score = score
        return improved

    def _save(self, trainer: L.Trainer, improved: bool = False) -> None:
        """Write `best.ckpt` first: a run that is killed before `last.ckpt` is written resumes from the older one."""
        if improved or trainer.global_step != self._saved_step:
            self._saved_step = trainer.global_step
            self._write(trainer, "best.ckpt" if improved else "last.ckpt")
            if improved and self.folder and trainer.is_global_zero:
                _copy(self.folder / "best.ckpt", self.folder / "last.ckpt")

    def _write(self, trainer: L.Trainer, name: str) -> None:
        """Write a checkpoint, or raise DivergedError: weights may overflow where loss and gradient do not."""
        if self.folder is None:
            return
        weights = trainer.lightning_module.state_dict()
        floating = {key: value for key, value in weights.items() if value.is_floating_point()}
        if not all_finite(list(floating.values())):
            bad = next(key for key, value in floating.items() if not value.isfinite().all())
            raise DivergedError(
                f"{bad} is not finite after step {trainer.global_step}, so no checkpoint was written and the last one "
                "is good; lower the learning rate"
            )
        trainer.save_checkpoint(self.folder / name)

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "step": self._saved_step, "validating": self._validating}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score, self._saved_step = state_dict["best_score"], state_dict["step"]
        self._validating = state_dict.get("validating", False)


def refuse_to_lose_steps(resumed: Path, step: int) -> None:
    """Raise UsageError if the run has a `last.ckpt` of a later step than `resumed`, which would be overwritten."""
    last = resumed.with_name("last.ckpt")
    if not last.is_file() or last.samefile(resumed):
        return
    kept = read_checkpoint(last).get("global_step", 0)
    if kept > step:
        raise UsageError(
            f"{resumed} is of step {step:,}, and to resume it would overwrite {last} of step {kept:,}.  Continue with "
            f"--ckpt_path {last}, or start a new run from its weights with --model.weights {resumed}"
        )


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """`files.replacing`, with an error that says how much room the disk has."""
    try:
        with replacing(path, only_writer=True) as partial:
            yield partial
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError where a disk is full
        raise OSError(_not_written(path, error)) from error


def _not_written(path: Path, error: Exception) -> str:
    """Why a file could not be written, and how much room its disk has."""
    disk = path.parent.resolve()
    while not os.path.ismount(disk):
        disk = disk.parent
    errors = [error, error.__cause__, error.__context__]
    full = any(isinstance(e, OSError) and e.errno == errno.ENOSPC for e in errors)
    reason = "the disk is full" if full else getattr(error, "strerror", None) or " ".join(str(error).split())
    before = "the one before is kept" if path.is_file() else "nothing was kept"
    free = shutil.disk_usage(disk).free / 2**20
    return (
        f"{path} could not be written: {reason} ({disk} has {free:,.0f} MiB free); {before}.  Make room, or choose another "
        "disk with --trainer.default_root_dir"
    )


def _is_stopping(trainer: L.Trainer) -> bool:
    """Whether training ends after this step: a callback has asked for it, or a signal."""
    return trainer.should_stop or bool(signals.agreed)


def is_trial(trainer: L.Trainer) -> bool:
    """Whether the run is a `fast_dev_run`, which leaves nothing behind."""
    return bool(getattr(trainer, "fast_dev_run", False))


def run_folder(trainer: L.Trainer) -> Path | None:
    """The folder that a run writes into, or None for a `fast_dev_run`.  Every process must call this."""
    return None if is_trial(trainer) else Path(trainer.log_dir or trainer.default_root_dir)


def _copy(source: Path, target: Path) -> None:
    """A hard link, as checkpoints are never modified in place, or a copy where the file system has no links."""
    with _replacing(target) as partial:
        partial.unlink(missing_ok=True)
        try:
            os.link(source, partial)
        except OSError:
            shutil.copyfile(source, partial)
