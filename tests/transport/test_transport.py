"""Sinkhorn and projection-robust Wasserstein against POT, exact linear programming and closed forms."""

import sys
import types
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from ortho_vit.optim import MomentumlessStiefelSGD, ProjectedStiefelSGD, StiefelAdam, StiefelSGD
from ortho_vit.parameter import StiefelParameter
from ortho_vit.stiefel import orthogonality_error, project_tangent, random_stiefel
from ortho_vit.transport import RAGAS, RGAS, projection_robust_wasserstein, sinkhorn

ot = pytest.importorskip("ot")

SIZES = [(1, 1), (1, 7), (6, 4), (40, 60), (120, 80)]  # the last two on either side of where pairs are walked


def weights(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    w = 0.1 + torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return w / w.sum(-1, keepdim=True)


def cost(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(100 + seed), dtype=dtype)


def pot_plan(a: Tensor, b: Tensor, C: Tensor, reg: float) -> np.ndarray:
    arrays = (t.double().numpy() for t in (a, b, C))
    return ot.sinkhorn(*arrays, reg, method="sinkhorn_log", stopThr=1e-13, numItermax=100_000)


@pytest.mark.parametrize(("n", "m"), SIZES)
@pytest.mark.parametrize("reg", [1.0, 0.1, 0.02])
def test_plan_and_value_agree_with_pot(n: int, m: int, reg: float) -> None:
    a, b, C = weights(n), weights(m, seed=1), cost(n, m)
    result = sinkhorn(a, b, C, reg, tolerance=1e-12)
    expected = pot_plan(a, b, C, reg)
    assert result.converged
    assert np.abs(result.plan.numpy() - expected).max() < 1e-8
    assert abs(result.value.item() - (expected * C.numpy()).sum()) < 1e-8


def test_float32_agrees_with_float64() -> None:
    a, b, C = weights(40), weights(30, seed=1), cost(40, 30)
    exact, single = sinkhorn(a, b, C, 0.05), sinkhorn(a.float(), b.float(), C.float(), 0.05)
    assert single.converged
    assert single.plan.dtype == torch.float32
    assert (single.plan - exact.plan).abs().sum() < 1e-4  # measured 1e-6: 20 in C / reg costs a digit


def test_plan_has_the_marginals_and_potentials_give_the_plan() -> None:
    a, b, C = weights(50), weights(90, seed=1), cost(50, 90)
    result = sinkhorn(a, b, C, 0.01)
    f, g = result.potentials
    assert (result.plan.sum(1) - a).abs().sum() + (result.plan.sum(0) - b).abs().sum() == result.error
    assert result.error < 1e-9
    torch.testing.assert_close(((f[:, None] + g - C) / 0.01).exp(), result.plan, atol=1e-14, rtol=1e-10)
    dual = f @ a + g @ b  # strong duality, both sides without their common −reg
    entropy = torch.special.entr(result.plan).sum()
    torch.testing.assert_close(result.value - 0.01 * entropy, dual, atol=1e-9, rtol=0)


@pytest.mark.parametrize("reg", [1e-3, 1e-4])
def test_value_approaches_the_linear_programme_at_tiny_regularisation(reg: float) -> None:
    a, b, C = weights(20), weights(15, seed=1), cost(20, 15)
    exact = ot.emd2(a.numpy(), b.numpy(), C.numpy())
    result = sinkhorn(a, b, C, reg, tolerance=1e-7, max_sweeps=100_000)
    assert abs(result.value.item() - exact) < reg * np.log(20 * 15)  # the entropy is worth at most that


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_costs_far_beyond_the_exponents_range_stay_finite(dtype: torch.dtype) -> None:
    """C / reg up to 1e6, from a start where the kernel underflows entirely in some columns."""
    C = 1e3 * cost(30, 30, dtype=dtype)
    C[:, 3] += 5e3
    a = weights(30, dtype=dtype)
    result = sinkhorn(a, a.flip(0), C, 1e-3, max_sweeps=500)
    assert result.plan.isfinite().all()
    assert all(p.isfinite().all() for p in result.potentials)
    assert (result.plan.sum(0) - a.flip(0)).abs().sum() < 2e-2  # float32 keeps one digit of exp(1e6 ± 0.06)
    exact = ot.emd2(a.double().numpy(), a.flip(0).double().numpy(), C.double().numpy())
    assert abs(result.value.item() - exact) < 0.05 * exact


def test_two_points_have_their_closed_form() -> None:
    a, C, reg = torch.tensor([0.5, 0.5]).double(), torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double(), 0.7
    stay = 0.5 / (1 + np.exp(-1 / reg))
    result = sinkhorn(a, a, C, reg, tolerance=1e-14)
    torch.testing.assert_close(result.plan, torch.tensor([[stay, 0.5 - stay], [0.5 - stay, stay]]).double())
    assert result.value.item() == pytest.approx(1 - 2 * stay)


@pytest.mark.parametrize("shape", [(6, 5), (70, 65)])
def test_batched_equals_looped(shape: tuple[int, int]) -> None:
    n, m = shape
    a, b, C = weights(2, 3, n), weights(3, m, seed=1), cost(2, 3, n, m)
    batched = sinkhorn(a, b, C, 0.05, tolerance=1e-12)
    assert batched.plan.shape == (2, 3, n, m)
    assert batched.value.shape == batched.error.shape == batched.converged.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            single = sinkhorn(a[i, j], b[j], C[i, j], 0.05, tolerance=1e-12)
            torch.testing.assert_close(batched.plan[i, j], single.plan, atol=1e-11, rtol=0)
            torch.testing.assert_close(batched.value[i, j], single.value, atol=1e-11, rtol=0)


def test_warm_start_gives_the_same_answer_sooner() -> None:
    a, b, C = weights(50), weights(60, seed=1), cost(50, 60)
    cold = sinkhorn(a, b, C, 0.01, tolerance=1e-11)
    nearby = sinkhorn(a, b, C + 1e-5 * cost(50, 60, seed=1), 0.01, tolerance=1e-11)
    warm = sinkhorn(a, b, C, 0.01, tolerance=1e-11, potentials=nearby.potentials)
    torch.testing.assert_close(warm.plan, cold.plan, atol=1e-10, rtol=0)
    assert warm.iterations < cold.iterations
    assert sinkhorn(a, b, C, 0.01, tolerance=1e-9, potentials=cold.potentials).iterations == 1


def test_points_without_weight_change_nothing() -> None:
    a, b, C = weights(9), weights(8, seed=1), cost(9, 8)
    padded_a, padded_b = torch.cat([a, torch.zeros(3)]), torch.cat([torch.zeros(2), b])
    padded = cost(12, 10, seed=5)
    padded[:9, 2:] = C
    result, expected = sinkhorn(padded_a, padded_b, padded, 0.05), sinkhorn(a, b, C, 0.05)
    torch.testing.assert_close(result.plan[:9, 2:], expected.plan)
    assert result.plan[9:].abs().sum() == result.plan[:, :2].abs().sum() == 0
    assert (result.potentials[0][9:] == -torch.inf).all()
    again = sinkhorn(padded_a, padded_b, padded, 0.05, potentials=result.potentials)
    torch.testing.assert_close(again.plan, result.plan)
    refilled = sinkhorn(weights(12), weights(10), padded, 0.05, potentials=result.potentials)
    torch.testing.assert_close(refilled.plan, sinkhorn(weights(12), weights(10), padded, 0.05).plan)


def test_too_few_sweeps_are_admitted() -> None:
    a, C = weights(30), cost(30, 30)
    result = sinkhorn(a, a.flip(0), C, 1e-2, max_sweeps=3)
    assert not result.converged
    assert result.iterations == 3
    assert result.error > 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.full((4,), 0.5)}, "a must sum to one, got 2"),
        ({"b": torch.tensor([1.5, -0.5, 0.0])}, "b has negative weights, the least is -0.5"),
        ({"a": torch.full((5,), 0.2)}, r"must be \(…, n\), \(…, m\) and \(…, n, m\)"),
        ({"C": torch.full((4, 3), torch.nan)}, "C has entries that are not finite"),
        ({"C": torch.full((4, 3), torch.inf)}, "C has entries that are not finite"),
        ({"a": torch.tensor([torch.nan, 0.5, 0.5, 0.0])}, "a has entries that are not finite"),
        ({"reg": 0.0}, "reg must be positive and finite, got 0.0"),
        ({"reg": -1.0}, "reg must be positive"),
        ({"reg": float("nan")}, "reg must be positive"),
        ({"max_sweeps": 0}, "max_sweeps must be positive"),
        ({"a": torch.ones(0), "C": torch.ones(0, 3)}, r"nothing to transport, C is \(0, 3\)"),
    ],
)
def test_a_bad_problem_is_named(change: dict, message: str) -> None:
    problem = {"a": torch.full((4,), 0.25), "b": torch.full((3,), 1 / 3), "C": torch.ones(4, 3), "reg": 0.1}
    with pytest.raises(ValueError, match=message):
        sinkhorn(**(problem | change))


def test_half_precision_is_refused() -> None:
    with pytest.raises(TypeError, match="float32 or float64"):
        sinkhorn(torch.ones(1), torch.ones(1), torch.ones(1, 1, dtype=torch.float16), 0.1)


# ---- projection-robust Wasserstein ----------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[list], Optimizer]] = {
    "stiefel-sgd": partial(StiefelSGD, lr=0.1, momentum=0.5),
    "stiefel-sgd-maximize": partial(StiefelSGD, lr=0.1, momentum=0.5, maximize=True),
    "stiefel-adam": partial(StiefelAdam, lr=0.02),
    "projected": partial(ProjectedStiefelSGD, lr=0.1, momentum=0.5),
    "momentumless": partial(MomentumlessStiefelSGD, lr=0.1),
    "rgas": partial(RGAS, lr=0.1),
    "ragas": partial(RAGAS, lr=0.1, maximize=True),
}


def clouds(*batch: int, n: int = 30, m: int = 25, d: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*batch, n, d, generator=generator, dtype=torch.float64)
    y = torch.randn(*batch, m, d, generator=generator, dtype=torch.float64)
    y[..., -1] += 2
    y[..., -2] *= 2
    return x, y


def value_at(U: Tensor, x: Tensor, y: Tensor, reg: float) -> Tensor:
    a, b = (t.new_full(t.shape[-2:-1], 1 / t.shape[-2]) for t in (x, y))
    return sinkhorn(a, b, torch.cdist(x @ U, y @ U).square(), reg).value


@pytest.fixture
def pot_dr(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """POT's `ot.dr`: it needs autograd and pymanopt to be imported, and neither for the function we want."""
    try:
        import ot.dr as module
    except ImportError:
        stubs = {name: types.ModuleType(name) for name in ("autograd", "pymanopt", "pymanopt.manifolds")}
        stubs["pymanopt.optimizers"] = types.ModuleType("pymanopt.optimizers")
        stubs["autograd"].numpy = np  # type: ignore[attr-defined]
        for name, stub in (stubs | {"autograd.numpy": np}).items():
            monkeypatch.setitem(sys.modules, name, stub)
        import ot.dr as module
    return module


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_value_reaches_at_least_that_of_pot(pot_dr: types.ModuleType, seed: int) -> None:
    x, y = clouds(seed=seed)
    a, b, start = np.full(30, 1 / 30), np.full(25, 1 / 25), np.eye(8, 2)
    options = {"U0": start, "reg": 0.5, "k": 2, "stopThr": 1e-6, "maxiter": 2000}
    _, U = pot_dr.projection_robust_wasserstein(x.numpy(), y.numpy(), a, b, 0.02, **options)
    ours = projection_robust_wasserstein(x, y, k=2, reg=0.5, iterations=2000)
    assert ours.converged
    assert ours.value >= value_at(torch.from_numpy(U), x, y, 0.5) - 1e-5


def test_one_sweep_a_step_and_rgas_walk_the_path_of_pot(pot_dr: types.ModuleType) -> None:
    """Their method is RGAS at lr = τ/reg with a single sweep, columns first: ours with the clouds exchanged."""
    x, y = clouds()
    a, b, tau = np.full(30, 1 / 30), np.full(25, 1 / 25), 0.02
    options = {"U0": np.eye(8, 2), "reg": 0.5, "k": 2, "stopThr": 0, "maxiter": 40}
    _, theirs = pot_dr.projection_robust_wasserstein(x.numpy(), y.numpy(), a, b, tau, **options)
    rgas = partial(RGAS, lr=tau / 0.5)
    ours = projection_robust_wasserstein(
        y, x, k=2, reg=0.5, optimizer=rgas, iterations=40, sweeps=1, tolerance=0
    )
    U = ours.projection.numpy()
    assert np.abs(U @ U.T - theirs @ theirs.T).max() < 1e-10


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_climbs_and_ends_on_the_manifold(name: str) -> None:
    x, y = clouds()
    result = projection_robust_wasserstein(x, y, k=2, reg=0.5, optimizer=OPTIMIZERS[name], iterations=60)
    assert result.projection.shape == (8, 2)
    assert result.history[-1] == result.value
    assert result.value > 2 * result.history[0]
    assert orthogonality_error(result.projection) < 1e-14
    torch.testing.assert_close(value_at(result.projection, x, y, 0.5), result.value, atol=1e-3, rtol=1e-4)


def test_history_starts_at_the_identity_and_value_is_the_plans_cost() -> None:
    x, y = clouds()
    result = projection_robust_wasserstein(x, y, k=2, reg=0.5, iterations=5, sinkhorn_tolerance=1e-10)
    torch.testing.assert_close(result.history[0], value_at(torch.eye(8, 2).double(), x, y, 0.5))
    C = torch.cdist(x @ result.projection, y @ result.projection).square()
    torch.testing.assert_close((result.plan * C).sum(), result.value)
    assert result.history.shape == (6,)


def test_gradient_is_that_of_the_regularised_value() -> None:
    """One RGAS step shows the gradient: compare with autograd through the entropic dual (Danskin)."""
    x, y = clouds(n=12, m=9)
    U = random_stiefel(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a, b, lr, reg = x.new_full((12,), 1 / 12), x.new_full((9,), 1 / 9), 1e-7, 0.5
    options = {"k": 2, "reg": reg, "start": U, "iterations": 1, "sinkhorn_tolerance": 1e-13}
    moved = projection_robust_wasserstein(x, y, optimizer=partial(RGAS, lr=lr), **options).projection
    free = U.clone().requires_grad_()
    C = (x @ free)[:, None] - (y @ free)[None]
    C = C.square().sum(-1)
    plan = sinkhorn(a, b, C.detach(), reg, tolerance=1e-13).plan
    (plan * C).sum().backward()
    assert free.grad is not None
    torch.testing.assert_close((moved - U) / lr, project_tangent(U, free.grad), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n", [10, 70])
def test_batched_pairs_equal_looped_pairs(n: int) -> None:
    x, y = clouds(3, n=n, m=n - 2)
    options = {"k": 2, "reg": 0.5, "optimizer": OPTIMIZERS["stiefel-sgd"], "iterations": 10, "tolerance": 0}
    batched = projection_robust_wasserstein(x, y, sinkhorn_tolerance=1e-11, **options)
    assert batched.projection.shape == (3, 8, 2)
    assert batched.plan.shape == (3, n, n - 2)
    assert batched.history.shape == (11, 3)
    for i in range(3):
        single = projection_robust_wasserstein(x[i], y[i], sinkhorn_tolerance=1e-11, **options)
        torch.testing.assert_close(batched.projection[i], single.projection, atol=1e-8, rtol=0)
        torch.testing.assert_close(batched.history[:, i], single.history, atol=1e-8, rtol=0)


def test_padding_with_weightless_points_changes_nothing() -> None:
    x, y = clouds()
    a = torch.cat([x.new_full((30,), 1 / 30), x.new_zeros(5)])
    padded = torch.cat([x, 10 * x.new_ones(5, 8)])
    options = {"k": 2, "reg": 0.5, "optimizer": OPTIMIZERS["rgas"], "iterations": 10}
    expected, result = (projection_robust_wasserstein(*p, **options) for p in ((x, y), (padded, y, a)))
    torch.testing.assert_close(result.value, expected.value, atol=1e-6, rtol=0)
    assert result.plan[30:].abs().sum() == 0


@pytest.mark.parametrize("k_star", [1, 2])
def test_the_fragmented_hypercube_is_solved(k_star: int) -> None:
    """T(x) = x + 2 sign(x) on the first k* coordinates: the best projection is onto them, the value 4 k*."""
    d = 6
    corners = torch.tensor([[(i >> j & 1) * 2 - 1 for j in range(k_star)] for i in range(2**k_star)]).double()
    x = torch.cat([0.2 * corners.repeat(8, 1), torch.zeros(8 * len(corners), d - k_star)], 1).double()
    y = x.clone()
    y[:, :k_star] += 2 * x[:, :k_star].sign()
    result = projection_robust_wasserstein(x, y, k=k_star, reg=0.05)
    torch.testing.assert_close(result.value, torch.tensor(4.0 * k_star).double(), atol=1e-6, rtol=0)
    rolled, start = (x.roll(3, -1), y.roll(3, -1)), random_start(d, k_star)
    rotated = projection_robust_wasserstein(*rolled, k=k_star, reg=0.05, start=start)
    torch.testing.assert_close(rotated.value, torch.tensor(4.0 * k_star).double(), atol=1e-3, rtol=0)


def random_start(d: int, k: int) -> Tensor:
    return random_stiefel(d, k, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_full_dimension_is_plain_transport() -> None:
    x, y = clouds(d=3)
    result = projection_robust_wasserstein(x, y, k=3, reg=0.5)
    torch.testing.assert_close(result.value, value_at(torch.eye(3).double(), x, y, 0.5), atol=1e-5, rtol=0)


def test_identical_clouds_are_no_division_by_zero() -> None:
    x = torch.zeros(4, 3)
    result = projection_robust_wasserstein(x, x, k=1, reg=0.1)
    assert result.value == 0
    assert result.converged


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 9}, "k must be between 1 and d = 8, got 9"),
        ({"k": 0}, "k must be between 1"),
        ({"reg": -0.1}, "reg must be positive"),
        ({"x": torch.zeros(0, 8)}, r"a cloud is empty: x is \(0, 8\), y is \(25, 8\)"),
        ({"x": torch.zeros(5, 7)}, r"must be \(…, n, d\) and \(…, m, d\)"),
        ({"x": torch.full((5, 8), torch.nan)}, "x has entries that are not finite"),
        ({"a": torch.full((30,), 0.5)}, "a must sum to one, got 15"),
        ({"b": torch.full((24,), 1 / 24)}, r"a and b must be \(…, 30\) and \(…, 25\)"),
        ({"start": torch.eye(8, 3)}, r"start must be \(…, 8, 2\)"),
    ],
)
def test_a_bad_pair_of_clouds_is_named(change: dict, message: str) -> None:
    x, y = clouds()
    with pytest.raises(ValueError, match=message):
        projection_robust_wasserstein(**({"x": x, "y": y, "k": 2, "reg": 0.1} | change))


@pytest.mark.parametrize("make", [RGAS, RAGAS])
def test_the_baselines_refuse_what_they_cannot_move(make: Callable[..., Optimizer]) -> None:
    with pytest.raises(ValueError, match="lr must be positive"):
        make([StiefelParameter(torch.eye(3, 2))], lr=0.0)
    plain = torch.nn.Parameter(torch.eye(3, 2))
    plain.grad = torch.ones(3, 2)
    with pytest.raises(ValueError, match="StiefelParameters"):
        make([plain], lr=0.1).step()
    with pytest.raises(ValueError, match=r"beta must be between 0 and 1, got 1\.5"):
        RAGAS([StiefelParameter(torch.eye(3, 2))], lr=0.1, beta=1.5)


def test_a_start_at_the_minimum_is_not_called_converged() -> None:
    torch.manual_seed(0)
    x, y = torch.rand(30, 10), torch.rand(30, 10) + 1
    x[:, :2] = y[:, :2] = 0
    result = projection_robust_wasserstein(x, y, k=2, reg=0.1)
    assert result.value == 0
    assert not result.converged
    other = projection_robust_wasserstein(x, y, k=np.int64(2), reg=0.1, start=torch.randn(10, 2))
    assert other.value > 1


def test_a_regularisation_too_small_for_the_costs_is_named() -> None:
    x, y = 1e6 * torch.rand(2, 8, 4)
    with pytest.raises(ValueError, match="reg = 1e-30 is too small for costs up to"):
        projection_robust_wasserstein(x, y, k=2, reg=1e-30)
