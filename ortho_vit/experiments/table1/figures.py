"""Learning curves, final errors and the learning-rate sweep."""

import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from ortho_vit.experiments.result import Result, legend_below, new_figure, save_figure
from ortho_vit.experiments.table1.compare import common_seed, summarize
from ortho_vit.experiments.table1.rows import (
    FACTORS,
    GROUPS,
    INTEGRATORS,
    LEARNING_RATE,
    ROWS,
    Row,
    rate_row,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"Stiefel": "tab:blue", "Projected": "tab:orange", "Regularized": "tab:green"}
COLOURS |= {"Momentumless": "tab:red", "AdamW": "tab:purple"}
LINES = {"within": "-", "across": "--", "none": ":"}


def available(result: Result) -> list[str]:
    """The figures for which there are runs."""
    done = {run["row"] for run in result.table}
    shown = {
        "curves": bool(result.series),
        "errors": not done.isdisjoint({*GROUPS["table"], *GROUPS["own"]}),
        "learning-rate": not done.isdisjoint(GROUPS["learning-rate"]),
    }
    return [name for name, show in shown.items() if show]


def draw(result: Result, folder: Path) -> list[Path]:
    """Draw what is available into `folder`; the files."""
    figures = {"curves": curves, "errors": errors, "learning-rate": learning_rate}
    paths = []
    for name in available(result):
        paths.append(folder / f"{result.name}-{name}.png")
        save_figure(figures[name](result), paths[-1])
    return paths


def _colour(row: Row) -> str:
    return next((colour for start, colour in COLOURS.items() if row.method.startswith(start)), "black")


def curves(result: Result) -> "Figure":
    """Test error and training loss against the epoch, mean over seeds: the SGD family left, the Adam family right."""
    figure, axes = new_figure(2, 2, (11, 8))
    for column, family in enumerate(("SGD", "Adam")):
        rows = [ROWS[name] for name in GROUPS["table"] if family in ROWS[name].method]
        for row in rows:
            _curve(axes[0][column], result, row, "test_accuracy")
            _curve(axes[1][column], result, row, "train_loss")
        axes[0][column].set(title=f"{family} family", ylabel="test error, %")
        axes[1][column].set(xlabel="epoch", ylabel="training loss")
        for axis in axes[:, column]:
            axis.locator_params(axis="x", integer=True)
        if axes[0][column].lines:
            axes[0][column].legend(fontsize=8, frameon=False)
    figure.suptitle(f"{result.settings['data']}, {result.settings['preset']}: mean over seeds")
    return figure


def _curve(axis: "Axes", result: Result, row: Row, column: str) -> None:
    by_epoch: dict[float, list[float]] = {}
    finished = {f"{row.name} {seed}" for seed in summarize(result, row.name).errors}
    for label, curve in result.series.items():
        if label in finished:
            for epoch, value in zip(curve["epoch"], curve[column], strict=True):
                by_epoch.setdefault(epoch, []).append(100 * (1 - value) if "accuracy" in column else value)
    if by_epoch:
        epochs = sorted(by_epoch)
        means = [statistics.fmean(by_epoch[epoch]) for epoch in epochs]
        marker = "o" if len(epochs) == 1 else None
        line = LINES[row.constraint]
        axis.plot(epochs, means, label=row.label, color=_colour(row), ls=line, lw=1.2, marker=marker)


def errors(result: Result) -> "Figure":
    """Every run as a dot, the mean as a bar."""
    names = [n for n in (*GROUPS["table"], *GROUPS["own"]) if summarize(result, n).errors]
    figure, axes = new_figure(1, 1, (9, 1.2 + 0.3 * len(names)))
    axis: Axes = axes
    for height, name in enumerate(reversed(names)):
        summary, colour = summarize(result, name), _colour(ROWS[name])
        axis.plot(list(summary.errors.values()), [height] * len(summary.errors), "o", color=colour, alpha=0.6)
        axis.plot(summary.mean or 0.0, height, "|", ms=16, color=colour)
    axis.set_yticks(range(len(names)), [ROWS[name].label for name in reversed(names)])
    axis.set_ylim(-0.7, len(names) - 0.3)
    axis.set(
        xlabel="test error, %", title=f"{result.settings['data']}, {result.settings['preset']}: every seed"
    )
    return figure


def learning_rate(result: Result) -> "Figure":
    """Test error of one seed against the learning rate; a cross at the top is a run that diverged."""
    figure, axes = new_figure(1, 1, (7, 4.5))
    axis: Axes = axes
    seed = common_seed(result, GROUPS["learning-rate"])
    for integrator, colour in zip(INTEGRATORS, ("tab:blue", "tab:red"), strict=True):
        rates, values, diverged = [], [], []
        for factor in FACTORS:
            summary = summarize(result, rate_row(integrator, factor), seed)
            rates.append(LEARNING_RATE * factor)
            values.append(math.nan if summary.mean is None else summary.mean)
            diverged += rates[-1:] if summary.diverged else []
        axis.semilogx(rates, values, "o-", color=colour, label=integrator)
        height = 0.97 - 0.04 * list(INTEGRATORS).index(integrator)  # one below the other
        axis.plot(diverged, [height] * len(diverged), "x", color=colour, transform=axis.get_xaxis_transform())
    axis.set_xticks([LEARNING_RATE * f for f in FACTORS], [f"{LEARNING_RATE * f:g}" for f in FACTORS])
    axis.minorticks_off()
    axis.set(xlabel="learning rate of all parameters", ylabel="test error, %")
    axis.set_title("StiefelSGD within heads, by integrator")
    legend_below(figure, axis, 2)
    return figure
