"""Tables in Markdown, and the page that holds them between markers:

<!-- reduced-cifar10: table -->
... what `report` writes ...
<!-- end -->
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ortho_vit.errors import UsageError
from ortho_vit.experiments.result import Result, duration, markdown
from ortho_vit.experiments.table1 import compare, rows
from ortho_vit.experiments.table1.compare import Difference, Sample, Summary, difference, summarize
from ortho_vit.experiments.table1.figures import available
from ortho_vit.experiments.table1.presets import PRESETS
from ortho_vit.experiments.table1.rows import CONTRASTED, CONTROLS, GROUPS, ROWS, at_rate

Pairs = tuple[tuple[str, str], ...]


def _pairs(first: str, *others: str) -> Pairs:
    return tuple((first, other) for other in others)


def _stiefel_against(method: str) -> Pairs:
    """Our optimizer against another method, for both constraints and both families."""
    kinds = [(c, kind) for c in ("within", "across") for kind in ("sgd", "adam")]
    return tuple((f"{c}_stiefel_{kind}", f"{c}_{method}_{kind}") for c, kind in kinds)


MOMENTUM = ("within_stiefel_sgd", "within_momentumless_stiefel_sgd")
# Claims of the paper, and the pairs of rows that test them: by the claim, the first has the lower error.
FINDINGS: dict[str, Pairs] = {
    "constraint": (
        *_pairs("within_stiefel_sgd", "across_stiefel_sgd", "none_sgd", "none_sgd_same_rate"),
        *_pairs("within_stiefel_sgd", "none_sgd_orthonormal_start", *CONTROLS),
        *_pairs("across_stiefel_sgd", "none_sgd", "none_sgd_same_rate"),
        *_pairs("within_stiefel_adam", "across_stiefel_adam", "none_adam", "none_adamw"),
        *_pairs("across_stiefel_adam", "none_adam", "none_adamw"),
    ),
    "momentum": (MOMENTUM,),
    "exactness": _stiefel_against("regularized"),
    "one-rate": (
        ("within_projected_stiefel_sgd", "within_projected_stiefel_sgd_one_rate"),
        *_pairs("within_stiefel_sgd", *GROUPS["two-rates"]),
    ),
    "optimizer": (*_stiefel_against("projected_stiefel"), MOMENTUM),
}


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
            **{name: f"{pairs_table(result, p)}\n\n{tally(result, p)}" for name, p in FINDINGS.items()},
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
    table = []
    for name in names:
        row, summary = ROWS[name], summarize(result, name)
        paper = compare.paper_error(name, result.settings["data"])
        paired = difference(result, name, row.reference) if row.reference else None
        table.append(
            {
                "method": row.method,
                "constraint": row.constraint,
                "test error, %": _error(summary),
                "runs": _runs(summary),
                "paper, %": "{:.2f} ± {:.2f}".format(*paper) if paper else "",
                "against": ROWS[row.reference].label if row.reference else "",
                "difference": _spread(paired, "+") if paired else "",
                "p": _p(paired.p) if paired else "",
                **_time_and_orthogonality(summary),
            }
        )
    return markdown(table)


def pairs_table(result: Result, pairs: Pairs) -> str:
    table = []
    for first, second in pairs:
        paired = difference(result, first, second)
        paper = compare.paper_difference(first, second, result.settings["data"])
        table.append(
            {
                "first": ROWS[first].label,
                "second": ROWS[second].label,
                "first − second, %": _spread(paired, "+"),
                "first better": _wins(result, first, second),
                "p": _p(paired.p),
                "paper's difference, %": None if paper is None else f"{paper:+.2f}",
            }
        )
    return markdown(table)


def tally(result: Result, pairs: Pairs) -> str:
    """How many pairs are ordered as the paper says, and how many the other way round."""
    finished = [paired for first, second in pairs if (paired := difference(result, first, second)).n]
    if not finished:
        return "No pair is finished yet."
    expected = [paired for paired in finished if (paired.mean or 0.0) < 0]
    other = [paired for paired in finished if (paired.mean or 0.0) > 0]
    clear = [sum((p := paired.p) is not None and p < 0.05 for paired in some) for some in (expected, other)]
    return (
        f"{len(expected)} of {len(finished)} pairs are ordered as the paper says, {clear[0]} of them with p < 0.05; "
        f"{len(other)} the other way round, {clear[1]} of them with p < 0.05."
    )


def learning_rate_table(result: Result) -> str:
    """Test error of one seed at each multiple of the paper's learning rate."""
    seed, table = compare.common_seed(result, GROUPS["learning-rate"]), []
    for integrator, base in rows.INTEGRATORS.items():
        line = {"integrator": integrator}
        for factor in rows.FACTORS:
            error = _single(summarize(result, at_rate(base, factor), seed))
            line[f"{rows.LEARNING_RATE * factor:g} (× {factor:g})"] = error
        table.append(line)
    return markdown(table)


def largest_rate_table(result: Result) -> str:
    """Test error of one seed at larger and larger multiples of each row's learning rate."""
    return by_factor(rows.HIGH_FACTORS, lambda name: _single(summarize(result, name)))


def rates_table(result: Result) -> str:
    """Error on held-out training images at multiples of each row's learning rate; the smallest is chosen."""
    factors = rows.CHOSEN[PRESETS[result.settings["preset"]].rates]
    last = {name: {"chosen": f"× {factor:g}"} for name, factor in factors.items()}
    return by_factor(rows.CONTRAST_FACTORS, lambda name: _percent(compare.held_out_error(result, name)), last)


def by_factor(
    factors: Sequence[float], cell: Callable[[str], str], last: dict[str, dict[str, str]] | None = None
) -> str:
    """The contrasted rows at multiples of their learning rates: one line per row, one column per factor."""
    table = []
    for name in CONTRASTED:
        line = {"row": ROWS[name].label, "learning rate × 1": f"{rows.base_rate(name):g}"}
        line |= {f"× {factor:g}": cell(at_rate(name, factor)) for factor in factors}
        table.append(line | (last[name] if last else {}))
    return markdown(table)


def contrasts_table(result: Result) -> str:
    """The constrained row against each control, at the learning rates that were chosen."""
    count, table, preset = len(CONTROLS), [], PRESETS[result.settings["preset"]]
    constrained = rows.chosen(rows.CONSTRAINED, preset)
    for name in CONTRASTED:
        row = rows.chosen(name, preset)
        summary, paired = summarize(result, row), compare.paired_contrast(result, name)
        contrast = {
            "constrained − row, %": _spread(paired, "+"),
            f"{100 - 5 / count:.3g} % interval": _interval(paired),
            "constrained better": _wins(result, constrained, row),
            f"p × {count}": _p(paired.corrected_p(count)) if name in CONTROLS else "reference",
        }
        if name == rows.CONSTRAINED:
            contrast = dict.fromkeys(contrast, "")
        about = {
            "row": ROWS[name].label,
            "learning rate": f"{rows.rate_of(name, preset):g}",
            "test error, %": _error(summary),
            "training error, %": _percent(summary.train_error),
            "runs": _runs(summary),
        }
        table.append(about | contrast)
    return markdown(table)


def one_seed_table(result: Result, names: Sequence[str]) -> str:
    """Rows that are run with one seed: errors of that seed."""
    seed = compare.common_seed(result, names)
    if seed is None:
        return "No runs yet."
    table = []
    for name in names:
        row, summary = ROWS[name], summarize(result, name, seed)
        error, training = _single(summary), _percent(summary.train_error)
        line = {"method": row.method, "constraint": row.constraint, "test error, %": error}
        table.append(line | {"training error, %": training} | _time_and_orthogonality(summary))
    return markdown(table)


# ------------------------------------------------------------------------------------------------------------- cells


def _spread(sample: Sample, sign: str = "") -> str:
    """Mean and standard deviation; `sign` "+" shows the sign of the mean."""
    if sample.mean is None:
        return "–"
    return f"{sample.mean:{sign}.2f}" + (f" ± {sample.std:.2f}" if sample.std is not None else "")


def _error(summary: Summary) -> str:
    return "diverged" if summary.diverged and not summary.errors else _spread(summary)


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


def _time_and_orthogonality(summary: Summary) -> dict[str, str]:
    seconds, error = summary.seconds, summary.orthogonality
    return {
        "time": duration(seconds) if seconds else "–",
        "max \\|XXᵀ − I\\|": f"{error:.0e}" if error is not None else "–",
    }


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
