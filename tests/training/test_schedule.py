import math
from itertools import pairwise

import pytest

from ortho_vit.training.schedule import warmup_cosine


def test_warm_up_rises_linearly_from_a_step_that_is_not_zero():
    factors = [warmup_cosine(step, warmup=4, total=20) for step in range(4)]
    assert factors == [0.25, 0.5, 0.75, 1.0]


def test_cosine_falls_from_the_peak_to_a_hundredth_of_it():
    factors = [warmup_cosine(step, warmup=5, total=105) for step in range(4, 105)]
    assert factors[0] == 1.0
    assert factors[-1] == pytest.approx(0.01)
    assert all(a > b for a, b in pairwise(factors))
    assert factors[50] == pytest.approx((1 + 0.01) / 2)  # half of the way down after half of the time


def test_nothing_happens_beyond_the_end():
    assert warmup_cosine(500, warmup=5, total=100) == pytest.approx(0.01)


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 7), (1, 1), (3, 3), (7, 3)])
def test_short_runs_have_a_positive_rate_throughout(warmup, total):
    assert all(0 < warmup_cosine(step, warmup=warmup, total=total) <= 1 for step in range(total))
    assert math.isfinite(warmup_cosine(total, warmup=warmup, total=total))
