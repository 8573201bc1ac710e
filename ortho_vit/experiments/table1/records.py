"""Finished runs as one result, with one row and one curve per run; and finished runs restored from such a result.

<sweep>.json    settings and the table: what each run reached, its time, orthogonality error, versions, command
<sweep>.csv     the curves, one line per epoch
"""

import math
import shlex
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ortho_vit.errors import UsageError
from ortho_vit.experiments.result import Result, load
from ortho_vit.experiments.table1.presets import PRESETS
from ortho_vit.experiments.table1.rows import DATA, ROWS
from ortho_vit.experiments.table1.runs import Run, Sweep
from ortho_vit.files import finite_or_none, write_json

FIELDS = (
    "status", "step", "reason", "test_accuracy", "test_loss", "seconds", "orthogonality", "parameters", "versions",
)  # fmt: skip
# What `AttentionStatistics` measures for each head, and how all heads are combined to one number.
HEADS: dict[str, Callable[[Iterable[float]], float]] = {
    "logit_max": max,
    "entropy": statistics.fmean,
    **{f"{name}_max": max for name in ("q", "k", "qk")},
    **{f"{name}_min": min for name in ("q", "k", "qk")},
    "effective_rank": statistics.fmean,
}
COLUMNS = (
    "epoch", "step", "train_loss", "train_accuracy", "val_accuracy", "test_loss", "test_accuracy", "orthogonality",
    "lr", "seconds", *HEADS,
)  # fmt: skip
ALWAYS = {"epoch", "train_loss", "test_accuracy"}


def collect(sweep: Sweep, runs: Iterable[Run]) -> Result:
    """The finished runs as one result."""
    settings = {"preset": sweep.preset, "data": sweep.data}
    collected = Result(sweep.name, settings, versions={})
    curves: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if (result := run.result) is None:
            continue
        curve = [_flat(point) for point in result["curve"]]
        known = {name: result.get(name) for name in FIELDS}
        last = curve[-1] if curve else {}
        for name in ("train_accuracy", "val_accuracy"):
            # Rounded as in the CSV file
            known[name] = None if last.get(name) is None else float(f"{last[name]:.6g}")
        made = {"commit": run.commit, "command": run.command}
        collected.table.append({"row": run.row.name, "seed": run.seed} | known | made)
        curves[f"{run.row.name} {run.seed}"] = curve
    points = [point for curve in curves.values() for point in curve]
    columns = [c for c in COLUMNS if c in ALWAYS or any(point.get(c) is not None for point in points)]
    for label, curve in curves.items():
        if curve:
            series = {c: [point.get(c) for point in curve] for c in columns}
            collected.series[label] = {
                c: [math.nan if v is None else float(v) for v in values] for c, values in series.items()
            }
    return collected


def _flat(point: dict[str, Any]) -> dict[str, Any]:
    """A point of a curve, with one number for all heads."""
    heads = point.get("attention") or {}
    values = {name: [v for of in heads.values() for v in of.get(name, ())] for name in HEADS}
    flat = {name: value for name, value in point.items() if name != "attention"}
    return flat | {name: HEADS[name](of_heads) for name, of_heads in values.items() if of_heads}


def sweeps_in(folder: Path) -> list[str]:
    """The names of the sweeps that were reported into a folder, in the order of the presets."""
    names = (f"{preset}-{data.lower()}" for preset in PRESETS for data in DATA)
    return [name for name in names if (folder / f"{name}.json").is_file()]


def restore(sweep: Sweep, folder: Path) -> int:
    """Write the runs of a result as finished runs of the sweep; return how many were not finished there before."""
    if not (folder / f"{sweep.name}.json").is_file():
        raise UsageError(f"no {sweep.name}.json in {folder}: --from is a folder that `report --to` wrote")
    result, restored = load(folder, sweep.name), 0
    for entry in result.table:
        if entry["row"] not in ROWS:
            raise UsageError(
                f"{folder}: there is no row {entry['row']!r}; was this report made by another version?"
            )
        run = sweep.run(ROWS[entry["row"]], entry["seed"])
        if (lock := run.claim()) is None:  # done, or under way
            continue
        curve = result.series.get(f"{entry['row']} {entry['seed']}", {})
        points = [
            dict(zip(curve, map(finite_or_none, point), strict=True))
            for point in zip(*curve.values(), strict=True)
        ]
        arguments = shlex.split(entry["command"])[2:]  # after python train.py
        run.compare(arguments)
        made = {"row": entry["row"], "seed": entry["seed"], "arguments": arguments}
        with lock:
            write_json(run.folder / "run.json", made | {"commit": entry["commit"]})
            write_json(run.folder / "result.json", {name: entry[name] for name in FIELDS} | {"curve": points})
        restored += 1
    return restored
