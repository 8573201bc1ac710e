"""The files that `predict` and `test` write: one row per image, and the confusion matrix of the classes."""

import csv
import io
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from ortho_vit.files import complete, partial_file, printable
from ortho_vit.training.same_data import class_names

DEFAULT = "predictions.csv"
STANDARD_OUTPUT = "-"
PREVIEW = 10  # rows
MOST_NAMED = 40  # classes whose names fit beside a confusion matrix
MOST_COUNTED = 20  # classes whose counts fit into its cells

Row = tuple[str, list[float]]  # the file of an image, and the probability of each class


class PredictionWriter(Callback):
    """Writes one row per image: its file, its most probable class, and the probability of that class.

    Rows are written as they are computed, into a hidden file that gets its name after the last row.  The file is UTF-8; the
    name of an image that is not UTF-8 keeps its bytes in CSV, and is escaped in JSON.

    Args:
        path: the file.  With the extension `.jsonl` each line is a JSON object, otherwise it is CSV; `-` writes CSV to the
            standard output.  By default `predictions.csv`, of which an earlier one is kept as `predictions-1.csv`, and so
            on.
        top_k: how many classes to name, the most probable first.
        probabilities: add the probability of every class.
        overwrite: replace a file that exists.
    """

    def __init__(
        self,
        path: str | None = None,
        top_k: int = 1,
        probabilities: bool = False,
        overwrite: bool = False,
    ) -> None:
        if top_k < 1:
            raise ValueError(f"PredictionWriter: top_k must be at least 1, got {top_k}")
        self.path, self.keep_earlier = path or DEFAULT, path is None and not overwrite
        self.top_k, self.probabilities, self.overwrite = top_k, probabilities, overwrite
        self.target: Path | None = None  # None for the standard output
        self.count = 0
        self.preview: list[list[str]] = []  # file, class and probability of the first images
        self._classes: list[str] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "predict":
            return
        self._classes = class_names(getattr(trainer, "datamodule", None))
        self.target, self.count, self.preview = None, 0, []
        if self.path == STANDARD_OUTPUT:
            if trainer.world_size > 1:
                raise ValueError(
                    f"PredictionWriter: {trainer.world_size} processes cannot share the standard output; "
                    "give a file as --predictions.path"
                )
            return
        target = Path(self.path)
        if trainer.global_rank:
            target = target.with_stem(f"{target.stem}-{trainer.global_rank}")
        if target.exists() and not (self.overwrite or self.keep_earlier):
            raise FileExistsError(
                f"{target} is there already; nothing was overwritten, choose another --predictions.path "
                "or add --predictions.overwrite true"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        self.target = target
        self._partial.write_bytes(b"")

    @property
    def _partial(self) -> Path:
        """The file until it is complete."""
        assert self.target is not None
        return partial_file(self.target)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.count:
            self._write(self._format([]))
        if self.target is not None:
            if self.keep_earlier and self.target.exists():
                self.target.rename(_free_name(self.target))
            complete(self._partial, self.target)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if self.target is not None:
            self._partial.unlink(missing_ok=True)

    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        names, probabilities = outputs
        rows = list(zip(map(str, names), probabilities.tolist(), strict=True))
        self._write(self._format(rows))
        for file, row in rows[: PREVIEW - len(self.preview)]:
            label, probability = self._top(row)[0]
            self.preview.append([printable(file), label, f"{probability:.1%}"])
        self.count += len(rows)

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "surrogateescape")
        if self.target is None:
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        else:
            with open(self._partial, "ab") as file:
                file.write(data)

    # ------------------------------------------------------------------------------------------- formats

    def _format(self, rows: list[Row]) -> str:
        return self._json_lines(rows) if self.path.endswith(".jsonl") else self._csv(rows)

    def _name(self, label: int) -> str:
        return self._classes[label] if self._classes else str(label)

    def _top(self, row: list[float]) -> list[tuple[str, float]]:
        """The most probable classes and their probabilities."""
        order = sorted(range(len(row)), key=row.__getitem__, reverse=True)
        return [(self._name(label), row[label]) for label in order[: self.top_k]]

    def _csv(self, rows: list[Row]) -> str:
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        if not self.count:
            writer.writerow(self._header(rows))
        for file, row in rows:
            top = [value for label, p in self._top(row) for value in (label, f"{p:.6f}")]
            writer.writerow([file, *top, *([f"{p:.6f}" for p in row] if self.probabilities else [])])
        return text.getvalue()

    def _header(self, rows: list[Row]) -> list[str]:
        columns, classes = ["file", "class", "probability"], len(rows[0][1]) if rows else self.top_k
        for k in range(2, min(self.top_k, classes) + 1):
            columns += [f"class_{k}", f"probability_{k}"]
        if rows and self.probabilities:
            columns += [f"p({self._name(label)})" for label in range(classes)]
        return columns

    def _json_lines(self, rows: list[Row]) -> str:
        lines = []
        for file, row in rows:
            top = [{"class": label, "probability": round(p, 6)} for label, p in self._top(row)]
            line: dict[str, Any] = {"file": file} | top[0]
            if self.top_k > 1:
                line["top"] = top
            if self.probabilities:
                line["probabilities"] = {self._name(label): round(p, 6) for label, p in enumerate(row)}
            lines.append(json.dumps(line) + "\n")
        return "".join(lines)


def _free_name(path: Path) -> Path:
    """`path` with the lowest number that no file has."""
    candidates = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    return next(candidate for candidate in candidates if not candidate.exists())


class PerClass(Callback):
    """Counts, during `test`, the images of each class by the class that was predicted for them.

    Writes three files, replacing those of an earlier test: `confusion.csv` and `confusion.png`, the confusion matrix, with
    one row per true class and one column per predicted class; `classes.csv`, each class's number of images and accuracy.

    Args:
        folder: where to write them; null: write nothing.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self.matrix: Tensor | None = None  # (true class, predicted class)
        self.classes: list[str] = []
        self._counts: MulticlassConfusionMatrix | None = None

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.folder is None:
            return
        n: int = pl_module.num_classes  # type: ignore[assignment]
        self.classes = class_names(getattr(trainer, "datamodule", None)) or [str(label) for label in range(n)]
        self._counts = MulticlassConfusionMatrix(n, validate_args=False).to(pl_module.device)

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if self._counts is not None:
            self._counts.update(outputs, batch[1])

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._counts is None or self.folder is None:
            return
        self.matrix = self._counts.compute().cpu()
        if trainer.is_global_zero:
            folder = Path(self.folder)
            folder.mkdir(parents=True, exist_ok=True)
            counts = [[name, *row] for name, row in zip(self.classes, self.matrix.tolist(), strict=True)]
            _write_csv(folder / "confusion.csv", [["true class", *self.classes], *counts])
            _write_csv(folder / "classes.csv", [["class", "images", "accuracy"], *self.rows()])
            draw_confusion(self.matrix, self.classes, folder / "confusion.png")

    def rows(self) -> list[list[str]]:
        """The name of each class, its number of images, and the share of these that was classified correctly."""
        assert self.matrix is not None
        totals, right = self.matrix.sum(1).tolist(), self.matrix.diagonal().tolist()
        return [
            [name, str(total), f"{hits / total:.4f}" if total else ""]
            for name, total, hits in zip(self.classes, totals, right, strict=True)
        ]


def _write_csv(path: Path, rows: list[list[Any]]) -> None:
    with open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def draw_confusion(matrix: Tensor, classes: Sequence[str], path: Path) -> None:
    """The confusion matrix as an image: each row's share by class, and the counts where they fit."""
    from matplotlib.figure import Figure  # on demand: it takes half a second to import

    n = len(matrix)
    size = min(max(5.0, 0.45 * n), 14.0)
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.subplots()
    share = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    image = axes.imshow(share.numpy(), vmin=0, vmax=1, cmap="Blues")
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    axes.set(xlabel="predicted class", ylabel="true class")
    if n <= MOST_NAMED:
        names = [printable(name).replace("$", r"\$") for name in classes]
        axes.set_xticks(range(n), names, rotation=90)
        axes.set_yticks(range(n), names)
    if n <= MOST_COUNTED:
        for i, row in enumerate(matrix.tolist()):
            for j, count in enumerate(row):
                colour = "white" if share[i, j] > 0.5 else "black"
                axes.text(j, i, str(count), ha="center", va="center", color=colour, fontsize=8)
    figure.savefig(path, dpi=110)
