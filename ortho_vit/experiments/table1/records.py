"""Finished runs as one result: a row of its table a run, a curve a run.

<sweep>.json    settings and the table: what each run reached, its time, orthogonality error, versions, command
<sweep>.csv     the curves, a line an epoch
"""

import csv
import json
import math
from collections.abc import Iterable
from pathlib import Path

from ortho_vit.experiments.result import Result
from ortho_vit.experiments.table1.runs import Run, Sweep

COLUMNS = ("epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "orthogonality", "lr")


def collect(sweep: Sweep, runs: Iterable[Run]) -> Result:
    """What is finished of the runs."""
    settings = {"preset": sweep.preset, "data": sweep.data}
    collected = Result(sweep.name, settings, versions={})
    for run in runs:
        if (result := run.result) is None:
            continue
        versions = " ".join(f"{name} {version}" for name, version in result["versions"].items())
        collected.table.append(
            {
                "row": run.row.name,
                "seed": run.seed,
                "status": result["status"],
                "step": result["step"],
                "reason": result.get("reason"),
                "test_accuracy": result.get("test_accuracy"),
                "test_loss": result.get("test_loss"),
                "seconds": result["seconds"],
                "orthogonality": result["orthogonality"],
                "parameters": result["parameters"],
                "versions": versions,
                "commit": run.commit,
                "command": run.command,
            }
        )
        curve = result["curve"]
        if curve:
            collected.series[f"{run.row.name} {run.seed}"] = {
                column: [math.nan if point[column] is None else float(point[column]) for point in curve]
                for column in COLUMNS
            }
    return collected.thinned()


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
