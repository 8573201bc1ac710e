"""Finished runs as one result, with one row and one curve per run; and such a result as finished runs again.

<sweep>.json    settings and the table: what each run reached, its time, orthogonality error, versions, command
<sweep>.csv     the curves, one line per epoch
"""

import csv
import json
import math
import shlex
from collections.abc import Iterable
from pathlib import Path

from ortho_vit.errors import UsageError
from ortho_vit.experiments.result import Result
from ortho_vit.experiments.table1.rows import ROWS
from ortho_vit.experiments.table1.runs import Run, Sweep
from ortho_vit.training.recorder import finite_or_none, write_json

COLUMNS = (
    "epoch", "step", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "orthogonality", "lr", "seconds",
)  # fmt: skip
FIELDS = (
    "status", "step", "reason", "test_accuracy", "test_loss", "seconds", "orthogonality", "parameters", "versions",
)  # fmt: skip


def collect(sweep: Sweep, runs: Iterable[Run]) -> Result:
    """What is finished of the runs."""
    settings = {"preset": sweep.preset, "data": sweep.data}
    collected = Result(sweep.name, settings, versions={})
    for run in runs:
        if (result := run.result) is None:
            continue
        known = {name: result.get(name) for name in FIELDS}
        made = {"commit": run.commit, "command": run.command}
        collected.table.append({"row": run.row.name, "seed": run.seed} | known | made)
        curve = result["curve"]
        if curve:
            collected.series[f"{run.row.name} {run.seed}"] = {
                column: [math.nan if point[column] is None else float(point[column]) for point in curve]
                for column in COLUMNS
            }
    return collected


def load(folder: Path, name: str) -> Result:
    """What `Result.save` wrote."""
    head = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    result = Result(head["name"], head["settings"], table=head["table"], versions=head["versions"])
    curves = folder / f"{name}.csv"
    if head["table"] and curves.is_file():
        with curves.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                curve = result.series.setdefault(line.pop("series"), {column: [] for column in COLUMNS})
                for column, value in line.items():
                    curve[column].append(float(value))
    return result


def restore(sweep: Sweep, folder: Path) -> int:
    """Make the runs of a result finished runs of the sweep, with what the result knows of them; how many were not yet."""
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
