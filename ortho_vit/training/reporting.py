"""What a run prints and logs: one line per epoch, a table of its history, curves, and a summary at the end."""

import contextlib
import csv
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ProgressBar, RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from rich.table import Table

from ortho_vit.optim.audit import audit
from ortho_vit.parameter import stiefel_parameters
from ortho_vit.training.checkpointing import run_folder

COLUMNS = ("train/loss", "train/accuracy", "val/loss", "val/accuracy", "orthogonality", "lr")


class History(Callback):
    """Keeps one row per epoch, part of every checkpoint, and writes it as `history.csv` and `curves.png`."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.curves: Path | None = None  # the image, once it is drawn
        self._validated = False

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if has_row(self.rows, trainer):
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name in COLUMNS}
        if not self._validated:  # those of an earlier epoch
            metrics = {name: value for name, value in metrics.items() if not name.startswith("val/")}
        self._validated = False
        metrics["lr"] = learning_rate(trainer)
        row = {"epoch": trainer.current_epoch, "step": trainer.global_step} | metrics
        self.rows = [*(r for r in self.rows if r["epoch"] < row["epoch"]), row]

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated = not trainer.sanity_checking

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = run_folder(trainer)
        if folder is None or not self.rows or not trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "history.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, ["epoch", "step", *COLUMNS])
            writer.writeheader()
            writer.writerows(self.rows)
        self.curves = folder / "curves.png"
        draw_curves(self.rows, self.curves)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = list(state_dict["rows"])


def has_row(rows: list[dict[str, Any]], trainer: L.Trainer) -> bool:
    """Whether rows by epoch have this epoch already: a run that is resumed at the end of an epoch ends it once more."""
    return bool(rows) and rows[-1]["step"] == trainer.global_step


def draw_curves(rows: list[dict[str, float]], path: Path) -> None:
    """Loss, accuracy, orthogonality error and learning rate against the epoch."""
    from matplotlib.figure import Figure  # on demand: it takes half a second to import
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 6), layout="constrained")
    panels = {
        "loss": ("train/loss", "val/loss"),
        "accuracy": ("train/accuracy", "val/accuracy"),
        "orthogonality error": ("orthogonality",),
        "learning rate": ("lr",),
    }
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        # two colours that colour-blind readers can distinguish
        for name, colour in zip(names, ("#0072B2", "#D55E00"), strict=False):
            epochs = [row["epoch"] + 1 for row in rows if name in row]
            values = [row[name] for row in rows if name in row]
            if values:
                marker = "o" if len(values) == 1 else None
                axes.plot(epochs, values, label=name.split("/")[0], marker=marker, color=colour)
        axes.set(title=title, xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(names) > 1 and axes.lines:
            axes.legend()
        axes.grid(alpha=0.3)
        errors = [row["orthogonality"] for row in rows if row.get("orthogonality", 0) > 0]
        if title == "orthogonality error" and errors:
            low, high = math.floor(math.log10(min(errors))), math.ceil(math.log10(max(errors)))
            axes.set_yscale("log")
            if low < high:
                axes.set_ylim(10**low, 10**high)  # whole decades, so that they are labelled
    figure.savefig(path, dpi=110)


class TensorBoard(TensorBoardLogger):
    """TensorBoard's log of a run.  If it can no longer be written, the run continues without it, with a warning."""

    _failed = False

    def _try(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._failed:
            return
        try:
            call(*args, **kwargs)
        except (OSError, ValueError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__ or error.__context__
            if not isinstance(cause, OSError):  # which Lightning reports as a value that cannot be logged
                raise
            self._failed = True
            reason = cause.strerror or str(cause)
            rank_zero_warn(
                f"the run goes on without TensorBoard: its log in {self.log_dir} cannot be written ({reason})"
            )

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self._try(super().log_metrics, *args, **kwargs)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self._try(super().log_hyperparams, *args, **kwargs)

    def save(self) -> None:
        self._try(super().save)

    def finalize(self, status: str) -> None:
        self._try(super().finalize, status)


@contextlib.contextmanager
def quiet_writer() -> Iterator[None]:
    """Hide the traceback of TensorBoard's thread if it cannot write: the error is raised in the main thread too."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not (
            issubclass(args.exc_type, OSError) and type(args.thread).__module__.startswith("tensorboard.")
        ):
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


class LearningRates(LearningRateMonitor):
    """Lightning's curves of the learning rate by step; where there are several groups, also the largest rate, as `lr`."""

    def __init__(self) -> None:
        super().__init__(logging_interval="step")

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_start(trainer, *args, **kwargs)
        several, every = len(trainer.optimizers[0].param_groups) > 1, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if several and every and (trainer.global_step + 1) % every == 0:
            for logger in trainer.loggers:
                logger.log_metrics({"lr": learning_rate(trainer)}, step=trainer.global_step)


class HyperParameters(Callback):
    """Writes the model's hyper-parameters, and other values of the run, to TensorBoard's HPARAMS page, which compares runs.

    Lightning's logger does so only together with a metric of its own at step 0; this one lets the page use the run's curves.

    Args:
        others: further values, such as those of the data.
    """

    METRICS = ("val/accuracy", "val/loss", "train/loss", "orthogonality")  # the page shows their last values

    def __init__(self, others: Mapping[str, Any]) -> None:
        self.others = dict(others)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        from torch.utils.tensorboard.summary import hparams  # on demand: it imports TensorBoard

        values = dict(flat(dict(pl_module.hparams) | self.others))
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                # `SummaryWriter.add_hparams` would write them, and zeros for the metrics, to a log in a subfolder
                for summary in hparams(values, dict.fromkeys(self.METRICS, 0)):
                    logger.experiment.file_writer.add_summary(summary)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Nested plain values with dotted names; `class_path` and `init_args` become the class's name and its arguments."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and "class_path" in value:
            yield name, str(value["class_path"]).rpartition(".")[2]
            yield from flat(value.get("init_args") or {}, f"{name}.")
        elif isinstance(value, Mapping):
            yield from flat(value, f"{name}.")
        elif value is not None:
            yield name, value if isinstance(value, bool | int | float) else str(value)


class StartLines(Callback):
    """Prints once which data was found, if the data module can describe it, and which parameters move by which rule."""

    def __init__(self) -> None:
        self._printed = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        describe_data = getattr(getattr(trainer, "datamodule", None), "describe", None)
        if describe_data is not None and trainer.is_global_zero and not self._printed:
            self._printed = True
            piped = stage == "predict" and any(getattr(c, "path", None) == "-" for c in trainer.callbacks)  # type: ignore[attr-defined]
            print(describe_data(), file=sys.stderr if piped else sys.stdout, flush=True)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            print(audit(getattr(pl_module, "model", pl_module), trainer.optimizers).summary, flush=True)


class Bar(RichProgressBar):
    """Lightning's bar with the training loss and the validation accuracy."""

    SECONDS = 0.5  # between two looks at the loss, each of which waits for the device

    def __init__(self) -> None:
        super().__init__()
        self._next, self._shown = 0.0, dict[str, Any]()

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        if time.monotonic() >= self._next:
            self._next, metrics = time.monotonic() + self.SECONDS, trainer.callback_metrics
            for label, name, form in (
                ("loss", "train/loss_step", ".4f"),
                ("val accuracy", "val/accuracy", ".2%"),
            ):
                if name in metrics:
                    self._shown[label] = f"{float(metrics[name]):{form}}"
        others = super().get_metrics(trainer, pl_module)
        others.pop("v_num", None)
        return others | self._shown


class EpochLines(ProgressBar):
    """One plain line per epoch, for logs and pipes; a terminal gets Lightning's progress bar instead.

    Args:
        history: the callback that has collected the numbers of the epoch.
    """

    def __init__(self, history: History) -> None:
        super().__init__()
        self._history, self._enabled, self._started = history, True, 0.0

    def disable(self) -> None:  # also in all processes but the first
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._started = time.monotonic()  # an epoch that is resumed does not start again

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._started = time.monotonic()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        row = self._history.rows[-1]
        epochs = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
        parts = [f"epoch {trainer.current_epoch + 1}{epochs}"]
        for label, name, form in (
            ("loss", "train/loss", ".4f"),
            ("accuracy", "train/accuracy", ".2%"),
            ("val loss", "val/loss", ".4f"),
            ("val accuracy", "val/accuracy", ".2%"),
            ("orthogonality", "orthogonality", ".1e"),
            ("lr", "lr", ".3g"),
        ):
            if name in row:
                parts.append(f"{label} {row[name]:{form}}")
        if self._enabled:
            print("  ".join(parts) + f"  {time.monotonic() - self._started:.1f} s", flush=True)


def learning_rate(trainer: L.Trainer) -> float:
    """The largest learning rate of all parameter groups; with `layer_decay`, that of the last layers."""
    return max(float(group["lr"]) for group in trainer.optimizers[0].param_groups)


def progress_bar(history: History) -> ProgressBar:
    """Lightning's bar on a terminal, lines elsewhere."""
    return Bar() if sys.stdout.isatty() else EpochLines(history)


def describe(model: torch.nn.Module, name: str) -> str:
    """One line about a model: its size, and how much of it is constrained."""
    line = f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters"
    blocks = [X for _, p in stiefel_parameters(model) for X in p.matrices()]
    if blocks:
        counts = Counter(f"{rows}×{columns}" for rows, columns in (X.shape for X in blocks))
        (shape, count), *others = counts.items()
        line += f", {sum(X.numel() for X in blocks):,} of them in {count} orthonormal blocks of {shape}"
        line += "".join(f", {count} of {shape}" for shape, count in others)
    return line


def named_for(data: Any, results: dict[str, Any]) -> dict[str, Any]:
    """The results of `test`, named `val/...` if the test images are those of the validation."""
    used = getattr(data, "test_set", None)
    validated_only = used is not None and used is getattr(data, "val_set", None)
    return {name.replace("test/", "val/") if validated_only else name: x for name, x in results.items()}


def labelled(results: dict[str, Any]) -> dict[str, str]:
    """Metrics as rows of a summary."""
    return {
        name.replace("/", " ").replace("_", " "): f"{value:.2%}" if "accuracy" in name else f"{value:.4f}"
        for name, value in results.items()
    }


def summary(rows: Mapping[str, str]) -> str:
    """Names and values as a table without a header."""
    return as_table((), rows.items())


def as_table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Rows under a header, plain if the output is not a terminal; nothing in them is markup, whatever a file is called."""
    table = Table(*columns, show_header=bool(columns))
    for row in rows:
        table.add_row(*row)
    for column in table.columns:
        column.overflow = "fold"
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()
