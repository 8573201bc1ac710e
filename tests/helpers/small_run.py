"""What the training tests share: a small run in a folder of its own."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ProgressBar
from torch import Tensor

from ortho_vit.data import Digits
from ortho_vit.optim import StiefelSGD
from ortho_vit.training import Checkpoints, Classifier, History, OrthogonalityMonitor


def make_classifier(optimizer: Any = None, **kwargs: Any) -> Classifier:
    torch.manual_seed(0)
    arguments = {"constraint": "within", "num_classes": 10} | kwargs
    return Classifier("ortho_vit_digits", optimizer or partial(StiefelSGD, lr=0.1, momentum=0.9), **arguments)


def make_trainer(
    folder: Path,
    *callbacks: L.Callback,
    every_n_steps: int | None = None,
    threshold: float | None = 1e-3,
    **kwargs: Any,
) -> L.Trainer:
    arguments = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "num_sanity_val_steps": 0,
    }
    monitor, checkpoints = OrthogonalityMonitor(threshold=threshold), Checkpoints(every_n_steps=every_n_steps)
    history = [] if any(isinstance(callback, History) for callback in callbacks) else [History()]
    return L.Trainer(
        default_root_dir=folder,
        callbacks=[monitor, *history, *callbacks, checkpoints],
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        enable_model_summary=False,
        **arguments | kwargs,
    )


def digits(**kwargs: Any) -> Digits:
    return Digits(**{"batch_size": 32, "limit": 128} | kwargs)


def assert_same_bits(a, b, where=""):
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same_bits(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_bits(x, y, f"{where}/{i}")
    elif isinstance(a, Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b or (a != a and b != b), f"{where}: {a} and {b}"


class BadImage(L.Callback):
    """Replaces the second image of some batches, given as pairs of epoch and batch."""

    def __init__(self, *where, value=float("nan")):
        self.where, self.value = where, value

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) in self.where:
            batch[0][1] = self.value
