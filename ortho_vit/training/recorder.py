"""The result of a run as a file, for programs that compare runs.

    progress.json   every few seconds: epoch and step, of how many, and the seconds spent
    result.json     once, at the end:  "status" is "finished" or "diverged"; the test set's loss and accuracy, a curve
                    with one point per epoch, seconds, orthogonality error, versions

A run whose loss, gradient or step is no longer finite, or that left the manifold it should keep, has diverged.  That is
a result, with its step and reason; any other error leaves no `result.json`.
"""

import platform
import re
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback

from ortho_vit.errors import DivergedError
from ortho_vit.files import finite_or_none, write_json
from ortho_vit.parameter import stiefel_parameters
from ortho_vit.stiefel import orthogonality_error
from ortho_vit.training.attention_statistics import AttentionStatistics
from ortho_vit.training.checkpointing import run_folder
from ortho_vit.training.reporting import has_row, learning_rate

_PROGRESS_SECONDS = 2.0


class Recorder(Callback):
    """Writes `result.json` and `progress.json` into the run's folder; see the top of this file.

    The test set is evaluated after every epoch for the curve, and nothing is chosen by it.  `seconds` is the time spent
    training, without those evaluations, over all the parts of a run that was resumed.

    Args:
        every_n_epochs: evaluate the test set after every this many epochs, and after the last; other points of the curve
            have no test accuracy.
    """

    def __init__(self, every_n_epochs: int = 1) -> None:
        if every_n_epochs < 1:
            raise ValueError(f"Recorder: every_n_epochs must be at least 1, got {every_n_epochs}")
        self.every_n_epochs = every_n_epochs
        self.curve: list[dict[str, Any]] = []
        self.seconds = self.evaluation_seconds = 0.0
        self.folder: Path | None = None
        self._mark = self._written = 0.0
        self._validated = False  # in this epoch

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.folder = run_folder(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._mark = time.monotonic()
        self._write_progress(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._count_time()
        if self._mark - self._written > _PROGRESS_SECONDS:
            self._write_progress(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated = not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._count_time()
        if has_row(self.curve, trainer):
            return
        metrics, epoch = trainer.callback_metrics, trainer.current_epoch + 1
        tested = epoch % self.every_n_epochs == 0 or epoch == trainer.max_epochs
        point: dict[str, Any] = {
            "epoch": epoch,
            "step": trainer.global_step,
            "train_loss": finite_or_none(metrics.get("train/loss")),
            "train_accuracy": finite_or_none(metrics.get("train/accuracy")),
            "val_accuracy": finite_or_none(metrics.get("val/accuracy")) if self._validated else None,
            **(evaluate(trainer, pl_module) if tested else {"test_loss": None, "test_accuracy": None}),
            "orthogonality": _orthogonality(pl_module),
            "lr": learning_rate(trainer),
            "seconds": round(self.seconds, 2),
        }
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, AttentionStatistics):
                point["attention"] = callback.latest
        self._validated = False
        self.curve.append(point)
        self.evaluation_seconds += time.monotonic() - self._mark
        self._mark = time.monotonic()
        self._write_progress(trainer)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = trainer.callback_metrics
        test = {f"test_{name}": finite_or_none(metrics.get(f"test/{name}")) for name in ("accuracy", "loss")}
        self._write_result(pl_module, {"status": "finished", "step": trainer.global_step, **test})

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, DivergedError):
            reason = re.sub(r" with samples [\d, ]+", "", " ".join(str(exception).split()))[:200]
            self._write_result(
                pl_module, {"status": "diverged", "step": trainer.global_step, "reason": reason}
            )

    def state_dict(self) -> dict[str, Any]:
        return {"curve": self.curve, "seconds": [self.seconds, self.evaluation_seconds]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.curve = list(state_dict["curve"])
        self.seconds, self.evaluation_seconds = state_dict["seconds"]

    # --------------------------------------------------------------------------------------------- writing

    def _count_time(self) -> None:
        now = time.monotonic()
        self.seconds += now - self._mark
        self._mark = now

    def _write_progress(self, trainer: L.Trainer) -> None:
        self._written = time.monotonic()
        if self.folder is not None and trainer.is_global_zero:
            progress = {
                "epoch": trainer.current_epoch,
                "epochs": trainer.max_epochs,
                "step": trainer.global_step,
                "steps": int(trainer.estimated_stepping_batches),
                "seconds": round(self.seconds + self.evaluation_seconds, 1),
            }
            write_json(self.folder / "progress.json", progress)

    def _write_result(self, pl_module: L.LightningModule, result: dict[str, Any]) -> None:
        if self.folder is None or pl_module.global_rank:
            return
        result |= {
            "seconds": round(self.seconds, 1),
            "orthogonality": _orthogonality(pl_module),
            "parameters": sum(p.numel() for p in pl_module.parameters()),
            "curve": self.curve,
            "versions": _versions(pl_module.device),
        }
        write_json(self.folder / "result.json", result)


@torch.no_grad()
def evaluate(trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float | None]:
    """Loss and accuracy on the test set of the weights as they are (not of an average); the model stays in training mode."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    data.setup("test")
    pl_module.eval()
    loss = correct = count = 0.0
    for images, labels in data.test_dataloader():
        images = trainer.precision_plugin.convert_input(images.to(pl_module.device))
        labels = labels.to(pl_module.device)
        with trainer.precision_plugin.forward_context():
            logits = pl_module.model(images)  # type: ignore[operator]
        loss += F.cross_entropy(logits.float(), labels, reduction="sum").item()
        correct += (logits.argmax(-1) == labels).sum().item()
        count += len(labels)
    pl_module.train()
    return {"test_loss": finite_or_none(loss / count), "test_accuracy": correct / count}


def _orthogonality(pl_module: L.LightningModule) -> float | None:
    constrained = any(True for _ in stiefel_parameters(pl_module))
    return finite_or_none(orthogonality_error(pl_module)) if constrained else None


def _versions(device: torch.device) -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": L.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": str(torch.get_num_threads()),
    }
