"""Tables in Markdown, and the page that holds them between markers:

<!-- reduced-cifar10: table -->
... what `report` writes ...
<!-- end -->
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ortho_vit.errors import UsageError
from ortho_vit.experiments.result import Result, duration, markdown
from ortho_vit.experiments.table1.compare import (
    Difference,
    Summary,
    common_seed,
    difference,
    held_out_error,
    paired_contrast,
    paper_difference,
    paper_error,
    summarize,
)
from ortho_vit.experiments.table1.figures import available
from ortho_vit.experiments.table1.presets import PRESETS
from ortho_vit.experiments.table1.rows import (
    CHOSEN,
    CONSTRAINED,
    CONTRAST_FACTORS,
    CONTRASTED,
    CONTROLS,
    FACTORS,
    GROUPS,
    INTEGRATORS,
    LARGE_FACTORS,
    LEARNING_RATE,
    ROWS,
    at_rate,
    base_rate,
    chosen,
    rate_of,
)

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, and the pairs of rows that test it: by the claim, the first has the lower error."""

    name: str
    pairs: Pairs


def _pairs(first: str, *others: str) -> Pairs:
    return tuple((first, other) for other in others)


def _stiefel_against(method: str) -> Pairs:
    """Our optimizer against another method, for both constraints and both families."""
    kinds = [(c, kind) for c in ("within", "across") for kind in ("sgd", "adam")]
    return tuple((f"{c}_stiefel_{kind}", f"{c}_{method}_{kind}") for c, kind in kinds)


MOMENTUM = ("within_stiefel_sgd", "within_momentumless_stiefel_sgd")
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
    Finding("momentum", (MOMENTUM,)),
    Finding("exactness", _stiefel_against("regularized")),
    Finding(
        "one-rate",
        (
            ("within_projected_stiefel_sgd", "within_projected_stiefel_sgd_one_rate"),
            *_pairs("within_stiefel_sgd", *GROUPS["two-rates"]),
        ),
    ),
    Finding("optimizer", (*_stiefel_against("projected_stiefel"), MOMENTUM)),
)


def blocks(result: Result, folder: str) -> dict[str, str]:
    """All that `report` writes about a sweep, by the name of the marker; the figures are in `folder`."""
    images = {
        name: f"![{name.replace('-', ' ')}]({Path(folder, f'{result.name}-{name}.png').as_posix()})"
        for name in available(result)
    }
    rates = [learning_rate_table(result), images.get("learning-rate")]
    made = {
        "table": {
            "table": rows_table(result, GROUPS["table"]),
            "errors": images.get("errors", ""),
            "curves": images.get("curves", ""),
            **{f.name: f"{finding_table(result, f)}\n\n{tally(result, f)}" for f in FINDINGS},
        },
        "own": {"own": rows_table(result, GROUPS["own"])},
        "learning-rate": {"learning-rate": "\n\n".join(part for part in rates if part)},
        "two-rates": {"two-rates": one_seed_table(result, GROUPS["two-rates"])},
        "projections": {"projections": one_seed_table(result, GROUPS["projections"])},
        "contrasts": {"contrasts": contrasts_table(result), "attention": images.get("attention", "")},
        "rates": {"rates": rates_table(result)},
        "largest-rate": {"largest-rate": largest_rate_table(result)},
        "exploratory": {"exploratory": one_seed_table(result, GROUPS["exploratory"])},
    }
    parts = [made[group] for group in PRESETS[result.settings["preset"]].groups]
    return {"summary": summary_line(result)} | {name: text for part in parts for name, text in part.items()}


def summary_line(result: Result) -> str:
    """The number of runs, their time, and the versions and machines they ran on."""
    if not result.table:
        return "No runs yet."
    finished = sum(run["status"] == "finished" for run in result.table)
    hours = sum(run["seconds"] for run in result.table) / 3600
    diverged = len(result.table) - finished
    machines = {" ".join(map(" ".join, run["versions"].items())) for run in result.table}
    ran = f"{finished} runs finished, {diverged} diverged, {hours:.1f} hours of training in all"
    return f"{ran} ({'; '.join(sorted(machines))})."


def rows_table(result: Result, names: Sequence[str]) -> str:
    """For each row: test error, the paper's, the paired difference from its reference, time, orthogonality."""
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
                _p(paired.p) if reference else "",
                *_time_and_orthogonality(summary),
            ]
        )
    return markdown(lines)


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
                _p(paired.p),
                f"{paper:+.2f}" if paper is not None else "–",
            ]
        )
    return markdown(lines)


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
    for integrator, base in INTEGRATORS.items():
        names = [at_rate(base, factor) for factor in FACTORS]
        lines.append([integrator, *(_single(summarize(result, name, seed)) for name in names)])
    return markdown(lines)


def largest_rate_table(result: Result) -> str:
    """Test error of one seed at larger and larger multiples of each row's learning rate."""
    factors = (*CONTRAST_FACTORS[1:], *LARGE_FACTORS)
    lines = [["row", "learning rate × 1", *(f"× {factor:g}" for factor in factors)]]
    for name in CONTRASTED:
        errors = [_single(summarize(result, at_rate(name, factor))) for factor in factors]
        lines.append([ROWS[name].label, f"{base_rate(name):g}", *errors])
    return markdown(lines)


def contrasts_table(result: Result) -> str:
    """The constrained row against each control, at the learning rates that were chosen."""
    header = ["row", "learning rate", "test error, %", "training error, %", "runs", "constrained − row, %"]
    level = f"{100 - 5 / len(CONTROLS):.3g} % interval"
    lines = [[*header, level, "constrained better", f"p × {len(CONTROLS)}"]]
    for name in CONTRASTED:
        row, summary, paired = chosen(name), summarize(result, chosen(name)), paired_contrast(result, name)
        cells = [ROWS[name].label, f"{rate_of(name):g}", _error(summary), _percent(summary.train_error)]
        cells += [_runs(summary)]
        if name == CONSTRAINED:
            lines.append([*cells, "", "", "", ""])
            continue
        wins, p = _wins(result, chosen(CONSTRAINED), row), paired.corrected_p(len(CONTROLS))
        reference = name not in CONTROLS  # not one of the comparisons
        lines.append([*cells, _signed(paired), _interval(paired), wins, "reference" if reference else _p(p)])
    return markdown(lines)


def rates_table(result: Result) -> str:
    """Error on held-out training images at multiples of each row's learning rate; the smallest is chosen."""
    lines = [["row", "learning rate × 1", *(f"× {factor:g}" for factor in CONTRAST_FACTORS), "chosen"]]
    for name in CONTRASTED:
        errors = [held_out_error(result, at_rate(name, factor)) for factor in CONTRAST_FACTORS]
        best = f"× {CHOSEN[name]:g}" if name in CHOSEN else "–"
        lines.append([ROWS[name].label, f"{base_rate(name):g}", *(_percent(error) for error in errors), best])
    return markdown(lines)


def one_seed_table(result: Result, names: Sequence[str]) -> str:
    """Rows that are run with one seed: errors of that seed."""
    seed = common_seed(result, names)
    if seed is None:
        return "No runs yet."
    lines = [["method", "constraint", "test error, %", "training error, %", "time", "max \\|XXᵀ − I\\|"]]
    for name in names:
        row, summary = ROWS[name], summarize(result, name, seed)
        cells = [row.method, row.constraint, _single(summary), _percent(summary.train_error)]
        lines.append([*cells, *_time_and_orthogonality(summary)])
    return markdown(lines)


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
    """The error of one seed, or where it diverged."""
    for step in summary.diverged.values():
        return f"diverged at step {step}"
    return _error(summary)


def _time_and_orthogonality(summary: Summary) -> list[str]:
    seconds, error = summary.seconds, summary.orthogonality
    return [duration(seconds) if seconds else "–", f"{error:.0e}" if error is not None else "–"]


def _percent(error: float | None) -> str:
    return "–" if error is None else f"{error:.2f}"


def _interval(paired: Difference) -> str:
    width = paired.half_width(len(CONTROLS))
    if width is None or paired.mean is None:
        return "–"
    return f"{paired.mean - width:+.2f} to {paired.mean + width:+.2f}"


def _wins(result: Result, first: str, second: str) -> str:
    """For how many common seeds the first row has the lower error, and how often each row diverged."""
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


def _p(p: float | None) -> str:
    return "–" if p is None else f"{p:.3f}" if p >= 0.001 else "< 0.001"


# -------------------------------------------------------------------------------------------------------------- page


def update(page: Path, result: Result, folder: Path) -> None:
    """Replace the text between the markers of this sweep; the rest of the page is unchanged."""
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
