"""The manifold is kept, and the reference followed, under gradients made to break a step.

Every kind of gradient is one block of one parameter, so that a setting costs one run.
"""

import pytest
import torch

from ortho_vit import StiefelParameter, optim, orthogonality_error
from ortho_vit.optim import reference
from ortho_vit.stiefel import random_stiefel

ORTHOGONAL = {torch.float32: 2e-6, torch.float64: 1e-13}  # promised; measured over this file: 7e-7, 6e-15
KINDS = (
    "constant",
    "alternating",
    "rank one",
    "in the span",
    "symmetric in the span",
    "orthogonal",
    "huge",
    "tiny",
    "sparse rows",
    "intermittent",
    "zero",
)
SHAPES = [(1, 16), (15, 16), (12, 12), (2, 1000), (40, 5), (32, 384)]
RATES = [0.0, 1e-4, 0.1, 3.0, 1e8]


def gradients(X: torch.Tensor, fixed: torch.Tensor, i: int) -> torch.Tensor:
    """One gradient of each kind for blocks X (kinds, r, c); `fixed` is like X and does not change."""
    G = fixed.clone()
    wide = X.shape[-2] <= X.shape[-1]
    along = fixed @ X.mT @ X if wide else X @ (X.mT @ fixed)
    for k, kind in enumerate(KINDS):
        if kind == "alternating":
            G[k] *= (-1) ** i
        elif kind == "rank one":
            G[k] = fixed[k][:, :1] @ fixed[k][:1]
        elif kind == "in the span":
            G[k] = along[k]
        elif kind == "symmetric in the span":
            S = fixed[k] @ fixed[k].mT if wide else fixed[k].mT @ fixed[k]
            G[k] = S @ X[k] if wide else X[k] @ S
        elif kind == "orthogonal":
            G[k] = fixed[k] - along[k]
        elif kind == "huge":
            G[k] *= 1e20
        elif kind == "tiny":
            G[k] *= 1e-20
        elif kind == "sparse rows":
            G[k, 1:] = 0
        elif kind == "intermittent":
            G[k] *= float(i % 7 == 0)
        elif kind == "zero":
            G[k] = 0
    return G


def run(name: str, shape: tuple[int, int], dtype: torch.dtype, steps: int = 40, **options) -> float:
    torch.manual_seed(0)
    X = StiefelParameter(random_stiefel(len(KINDS), *shape, dtype=dtype))
    fixed = torch.randn(len(KINDS), *shape, dtype=dtype)
    optimizer = getattr(optim, name)([X], **options)
    worst = 0.0
    for i in range(steps):
        X.grad = gradients(X.detach(), fixed, i)
        optimizer.step()
        worst = max(worst, orthogonality_error(X))
    assert all(x.isfinite().all() for x in optimizer.state[X].values())
    return worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["StiefelSGD", "StiefelAdam"])
def test_the_manifold_is_kept_under_any_gradient(name, shape, lr, dtype):
    momenta = (0.0, 0.9, 0.99) if name == "StiefelSGD" else (None,)
    for momentum in momenta if shape != (32, 384) else momenta[-1:]:
        options = {} if momentum is None else {"momentum": momentum}
        assert run(name, shape, dtype, lr=lr, **options) <= ORTHOGONAL[dtype]


@pytest.mark.parametrize("name", ["StiefelSGD", "StiefelAdam"])
@pytest.mark.parametrize("metric", ["canonical", "euclidean"])
@pytest.mark.parametrize("expm", ["euler", "cayley", "exact"])
def test_the_manifold_is_kept_with_every_option(name, metric, expm):
    more = {"dampening": 0.5} if name == "StiefelSGD" else {}
    for shape in ((7, 16), (6, 6)):
        for lr in (0.1, 1e4):
            options = {"metric": metric, "expm": expm, "maximize": True, "lr": lr, **more}
            assert run(name, shape, torch.float32, **options) <= ORTHOGONAL[torch.float32]


def test_a_linear_cost_of_rank_one_stays_on_the_manifold():
    for seed in range(8):
        torch.manual_seed(seed)
        X = StiefelParameter(random_stiefel(16, 64))
        G = torch.randn(16, 1) @ torch.randn(1, 64)
        optimizer = optim.StiefelSGD([X], lr=0.1)
        for _ in range(100):
            X.grad = G
            optimizer.step()
            assert orthogonality_error(X) <= 1e-6


@pytest.mark.parametrize("lr", [0.0, 1e-3, 0.1, 2.0])
@pytest.mark.parametrize("name", ["StiefelSGD", "StiefelAdam"])
def test_the_reference_is_followed_with_its_limits(name, lr):
    """In float64, kind by kind, over the steps before rounding has grown."""
    torch.manual_seed(0)
    start = random_stiefel(len(KINDS), 9, 4, dtype=torch.float64)
    fixed = torch.randn(len(KINDS), 9, 4, dtype=torch.float64)
    X, frames = StiefelParameter(start.clone()), [x.clone() for x in start]
    ours = getattr(optim, name)([X], lr=lr)
    theirs = [getattr(reference, name)(x, lr) for x in start]
    for i in range(30):
        G = gradients(X.detach(), fixed, i)
        X.grad = G
        ours.step()
        expected = gradients(torch.stack(frames), fixed, i)
        frames = [twin.step(x, g) for twin, x, g in zip(theirs, frames, expected, strict=True)]
    # Adam makes steps of the rounding in these
    rescaled = ("huge", "in the span", "symmetric in the span", "orthogonal")
    kept = [k for k, kind in enumerate(KINDS) if name == "StiefelSGD" or kind not in rescaled]
    torch.testing.assert_close(X.detach()[kept], torch.stack(frames)[kept], rtol=0, atol=1e-8)


@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (10, 10)])
@pytest.mark.parametrize("damage", ["noise", "large", "small", "condition"])
def test_weights_written_off_the_manifold_return_to_their_polar_factor(shape, damage):
    torch.manual_seed(0)
    X = StiefelParameter(random_stiefel(*shape))
    optimizer = optim.StiefelSGD([X], lr=0.01)
    X.grad = torch.zeros_like(X)
    optimizer.step()
    with torch.no_grad():
        if damage == "noise":
            X.add_(0.5 / max(shape) ** 0.5 * torch.randn(shape))
        elif damage == "condition":
            P, s, Qh = torch.linalg.svd(X, full_matrices=False)
            X.copy_(P @ torch.diag(torch.logspace(0, -3, len(s))) @ Qh)
        else:
            X.mul_(100.0 if damage == "large" else 0.3)
    P, _, Qh = torch.linalg.svd(X.detach().double(), full_matrices=False)
    for _ in range(15):
        optimizer.step()
    assert orthogonality_error(X) <= 1e-6
    torch.testing.assert_close(X.detach().double(), P @ Qh, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [n for n in optim.__all__ if "Regularized" not in n])
def test_a_learning_rate_of_zero_leaves_the_blocks_to_the_bit(name):
    for options in ({}, {"stiefel_lr": 0.0, "lr": 0.1}):
        X = StiefelParameter(random_stiefel(3, 8, 24))
        before = X.detach().clone()
        optimizer = getattr(optim, name)([X], **{"lr": 0.0} | options)
        for _ in range(3):
            X.grad = torch.randn_like(X)
            optimizer.step()
        assert torch.equal(X, before)
