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
    collected = Result(sweep.name, {"preset": sweep.preset, "data": sweep.data}, versions={})
    curves: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if (result := run.result) is None:
            continue
        curve = [_flat(point) for point in result["curve"]]
        curves[f"{run.row.name} {run.seed}"] = curve
        entry = {"row": run.row.name, "seed": run.seed} | {name: result.get(name) for name in FIELDS}
        for name in ("train_accuracy", "val_accuracy"):
            last = curve[-1].get(name) if curve else None
            entry[name] = None if last is None else float(f"{last:.6g}")  # rounded as in the CSV file
        started = run.started or {"arguments": run.arguments}
        command = shlex.join(["python", "train.py", *started["arguments"]])
        collected.table.append(entry | {"commit": started.get("commit"), "command": command})
    points = [point for curve in curves.values() for point in curve]
    columns = [c for c in COLUMNS if c in ALWAYS or any(point.get(c) is not None for point in points)]
    for label, curve in curves.items():
        for point in curve:
            values = {column: point.get(column) for column in columns}
            collected.add_point(label, {c: math.nan if v is None else v for c, v in values.items()})
    return collected


def _flat(point: dict[str, Any]) -> dict[str, Any]:
    """A point of a curve, with one number for all heads."""
    heads = point.get("attention") or {}
    values = {name: [v for of in heads.values() for v in of.get(name, ())] for name in HEADS}
    flat = {name: value for name, value in point.items() if name != "attention"}
    return flat | {
        name: HEADS[name](of_heads) for name, of_heads in values.items() if of_heads and None not in of_heads
    }


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
        arguments = shlex.split(entry["command"])[2:]  # after python train.py
        curve = result.series.get(f"{entry['row']} {entry['seed']}", {})
        points = zip(*(map(finite_or_none, values) for values in curve.values()), strict=True)
        kept = {name: entry[name] for name in FIELDS}
        with lock:
            run.check({"arguments": arguments})
            run.write_started(arguments, entry["commit"])
            kept["curve"] = [dict(zip(curve, point, strict=True)) for point in points]
            write_json(run.folder / "result.json", kept)
        restored += 1
    return restored
