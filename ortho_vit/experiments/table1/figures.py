"""Learning curves, final errors, the learning-rate sweep, the contrasts and the statistics of their attention."""

import math
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortho_vit.experiments import figure as style
from ortho_vit.experiments.figure import legend_below, new_figure, save_figure
from ortho_vit.experiments.result import Result
from ortho_vit.experiments.table1 import rows
from ortho_vit.experiments.table1.compare import common_seed, paired_contrast, summarize
from ortho_vit.experiments.table1.presets import PRESETS
from ortho_vit.experiments.table1.rows import CONTRASTED, CONTROLS, GROUPS, ROWS, Row, at_rate, chosen

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"Stiefel": style.BLUE, "Projected": style.ORANGE, "Regularized": style.GREEN}
COLOURS |= {"Momentumless": style.VERMILION, "AdamW": style.PURPLE}
CONTRAST_COLOURS = dict(
    zip(CONTRASTED, (style.BLUE, style.ORANGE, style.GREEN, style.VERMILION, style.GREY), strict=True)
)
LINES = {"within": "-", "across": "-", "none": "--"}


def available(result: Result) -> list[str]:
    """The names of the figures for which there are runs."""
    done, groups = {run["row"] for run in result.table}, PRESETS[result.settings["preset"]].groups
    table = "table" in groups
    shown = {
        "curves": table and bool(result.series),
        "errors": table and not done.isdisjoint({*GROUPS["table"], *GROUPS["own"]}),
        "learning-rate": table and not done.isdisjoint(GROUPS["learning-rate"]),
        "attention": "contrasts" in groups and any("entropy" in curve for curve in result.series.values()),
    }
    return [name for name, show in shown.items() if show]


def draw(result: Result, folder: Path) -> list[Path]:
    """Draw the available figures into `folder` and return their files."""
    figures = {"curves": curves, "errors": errors, "learning-rate": learning_rate, "attention": attention}
    paths = []
    for name in available(result):
        paths.append(folder / f"{result.name}-{name}.png")
        save_figure(figures[name](result), paths[-1])
    return paths


def _colour(row: Row) -> str:
    return next((colour for start, colour in COLOURS.items() if row.method.startswith(start)), "black")


def curves(result: Result) -> "Figure":
    """Test error and training loss against the epoch: mean over seeds, and the range of the seeds as a band.

    The SGD family is on the left, the Adam family on the right; within heads above, across heads below, each with the
    rows without a constraint.
    """
    figure, axes = new_figure(4, 2, 11.5, sharex=True)
    for i, column in product((1, 3), (0, 1)):
        axes[i][column].sharey(axes[i - 1][column])
    for column, family in enumerate(("SGD", "Adam")):
        members = [ROWS[name] for name in GROUPS["table"] if family in ROWS[name].method]
        for i, constraint in enumerate(("within", "across")):
            for row in members:
                if row.constraint in (constraint, "none"):
                    _curve(axes[i][column], result, row, "test_accuracy")
                    _curve(axes[2 + i][column], result, row, "train_loss")
            axes[i][column].set_title(f"{family} family, {constraint} heads")
            axes[2 + i][column].set_title(f"{family} family, {constraint} heads")
            if axes[i][column].lines:
                axes[i][column].legend(fontsize=8, frameon=False)
        axes[3][column].set(xlabel="epoch")
        axes[3][column].locator_params(axis="x", integer=True)
    for i in range(4):
        axes[i][0].set(ylabel="test error, %" if i < 2 else "training loss")
    figure.suptitle(
        f"{result.settings['data']}, {result.settings['preset']}: mean over seeds, bands from the lowest to the highest",
        fontsize=11,
    )
    return figure


def _curve(
    axis: "Axes", result: Result, row: Row, column: str, colour: str | None = None, line: str | None = None
) -> None:
    """Draw the mean over the seeds that finished, and their range as a band."""
    finished = [f"{row.name} {seed}" for seed in summarize(result, row.name).errors]
    measured = [label for label in finished if column in result.series.get(label, {})]
    by_epoch = {}
    for epoch, numbers in sorted(result.grouped(measured, "epoch", column).items()):
        shown = [100 * (1 - v) if "accuracy" in column else v for v in numbers if not math.isnan(v)]
        if shown:
            by_epoch[epoch] = shown
    if by_epoch:
        epochs, values = list(by_epoch), list(by_epoch.values())
        colour, line = colour or _colour(row), line or LINES[row.constraint]
        marker = "o" if len(epochs) == 1 else None
        means = [*map(statistics.fmean, values)]
        axis.plot(epochs, means, label=row.label, color=colour, ls=line, lw=1.4, marker=marker)
        if max(map(len, values)) > 1:
            lowest, highest = [*map(min, values)], [*map(max, values)]
            axis.fill_between(epochs, lowest, highest, color=colour, alpha=0.13, lw=0)


def errors(result: Result) -> "Figure":
    """Every run as a dot, the mean as a bar."""
    names = [n for n in (*GROUPS["table"], *GROUPS["own"]) if summarize(result, n).errors]
    figure, axis = new_figure(1, 1, 1.2 + 0.28 * len(names))
    for height, name in enumerate(reversed(names)):
        summary, colour = summarize(result, name), _colour(ROWS[name])
        axis.plot(summary.values, [height] * summary.n, "o", color=colour, alpha=0.6)
        axis.plot(summary.mean or 0.0, height, "|", ms=16, color=colour)
    axis.set_yticks(range(len(names)), [ROWS[name].label for name in reversed(names)])
    axis.set_ylim(-0.7, len(names) - 0.3)
    axis.set(
        xlabel="test error, %", title=f"{result.settings['data']}, {result.settings['preset']}: every seed"
    )
    return figure


def learning_rate(result: Result) -> "Figure":
    """Test error of one seed against the learning rate; runs that diverged are crosses above the others."""
    figure, axis = new_figure(1, 1, 4.4)
    rates = {factor: rows.LEARNING_RATE * factor for factor in rows.FACTORS}
    seed = common_seed(result, GROUPS["learning-rate"])
    for number, (integrator, base) in enumerate(rows.INTEGRATORS.items()):
        summaries = {rate: summarize(result, at_rate(base, factor), seed) for factor, rate in rates.items()}
        values = [math.nan if summary.mean is None else summary.mean for summary in summaries.values()]
        diverged = [rate for rate, summary in summaries.items() if summary.diverged]
        colour, height = style.COLOURS[number], 0.96 - 0.06 * number  # one below the other
        axis.semilogx(list(summaries), values, style.MARKERS[number] + "-", color=colour, label=integrator)
        look: dict[str, Any] = {"color": colour, "transform": axis.get_xaxis_transform()}
        axis.plot(diverged, [height] * len(diverged), "x", ms=7, **look)
        if diverged:
            axis.text(diverged[0] / 1.06, height, f"{integrator}: diverged", ha="right", va="center", **look)
    axis.set_xticks(list(rates.values()), [f"{rate:g}" for rate in rates.values()])
    axis.minorticks_off()
    axis.margins(y=0.2)
    axis.set(xlabel="learning rate of all parameters", ylabel="test error, %")
    axis.set_title(f"StiefelSGD within heads, by integrator, seed {seed}")
    legend_below(figure, axis, 2)
    return figure


def attention(result: Result) -> "Figure":
    """Statistics of the attention of the contrasted rows during training, mean over seeds."""
    panels = {
        "logit_max": "largest logit, all heads",
        "entropy": "entropy of the attention, nats, mean",
        "qk_max": "$W_Q^T W_K$: largest singular value",
        "qk_min": "$W_Q^T W_K$: smallest of $d_k$ singular values",
        "effective_rank": "$W_Q^T W_K$: effective rank, mean",
        "train_loss": "training loss",
    }
    figure, axes = new_figure(2, 3, 5.6, sharex=True)
    preset = PRESETS[result.settings["preset"]]
    for axis, (column, title) in zip(axes.flat, panels.items(), strict=True):
        for name, colour in CONTRAST_COLOURS.items():
            _curve(axis, result, ROWS[chosen(name, preset)], column, colour, "-")
        axis.set_title(title, fontsize=9)
    for axis in axes[1]:
        axis.set(xlabel="epoch")
    legend_below(figure, axes.flat[-1], 3)
    return figure


def contrasts(results: Sequence[Result]) -> "Figure":
    """The constrained row minus each control, for every regime: seeds as dots, the mean as a square, its interval.

    Intervals are drawn from three seeds on; with two they would be many times wider than any difference.
    """
    pairs = [(r, name) for r in results for name in CONTRASTED[1:] if paired_contrast(r, name).n]
    figure, axis = new_figure(1, 1, 1.5 + 0.35 * len(pairs))
    labels = []
    for height, (result, name) in enumerate(reversed(pairs)):
        paired, colour = paired_contrast(result, name), CONTRAST_COLOURS[name]
        width = paired.half_width(len(CONTROLS)) if paired.n > 2 else None
        axis.plot(paired.values, [height] * paired.n, "o", color=colour, alpha=0.35, ms=4)
        axis.errorbar(paired.mean or 0.0, height, xerr=width, fmt="s", color=colour, capsize=4)
        seeds = f"{paired.n} seed{'s' * (paired.n > 1)}" + ", reference" * (name not in CONTROLS)
        labels.append(
            f"{result.settings['preset']}, {result.settings['data']}: {ROWS[name].method} ({seeds})"
        )
    axis.set_yticks(range(len(pairs)), labels)
    axis.set_ylim(-0.6, len(pairs) - 0.4)
    axis.axvline(0, color="black", lw=0.8)
    axis.set_xlabel("difference in test error, points; left of 0 the constraint is better")
    axis.set_title("StiefelSGD within heads minus each control", fontsize=11)
    return figure
