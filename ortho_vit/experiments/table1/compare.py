"""Means, spreads and paired differences of test errors, in percent.

Several comparisons have the Bonferroni correction: p is multiplied by their number m, and each interval has a level of
1 − 0.05/m, so that all of them hold together with probability 0.95.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit

from ortho_vit.experiments.result import Result
from ortho_vit.experiments.table1.presets import PRESETS
from ortho_vit.experiments.table1.rows import CONSTRAINED, DATA, PAPER, chosen


@dataclass(frozen=True)
class Sample:
    """Numbers, one per seed."""

    values: Sequence[float]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.values) if self.n > 1 else None


@dataclass(frozen=True)
class Summary(Sample):
    """The runs of a row: test errors, as values and by seed, and aggregates."""

    errors: dict[int, float]
    diverged: dict[int, int]  # seed: step
    train_error: float | None  # of the last epoch, mean over finished runs
    seconds: float | None  # mean over finished runs
    orthogonality: float | None  # the largest |XXᵀ − I| at the end of a run


def summarize(result: Result, row: str, seed: int | None = None) -> Summary:
    """Summarize a row over all seeds, or for one."""
    runs = [run for run in result.table if run["row"] == row and seed in (None, run["seed"])]
    finished = [run for run in runs if run["status"] == "finished"]
    seconds = [run["seconds"] for run in finished]
    trained = [a for run in finished if (a := run.get("train_accuracy")) is not None]
    orthogonality = [run["orthogonality"] for run in finished if run["orthogonality"] is not None]
    errors = {run["seed"]: round(100 * (1 - run["test_accuracy"]), 4) for run in finished}
    return Summary(
        values=list(errors.values()),
        errors=errors,
        diverged={run["seed"]: run["step"] for run in runs if run["status"] == "diverged"},
        train_error=100 * (1 - statistics.fmean(trained)) if trained else None,
        seconds=statistics.fmean(seconds) if seconds else None,
        orthogonality=max(orthogonality, default=None),
    )


class Difference(Sample):
    """Paired by seed: error of one row minus error of another; below zero the first is better."""

    @property
    def better(self) -> int:
        """The number of seeds where the first row has the lower error."""
        return sum(value < 0 for value in self.values)

    @property
    def p(self) -> float | None:
        """Two-sided p-value of the paired t-test; None below two pairs, or where all pairs agree exactly."""
        if self.std is None or self.std < 1e-9:
            return None
        t = abs(statistics.fmean(self.values)) * math.sqrt(self.n) / self.std
        return float(2 * stdtr(self.n - 1, -t))

    def corrected_p(self, comparisons: int) -> float | None:
        return None if self.p is None else min(1.0, comparisons * self.p)

    def half_width(self, comparisons: int = 1) -> float | None:
        """Half the width of the confidence interval of the mean, by the t distribution; None below two pairs."""
        if self.std is None:
            return None
        return float(stdtrit(self.n - 1, 1 - 0.025 / comparisons)) * self.std / math.sqrt(self.n)


def common_seed(result: Result, rows: Sequence[str]) -> int | None:
    """The seed that most of the rows have, the smallest of several; for tables of one seed."""
    counts = Counter(run["seed"] for run in result.table if run["row"] in rows)
    return min(counts, key=lambda seed: (-counts[seed], seed), default=None)


def difference(result: Result, first: str, second: str) -> Difference:
    a, b = summarize(result, first).errors, summarize(result, second).errors
    return Difference([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])


def paired_contrast(result: Result, row: str) -> Difference:
    """The constrained row against another, each at the learning rate that was chosen for it."""
    preset = PRESETS[result.settings["preset"]]
    return difference(result, chosen(CONSTRAINED, preset), chosen(row, preset))


def held_out_error(result: Result, row: str) -> float | None:
    """Error on held-out training images, by which learning rates are chosen; of the first seed that has one."""
    runs = sorted((r for r in result.table if r["row"] == row), key=lambda run: run["seed"])
    accuracies = [a for run in runs if (a := run.get("val_accuracy")) is not None]
    return 100 * (1 - accuracies[0]) if accuracies else None


def paper_error(row: str, data: str) -> tuple[float, float] | None:
    """The paper's test error of a row, mean and standard deviation of five runs."""
    return PAPER[row][DATA.index(data)] if row in PAPER else None


def paper_difference(first: str, second: str, data: str) -> float | None:
    a, b = paper_error(first, data), paper_error(second, data)
    return a[0] - b[0] if a and b else None
