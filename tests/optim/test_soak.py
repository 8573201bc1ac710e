"""A hundred thousand steps: nothing that rounding adds may pile up."""

import pytest
import torch

from ortho_vit import StiefelParameter, optim, orthogonality_error
from ortho_vit.stiefel import random_stiefel

STEPS = 100_000
ROUNDING = 1e-6  # of X Xᵀ − I in float32, the most that is promised; measured here: 3e-7
RATES = {"StiefelSGD": 0.02, "StiefelAdam": 1e-3, "MomentumlessStiefelSGD": 0.02}


def errors_of(optimizer, X: StiefelParameter) -> dict[str, float]:
    """Of X Xᵀ, and of the momentum: whether Z is skew."""
    state, errors = optimizer.state[X], {"orthogonality": orthogonality_error(X)}
    if "Z" in state:
        errors["skew"] = float((state["Z"] + state["Z"].mT).abs().max())
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("name", RATES)
def test_errors_after_a_hundred_thousand_steps_are_no_larger_than_after_a_hundred(name):
    torch.manual_seed(0)
    X = StiefelParameter(random_stiefel(2, 3, 8))
    optimizer = getattr(optim, name)([X], lr=RATES[name])
    directions = torch.randn(64, 2, 3, 8)
    worst = {"early": {}, "late": {}}
    for i in range(1, STEPS + 1):
        X.grad = directions[i % 64] + torch.sin(3 * X.detach())
        optimizer.step()
        when = "early" if i <= 100 else "late" if i > STEPS - 100 else None
        if when:
            for what, error in errors_of(optimizer, X).items():
                worst[when][what] = max(error, worst[when].get(what, 0.0))
    assert worst["late"].keys() == worst["early"].keys()
    for what, error in worst["late"].items():
        assert error <= max(worst["early"][what], ROUNDING), (what, worst)
