"""The style of every figure: one width, colours that colour-blind readers can tell apart, a white ground.

Figures are shown at the width of a page, so all of them are drawn `WIDTH` inches wide, and their text has one size there.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 8.0  # inches
DPI = 150
# Okabe & Ito's palette, without its yellow, which is too light on white
BLUE, VERMILION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, SKY, BLACK, GREY = "#CC79A7", "#56B4E9", "#000000", "#777777"
COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK, GREY)
MARKERS = "osD^vP*X"


def new_figure(rows: int, columns: int, height: float, **kwargs: Any) -> tuple["Figure", Any]:
    """A figure without a window, and its axes with a faint grid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
    axes = figure.subplots(rows, columns, **kwargs)
    for axis in figure.axes:
        axis.grid(alpha=0.3, lw=0.5)
        axis.set_prop_cycle(color=COLOURS)
        axis.tick_params(labelsize=9)
    return figure, axes


def staggered(number: int, count: int) -> dict[str, Any]:
    """The marker of one of `count` curves that may coincide, placed between the markers of the others."""
    return {"marker": MARKERS[number], "ms": 4.5, "markevery": (0.3 * number / count, 0.3)}


def legend_below(figure: "Figure", axis: "Axes", columns: int) -> None:
    """One legend for all panels, under them."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)


def save_figure(figure: "Figure", path: Path) -> None:
    for axis in figure.axes:
        axis.title.set_fontsize(min(axis.title.get_fontsize(), 10))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
