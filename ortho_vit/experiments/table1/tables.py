"""Tables in Markdown, and the page that holds them between markers:

<!-- reduced-cifar10: table -->
... what `report` writes ...
<!-- end -->
"""

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ortho_vit.errors import UsageError
from ortho_vit.experiments.result import Result
from ortho_vit.experiments.table1.compare import (
    Difference,
    Summary,
    common_seed,
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

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, and the pairs of rows that bear on it: the first should have the lower error."""

    name: str
    pairs: Pairs


def _pairs(first: str, *others: str) -> Pairs:
    return tuple((first, other) for other in others)


FINDINGS = (
    Finding(
        "constraint",
        (
            *_pairs("within_stiefel_sgd", "across_stiefel_sgd", "none_sgd", "none_sgd_same_rate"),
            *_pairs("within_stiefel_sgd", "none_sgd_orthonormal_start"),
            *_pairs("across_stiefel_sgd", "none_sgd", "none_sgd_same_rate"),
            *_pairs("within_stiefel_adam", "across_stiefel_adam", "none_adam", "none_adamw"),
            *_pairs("across_stiefel_adam", "none_adam", "none_adamw"),
        ),
    ),
    Finding(
        "momentum",
        _pairs("within_stiefel_sgd", "within_momentumless_stiefel_sgd"),
    ),
    Finding(
        "exactness",
        tuple(
            (f"{c}_stiefel_{kind}", f"{c}_regularized_{kind}")
            for c in ("within", "across")
            for kind in ("sgd", "adam")
        ),
    ),
    Finding(
        "one-rate",
        (
            ("within_projected_stiefel_sgd", "within_projected_stiefel_sgd_one_rate"),
            *_pairs("within_stiefel_sgd", *GROUPS["two-rates"]),
        ),
    ),
    Finding(
        "optimizer",
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


def blocks(result: Result, folder: str) -> dict[str, str]:
    """Everything `report` writes about a sweep, by the name of its marker; the figures lie in `folder`."""
    pictures = {
        name: f"![{name.replace('-', ' ')}]({Path(folder, f'{result.name}-{name}.png').as_posix()})"
        for name in available(result)
    }
    rates = [learning_rate_table(result), pictures.get("learning-rate")]
    return {
        "summary": summary_line(result),
        "table": rows_table(result, GROUPS["table"]),
        "errors": pictures.get("errors", ""),
        "curves": pictures.get("curves", ""),
        "own": rows_table(result, GROUPS["own"]),
        "learning-rate": "\n\n".join(part for part in rates if part),
        "two-rates": rows_table(result, GROUPS["two-rates"]),
        "projections": projections_table(result),
        **{f.name: f"{finding_table(result, f)}\n\n{tally(result, f)}" for f in FINDINGS},
    }


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
        lines.append(
            [
                row.method,
                row.constraint,
                _error(summary),
                _runs(summary),
                f"{paper[0]:.2f} ± {paper[1]:.2f}" if paper else "",
                reference.label if reference else "",
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
                _wins(result, first, second),
                _p(paired),
                f"{paper:+.2f}" if paper is not None else "–",
            ]
        )
    return _markdown(lines)


def tally(result: Result, finding: Finding) -> str:
    """How many pairs are ordered as the paper says, and how many the other way round."""
    pairs = [paired for a, b in finding.pairs if (paired := difference(result, a, b)).n]
    if not pairs:
        return "No pair is finished yet."
    expected = [paired for paired in pairs if (paired.mean or 0.0) < 0]
    other = [paired for paired in pairs if (paired.mean or 0.0) > 0]
    return (
        f"{len(expected)} of {len(pairs)} pairs are ordered as the paper says, {_clear(expected)} of them with p < 0.05; "
        f"{len(other)} the other way round, {_clear(other)} of them with p < 0.05."
    )


def _clear(pairs: Sequence[Difference]) -> int:
    return sum(paired.p is not None and paired.p < 0.05 for paired in pairs)


def learning_rate_table(result: Result) -> str:
    """Test error of one seed at each multiple of the paper's learning rate."""
    lines = [["integrator", *(f"{LEARNING_RATE * factor:g} (× {factor:g})" for factor in FACTORS)]]
    seed = common_seed(result, GROUPS["learning-rate"])
    for integrator in INTEGRATORS:
        names = [rate_row(integrator, factor) for factor in FACTORS]
        lines.append([integrator, *(_single(summarize(result, name, seed)) for name in names)])
    return _markdown(lines)


def projections_table(result: Result) -> str:
    lines = [["constrained", "test error, %", "time", "max \\|XXᵀ − I\\|"]]
    seed = common_seed(result, GROUPS["projections"])
    for parts, name in PROJECTIONS.items():
        summary = summarize(result, name, seed)
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
    """Of one seed."""
    for step in summary.diverged.values():
        return f"diverged at step {step}"
    return _error(summary)


def _wins(result: Result, first: str, second: str) -> str:
    """How many seeds the first row wins of those that both finished, and how many one of them did not."""
    paired = difference(result, first, second)
    text = f"{paired.better} of {paired.n}" if paired.n else "–"
    for which, row in (("first", first), ("second", second)):
        if count := len(summarize(result, row).diverged):
            text += f"; the {which} diverged {count} ×"
    return text


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


def update(page: Path, result: Result, folder: Path) -> None:
    """Replace what stands between the markers of this sweep; whatever else the page says stays."""
    text = page.read_text(encoding="utf-8")
    written = fill(text, result, os.path.relpath(folder, page.parent))
    if written == text and f"<!-- {result.name}: " not in text:
        raise UsageError(
            f"{page} has no marker <!-- {result.name}: table --> ... <!-- end -->; put one there"
        )
    page.write_text(written, encoding="utf-8")


def fill(text: str, result: Result, folder: str) -> str:
    for name, block in blocks(result, folder).items():
        marker = f"<!-- {result.name}: {name} -->"
        start = text.find(marker)
        if start >= 0:
            end = text.index("<!-- end -->", start)
            text = f"{text[:start]}{marker}\n{block}\n{text[end:]}"
    return text
