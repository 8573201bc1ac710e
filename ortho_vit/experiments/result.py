"""What experiments share: a result, saved as <name>.json (settings, versions, table) and <name>.csv (curves); a command."""

import argparse
import csv
import importlib.metadata
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ortho_vit.experiments.figure import save_figure
from ortho_vit.files import as_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS = 120  # that are kept of a curve; more would not be visible


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "numpy")},
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
    }


@dataclass
class Result:
    """`series` maps a curve's label to its columns (lists of one length); `table` has one row (a dict) per method."""

    name: str
    settings: dict[str, Any]
    series: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    table: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=versions)

    def add_point(self, label: str, point: Mapping[str, float | str]) -> None:
        """Append a point, one number per column, to a curve."""
        curve = self.series.setdefault(label, {column: [] for column in point})
        for column, value in point.items():
            curve[column].append(float(value))

    def grouped(self, labels: Iterable[str], by: str, column: str) -> dict[float, list[float]]:
        """The values of a column of some curves, grouped by those of another."""
        groups: dict[float, list[float]] = {}
        for label in labels:
            for key, value in zip(self.series[label][by], self.series[label][column], strict=True):
                groups.setdefault(key, []).append(value)
        return groups

    def thinned(self) -> "Result":
        """The same with long curves cut down to the points a figure can show."""
        series = {}
        for label, curve in self.series.items():
            kept = thin(len(next(iter(curve.values()))))
            series[label] = {column: [values[i] for i in kept] for column, values in curve.items()}
        return replace(self, series=series)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        head = {"name": self.name, "settings": self.settings, "versions": self.versions, "table": self.table}
        text = json.dumps(as_json(head), indent=1, ensure_ascii=False)
        (folder / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")
        if self.series:
            columns = list(next(iter(self.series.values())))
            with (folder / f"{self.name}.csv").open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(["series", *columns])
                for label, curve in self.series.items():
                    for numbers in zip(*curve.values(), strict=True):
                        writer.writerow([label, *(f"{number:.6g}" for number in numbers)])

    def print_table(self) -> None:
        """Print the table as text, one line per row."""
        lines = _cells(self.table)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def thin(length: int) -> list[int]:
    """At most about `_POINTS` indices out of `length`, half of them evenly spread and half logarithmically."""
    if length <= _POINTS:
        return list(range(length))
    half = _POINTS // 2
    even = (round(i * (length - 1) / (half - 1)) for i in range(half))
    log = (round(math.expm1(i * math.log(length) / (half - 1))) for i in range(half))
    return sorted({*even, *log} & set(range(length)))


def markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """A table in Markdown; the keys of a row are the header."""
    head, *body = _cells(table)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body))


def _cells(table: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The header of a table and its rows, as text."""
    return [list(table[0]), *([_show(value) for value in row.values()] for row in table)]


def _show(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def load(folder: Path, name: str) -> Result:
    """What `Result.save` wrote."""
    path = folder / f"{name}.json"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}, the result of an earlier run: give its folder as --output")
    head = json.loads(path.read_text(encoding="utf-8"))
    result = Result(head["name"], head["settings"], table=head["table"], versions=head["versions"])
    curves = folder / f"{name}.csv"
    if head["table"] and curves.is_file():
        with curves.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                result.add_point(line.pop("series"), line)
    return result


# ---- the commands ----------------------------------------------------------------------------------------------


class Progress:
    """Reports on standard error which part of an experiment runs, how long it took, and how long the rest will take.

    On a terminal the last line shows the current part; in a log each part is one line, written when it is done.

    Args:
        total: the sum of the shares of all parts.
    """

    def __init__(self, total: float) -> None:
        self.total, self.done, self._start = total, 0.0, time.perf_counter()

    @contextmanager
    def part(self, label: str, share: float = 1.0) -> Iterator[None]:
        """A context for one part, whose time is about proportional to its share."""
        live = sys.stderr.isatty()
        if live:
            print(f"{label} …{self._rest()}", end="", file=sys.stderr, flush=True)
        begin = time.perf_counter()
        yield
        self.done += share
        took = f"{time.perf_counter() - begin:.1f} s"
        clear = "\r\033[K" if live else ""
        print(f"{clear}{label}: {took}{self._rest()}", file=sys.stderr, flush=True)

    def _rest(self) -> str:
        left = self.total - self.done
        if not self.done or left <= 0:
            return ""
        return f", about {duration((time.perf_counter() - self._start) / self.done * left)} to go"


def duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), seconds / 3600
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if hours < 2 else f"{hours:.1f} h"


def produce(
    name: str,
    options: argparse.Namespace,
    experiment: Callable[[], Result],
    plot: Callable[[Result], "Figure"],
) -> Result:
    """The result of an experiment, saved with its figure; with --redraw an earlier result, with a new figure."""
    options.output.mkdir(parents=True, exist_ok=True)  # a bad path fails before the experiment, not after it
    if options.redraw:
        result = load(options.output, name)
    else:
        result = experiment().thinned()
        result.save(options.output)
    save_figure(plot(result), options.output / f"{name}.png")
    return result


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m ortho_vit.experiments.NAME`, with the options that `produce` and most experiments use."""
    prog, formatter = f"python -m ortho_vit.experiments.{name}", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=description, formatter_class=formatter)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed of everything random (default 0)")
    add("--quick", action="store_true", help="small sizes and few iterations: seconds, for a look")
    add("--output", type=Path, default=Path("results"), help="folder for the results (default results/)")
    add("--redraw", action="store_true", help="run nothing; draw the figures from the results in the folder")
    return parser


def run_command(main: Callable[[Sequence[str] | None], None], arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; an error of the user is one line on standard error and exit code 1."""
    try:
        main(arguments)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0
