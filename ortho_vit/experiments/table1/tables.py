"""Tables in Markdown, and the page that holds them between markers:

<!-- reduced-cifar10: table -->
... what `report` writes ...
<!-- end -->
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ortho_vit.experiments.result import Result
from ortho_vit.experiments.table1.compare import (
    Difference,
    Summary,
    difference,
    paper_difference,
    paper_error,
    summarize,
)
from ortho_vit.experiments.table1.figures import available
from ortho_vit.experiments.table1.progress import duration
from ortho_vit.experiments.table1.rows import (
    FACTORS,
    GROUPS,
    INTEGRATORS,
    LEARNING_RATE,
    PROJECTIONS,
    ROWS,
    rate_row,
)
from ortho_vit.training.compose import UsageError

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, and the pairs of rows that bear on it: the first should have the lower error."""

    name: str
    claim: str
    pairs: Pairs


def _pairs(first: str, *others: str) -> Pairs:
    return tuple((first, other) for other in others)


FINDINGS = (
    Finding(
        "constraint",
        "within heads beats across heads beats no constraint",
        (
            *_pairs("within_stiefel_sgd", "across_stiefel_sgd", "none_sgd"),
            ("across_stiefel_sgd", "none_sgd"),
            *_pairs("within_stiefel_adam", "across_stiefel_adam", "none_adam", "none_adamw"),
            ("across_stiefel_adam", "none_adam"),
        ),
    ),
    Finding(
        "momentum",
        "momentum on the manifold matters",
        _pairs("within_stiefel_sgd", "within_momentumless_stiefel_sgd"),
    ),
    Finding(
        "exactness",
        "a constraint that is kept beats a penalty",
        tuple(
            (f"{c}_stiefel_{kind}", f"{c}_regularized_{kind}")
            for c in ("within", "across")
            for kind in ("sgd", "adam")
        ),
    ),
    Finding(
        "one-rate",
        "one learning rate serves constrained and free parameters",
        (
            ("within_projected_stiefel_sgd", "within_projected_stiefel_sgd_one_rate"),
            ("within_stiefel_sgd", "within_projected_stiefel_sgd_one_rate"),
        ),
    ),
    Finding(
        "optimizer",
        "the momentum Stiefel optimizers beat the other Stiefel optimizers",
        (
            *tuple(
                (f"{c}_stiefel_{kind}", f"{c}_projected_stiefel_{kind}")
                for c in ("within", "across")
                for kind in ("sgd", "adam")
            ),
            *_pairs("within_stiefel_sgd", "within_momentumless_stiefel_sgd"),
        ),
    ),
)


def blocks(result: Result) -> dict[str, str]:
    """Everything `report` writes about a sweep, by the name of its marker."""
    drawn = available(result)
    return {
        "summary": summary_line(result),
        "table": rows_table(result, GROUPS["table"]),
        "errors": _figure(result, "errors") if "errors" in drawn else "",
        "curves": _figure(result, "curves") if "curves" in drawn else "",
        "own": rows_table(result, GROUPS["own"]),
        "learning-rate": "\n\n".join(
            [
                learning_rate_table(result),
                *([_figure(result, "learning-rate")] if "learning-rate" in drawn else []),
            ]
        ),
        "projections": projections_table(result),
        **{finding.name: finding_table(result, finding) for finding in FINDINGS},
    }


def _figure(result: Result, name: str) -> str:
    return f"![{name.replace('-', ' ')}](table1/{result.name}-{name}.png)"


def summary_line(result: Result) -> str:
    """How much there is, and on what it ran."""
    if not result.table:
        return "No runs yet."
    finished = sum(run["status"] == "finished" for run in result.table)
    hours = sum(run["seconds"] for run in result.table) / 3600
    diverged = len(result.table) - finished
    machines = {" ".join(map(" ".join, run["versions"].items())) for run in result.table}
    ran = f"{finished} runs finished, {diverged} diverged, {hours:.1f} hours of training in all"
    return f"{ran} ({'; '.join(sorted(machines))})."


def rows_table(result: Result, names: Sequence[str]) -> str:
    """A row each: error, the paper's, the paired difference from its reference row, time, orthogonality."""
    header = ["method", "constraint", "test error, %", "runs", "paper, %", "against", "difference", "p"]
    lines = [[*header, "time", "max \\|XXᵀ − I\\|"]]
    for name in names:
        row, summary = ROWS[name], summarize(result, name)
        paper = paper_error(name, result.settings["data"])
        paired = difference(result, name, row.reference) if row.reference else Difference([])
        reference = ROWS[row.reference] if row.reference else None
        against = "" if reference is None else f"{reference.method}, {reference.constraint}"
        lines.append(
            [
                row.method,
                row.constraint,
                _error(summary),
                _runs(summary),
                f"{paper[0]:.2f} ± {paper[1]:.2f}" if paper else "",
                against,
                _signed(paired) if reference else "",
                _p(paired) if reference else "",
                duration(summary.seconds) if summary.seconds else "–",
                f"{summary.orthogonality:.0e}" if summary.orthogonality is not None else "–",
            ]
        )
    return _markdown(lines)


def write_csv(result: Result, path: Path) -> None:
    """The numbers of every row that has runs."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        columns = ("row", "runs", "diverged", "error", "std", "paper error", "paper std", "reference")
        writer.writerow([*columns, "difference", "p", "seconds", "orthogonality"])
        for name, row in ROWS.items():
            summary = summarize(result, name)
            if not summary.errors and not summary.diverged:
                continue
            paper = paper_error(name, result.settings["data"]) or (None, None)
            paired = difference(result, name, row.reference) if row.reference else Difference([])
            numbers = [summary.mean, summary.std, *paper]
            rest = [paired.mean, paired.p, summary.seconds, summary.orthogonality]
            counts = [len(summary.errors), len(summary.diverged)]
            cells = [name, *counts, *numbers, row.reference, *rest]
            writer.writerow(["" if c is None else f"{c:.6g}" if isinstance(c, float) else c for c in cells])


def finding_table(result: Result, finding: Finding) -> str:
    lines = [["first", "second", "first − second, %", "first better", "p", "paper's difference, %"]]
    for first, second in finding.pairs:
        paired = difference(result, first, second)
        paper = paper_difference(first, second, result.settings["data"])
        lines.append(
            [
                ROWS[first].label,
                ROWS[second].label,
                _signed(paired),
                f"{paired.better} of {paired.n}" if paired.n else "–",
                _p(paired),
                f"{paper:+.2f}" if paper is not None else "–",
            ]
        )
    return _markdown(lines)


def learning_rate_table(result: Result) -> str:
    """Test error of the first seed at each multiple of the paper's learning rate."""
    lines = [["integrator", *(f"{LEARNING_RATE * factor:g} (× {factor:g})" for factor in FACTORS)]]
    for integrator in INTEGRATORS:
        names = [rate_row(integrator, factor) for factor in FACTORS]
        lines.append([integrator, *(_single(summarize(result, name)) for name in names)])
    return _markdown(lines)


def projections_table(result: Result) -> str:
    lines = [["constrained", "test error, %", "time", "max \\|XXᵀ − I\\|"]]
    for parts, name in PROJECTIONS.items():
        summary = summarize(result, name)
        seconds = duration(summary.seconds) if summary.seconds else "–"
        orthogonality = f"{summary.orthogonality:.0e}" if summary.orthogonality is not None else "–"
        lines.append([parts.upper(), _single(summary), seconds, orthogonality])
    return _markdown(lines)


# ------------------------------------------------------------------------------------------------------------- cells


def _error(summary: Summary) -> str:
    if summary.mean is None:
        return "diverged" if summary.diverged else "–"
    return f"{summary.mean:.2f}" + (f" ± {summary.std:.2f}" if summary.std is not None else "")


def _runs(summary: Summary) -> str:
    if not summary.diverged:
        return str(len(summary.errors))
    steps = ", ".join(str(step) for step in summary.diverged.values())
    return f"{len(summary.errors)}, and {len(summary.diverged)} diverged at step {steps}"


def _single(summary: Summary) -> str:
    """The first seed alone, so that every cell has as many runs."""
    seeds = [*summary.errors, *summary.diverged]
    if not seeds:
        return "–"
    first = min(seeds)
    if first in summary.diverged:
        return f"diverged at step {summary.diverged[first]}"
    return f"{summary.errors[first]:.2f}"


def _signed(paired: Difference) -> str:
    if paired.mean is None:
        return "–"
    return f"{paired.mean:+.2f}" + (f" ± {paired.std:.2f}" if paired.std is not None else "")


def _p(paired: Difference) -> str:
    return "–" if paired.p is None else f"{paired.p:.3f}" if paired.p >= 0.001 else "< 0.001"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = lines
    rows = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


# -------------------------------------------------------------------------------------------------------------- page


def update(page: Path, result: Result) -> None:
    """Replace what stands between the markers of this sweep; whatever else the page says stays."""
    text = page.read_text(encoding="utf-8")
    written = fill(text, result)
    if written == text and f"<!-- {result.name}: " not in text:
        raise UsageError(
            f"{page} has no marker <!-- {result.name}: table --> ... <!-- end -->; put one there"
        )
    page.write_text(written, encoding="utf-8")


def fill(text: str, result: Result) -> str:
    for name, block in blocks(result).items():
        marker = f"<!-- {result.name}: {name} -->"
        start = text.find(marker)
        if start >= 0:
            end = text.index("<!-- end -->", start)
            text = f"{text[:start]}{marker}\n{block}\n{text[end:]}"
    return text
