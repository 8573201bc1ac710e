"""Means, spreads and paired differences of test errors, in percent."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtr

from ortho_vit.experiments.result import Result
from ortho_vit.experiments.table1.rows import DATA, PAPER


@dataclass(frozen=True)
class Summary:
    """A row's runs: test error by seed, and what they have in common."""

    errors: dict[int, float]
    diverged: dict[int, int]  # seed: step
    seconds: float | None  # mean of those that finished
    orthogonality: float | None  # the largest at the end of a run

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.errors.values()) if self.errors else None

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.errors.values()) if len(self.errors) > 1 else None


def summarize(result: Result, row: str, seed: int | None = None) -> Summary:
    """Of all seeds, or of one."""
    runs = [run for run in result.table if run["row"] == row and seed in (None, run["seed"])]
    finished = [run for run in runs if run["status"] == "finished"]
    seconds = [run["seconds"] for run in finished]
    orthogonality = [run["orthogonality"] for run in finished if run["orthogonality"] is not None]
    return Summary(
        errors={run["seed"]: round(100 * (1 - run["test_accuracy"]), 4) for run in finished},
        diverged={run["seed"]: run["step"] for run in runs if run["status"] == "diverged"},
        seconds=statistics.fmean(seconds) if seconds else None,
        orthogonality=max(orthogonality, default=None),
    )


@dataclass(frozen=True)
class Difference:
    """Paired by seed: error of one row minus error of another; below zero the first is better."""

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

    @property
    def better(self) -> int:
        """How many seeds the first row wins."""
        return sum(value < 0 for value in self.values)

    @property
    def p(self) -> float | None:
        """Two-sided p-value of the paired t-test; None below two pairs, or where all pairs agree exactly."""
        if self.std is None or self.std < 1e-9:
            return None
        t = abs(statistics.fmean(self.values)) * math.sqrt(self.n) / self.std
        return float(2 * stdtr(self.n - 1, -t))


def common_seed(result: Result, rows: Sequence[str]) -> int | None:
    """The seed that most of the rows have, the first of those; for tables of one seed."""
    counts = Counter(run["seed"] for run in result.table if run["row"] in rows)
    return min(counts, key=lambda seed: (-counts[seed], seed), default=None)


def difference(result: Result, first: str, second: str) -> Difference:
    a, b = summarize(result, first).errors, summarize(result, second).errors
    return Difference([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])


def paper_error(row: str, data: str) -> tuple[float, float] | None:
    """The paper's test error of a row, mean and standard deviation of five runs."""
    return PAPER[row][DATA.index(data)] if row in PAPER else None


def paper_difference(first: str, second: str, data: str) -> float | None:
    a, b = paper_error(first, data), paper_error(second, data)
    return a[0] - b[0] if a and b else None
