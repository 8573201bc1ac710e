"""The hyper-parameters of a run for TensorBoard's HPARAMS page, which compares runs by them."""

from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

METRICS = ("val/accuracy", "val/loss", "train/loss", "orthogonality")  # whose last values stand beside them


class HyperParameters(Callback):
    """Writes the model's hyper-parameters, and some others, where TensorBoard's HPARAMS page looks for them.

    Lightning's logger does so only with a metric, which it would log at step 0; here the page takes the run's own curves.

    Args:
        others: further values, such as those of the data.
    """

    def __init__(self, others: Mapping[str, Any] | None = None) -> None:
        self.others = dict(others or {})

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        values = dict(flat(dict(pl_module.hparams) | self.others))
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                _write(logger, values)


def _write(logger: TensorBoardLogger, values: dict[str, Any]) -> None:
    from torch.utils.tensorboard.summary import hparams

    writer = logger.experiment._get_file_writer()
    for summary in hparams(values, dict.fromkeys(METRICS, 0)):
        writer.add_summary(summary)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Nested plain values by dotted names; a class with its arguments by its own name and theirs."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and "class_path" in value:
            yield name, str(value["class_path"]).rpartition(".")[2]
            yield from flat(value.get("init_args") or {}, f"{name}.")
        elif isinstance(value, Mapping):
            yield from flat(value, f"{name}.")
        elif value is not None:
            yield name, value if isinstance(value, bool | int | float) else str(value)
