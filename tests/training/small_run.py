"""What the training tests share: a small run in a folder of its own."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

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
    return L.Trainer(
        default_root_dir=folder,
        callbacks=[monitor, History(), *callbacks, checkpoints],
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments | kwargs,
    )


def digits(**kwargs: Any) -> Digits:
    return Digits(**{"batch_size": 32, "limit": 128} | kwargs)
