"""Each optimizer against a plain float64 transcription of its algorithm, and against closed forms."""

import pytest
import torch

from ortho_vit import StiefelParameter, optim, orthogonality_error
from ortho_vit.optim import reference
from ortho_vit.optim.momentum import transport_
from ortho_vit.stiefel import random_stiefel, skew
from tests.helpers import oracles

SHAPES = [(9, 3), (3, 9), (5, 5), (1, 4), (1, 1), (4, 5)]


def both(name: str, shape, steps=12, oracle=None, oracle_options=None, scale=0.3, **options):
    """Run ours and the transcription on one smooth cost; returns both end points, in the transcription's columns."""
    torch.manual_seed(1)
    X = random_stiefel(*shape, dtype=torch.float64)
    A, C = torch.randn(shape[0], shape[0], dtype=torch.float64), torch.randn(shape, dtype=torch.float64)

    def gradient(X):
        return scale * (A @ X + C + torch.sin(3 * X))

    columns = shape[0] >= shape[1]
    parameter = StiefelParameter(X.clone())
    ours = getattr(optim, name)([parameter], **options)
    X = X if columns else X.T
    theirs = (oracle or getattr(oracles, name))(X, **(options if oracle_options is None else oracle_options))
    for _ in range(steps):
        parameter.grad = gradient(parameter.detach())
        ours.step()
        X = theirs.step(X, gradient(X) if columns else gradient(X.T).T)
    end = parameter.detach() if columns else parameter.detach().T
    return end, X, ours.state[parameter], theirs


@pytest.mark.parametrize("integrator", ["isometric", "paper"])
@pytest.mark.parametrize("expm", ["euler", "cayley", "exact"])
@pytest.mark.parametrize("a", [0.5, 0.0, -0.7])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lr", [1e-3, 0.05])
def test_stiefel_sgd_is_algorithm_1(shape, a, expm, integrator, lr):
    common = {"lr": lr, "momentum": 0.9, "dampening": 0.1, "expm": expm}
    plain = oracles.PrintedStiefelSGD if integrator == "paper" else reference.StiefelSGD
    end, expected, state, oracle = both(
        "StiefelSGD",
        shape,
        oracle=plain,
        oracle_options={"a": a, **common},
        metric=a,
        integrator=integrator,
        **common,
    )
    torch.testing.assert_close(end, expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(state["Z"][0], oracle.Z, rtol=0, atol=1e-11)
    if "U" in state:  # with a part along X, which the next step projects out
        U = state["U"][0] - state["U"][0] @ end @ end.T
        torch.testing.assert_close(U, oracle.U.T, rtol=0, atol=1e-11)


@pytest.mark.parametrize("integrator", ["isometric", "paper"])
@pytest.mark.parametrize("expm", ["euler", "cayley", "exact"])
@pytest.mark.parametrize("a", [0.5, 0.0, -0.7])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lr", [1e-3, 0.05])
def test_stiefel_adam_is_algorithm_2(shape, a, expm, integrator, lr):
    common = {"lr": lr, "betas": (0.8, 0.95), "eps": 1e-6, "expm": expm}
    plain = oracles.PrintedStiefelAdam if integrator == "paper" else reference.StiefelAdam
    end, expected, state, oracle = both(
        "StiefelAdam",
        shape,
        oracle=plain,
        oracle_options={"a": a, **common},
        metric=a,
        integrator=integrator,
        **common,
    )
    # Division by √q amplifies rounding where q is small
    torch.testing.assert_close(end, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(state["p"][0], oracle.p, rtol=0, atol=1e-9)
    if "U" in state and integrator == "isometric":
        transported = transport_(state["U"].clone(), end.T[None])[0]
        torch.testing.assert_close(transported, oracle.U.T, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lr", [0.01, 5.0])  # the second is capped
@pytest.mark.parametrize("steps", [1, 5])
def test_projected_sgd_is_li_et_al(shape, lr, steps):
    end, expected, _, _ = both("ProjectedStiefelSGD", shape, lr=lr, momentum=0.7, cayley_steps=steps)
    torch.testing.assert_close(end, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lr", [0.01, 5.0])
def test_projected_adam_is_li_et_al(shape, lr):
    end, expected, _, _ = both("ProjectedStiefelAdam", shape, lr=lr, betas=(0.8, 0.9), cayley_steps=4)
    torch.testing.assert_close(end, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [*SHAPES, (30, 4), (4, 30)])
@pytest.mark.parametrize("lr", [1e-3, 0.1, 10.0])
def test_momentumless_is_wen_and_yin(shape, lr):
    end, expected, _, _ = both("MomentumlessStiefelSGD", shape, lr=lr)
    torch.testing.assert_close(end, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["RegularizedSGD", "RegularizedAdam"])
@pytest.mark.parametrize("shape", [(9, 3), (3, 9), (5, 5)])
def test_regularized_is_torch_after_a_step_on_the_penalty(name, shape):
    start, penalty = torch.randn(shape), 0.05
    parameter, plain = StiefelParameter(start.clone()), torch.nn.Parameter(start.clone())
    ours = getattr(optim, name)([parameter], lr=0.01, penalty=penalty)
    theirs = (
        torch.optim.SGD([plain], lr=0.01, momentum=0.9)
        if name.endswith("SGD")
        else torch.optim.Adam([plain], lr=0.01)
    )
    for _ in range(5):
        gradient = torch.randn(shape)
        parameter.grad, plain.grad = gradient, gradient.clone()
        ours.step()
        with torch.no_grad():
            X = plain if shape[0] >= shape[1] else plain.T
            X.copy_((1 + penalty) * X - penalty * X @ X.T @ X)
        theirs.step()
        torch.testing.assert_close(parameter.data, plain.data, rtol=1e-6, atol=1e-6)


def test_the_penalty_pulls_towards_the_manifold():
    parameter = StiefelParameter(random_stiefel(4, 9) * 1.2)
    optimizer = optim.RegularizedSGD([parameter], lr=0.1, penalty=0.2)
    for _ in range(100):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert orthogonality_error(parameter) < 1e-6


@pytest.mark.parametrize("every", [3, None])
def test_projected_retracts_by_qr_when_told(every):
    """One Cayley iteration drifts; the retraction brings X back on exactly its steps."""
    torch.manual_seed(0)
    parameter = StiefelParameter(random_stiefel(4, 9, dtype=torch.float64))
    optimizer = optim.ProjectedStiefelSGD([parameter], lr=0.1, cayley_steps=1, qr_every=every)
    errors = []
    for _ in range(6):
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        errors.append(orthogonality_error(parameter))
    assert [error < 1e-14 for error in errors] == [
        every is not None and (i + 1) % every == 0 for i in range(6)
    ]


# --------------------------------------------------------------------------------------------------- the exact flow


def canonical_geodesic(X, Z, U, t):
    """Edelman, Arias & Smith, eq. (2.42), for the columns X with velocity XZ + U."""
    m = X.shape[1]
    Q, R = torch.linalg.qr(U)
    top, bottom = torch.cat([Z, -R.T], 1), torch.cat([R, torch.zeros(m, m, dtype=X.dtype)], 1)
    E = torch.linalg.matrix_exp(t * torch.cat([top, bottom]))
    return X @ E[:m, :m] + Q @ E[m:, :m]


def free_motion(integrator: str, steps: int, total: float) -> torch.Tensor:
    """One kick, then no gradient and (almost) no friction; the time a step takes is lr, since μ → 1."""
    torch.manual_seed(3)
    X, G = random_stiefel(8, 3, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    parameter = StiefelParameter(X.clone())
    optimizer = optim.StiefelSGD([parameter], lr=total / steps, momentum=1 - 1e-15, integrator=integrator)
    for i in range(steps):
        parameter.grad = G if i == 0 else torch.zeros_like(G)
        optimizer.step()
    Z, U = -2 * skew(X.T @ G), -(G - X @ (X.T @ G))
    return (parameter.detach() - canonical_geodesic(X, Z, U, total)).norm()


def test_free_motion_converges_to_the_canonical_geodesic_at_first_order():
    coarse, fine = free_motion("isometric", 200, 0.5), free_motion("isometric", 400, 0.5)
    assert fine < 5e-3
    assert coarse / fine == pytest.approx(2, rel=0.1)


def test_free_motion_of_the_printed_step_converges_elsewhere():
    coarse, fine = free_motion("paper", 200, 0.5), free_motion("paper", 400, 0.5)
    assert fine > 0.05
    assert coarse / fine < 1.2


def test_isometric_momentum_is_conserved_and_printed_momentum_grows():
    norms = {}
    for integrator in ("isometric", "paper"):
        parameter = StiefelParameter(random_stiefel(3, 9, dtype=torch.float64))
        optimizer = optim.StiefelSGD([parameter], lr=0.5, momentum=1 - 1e-15, integrator=integrator)
        for i in range(4):
            parameter.grad = torch.ones_like(parameter).tril() if i == 0 else torch.zeros_like(parameter)
            optimizer.step()
            norms.setdefault(integrator, []).append(torch.linalg.svdvals(optimizer.state[parameter]["U"]))
    torch.testing.assert_close(norms["isometric"][0], norms["isometric"][-1], rtol=1e-10, atol=1e-10)
    assert norms["paper"][-1].max() > 10 * norms["paper"][0].max()


@pytest.mark.parametrize("n", [4, 7])
def test_the_sign_of_the_determinant_never_changes_on_square_blocks(n):
    for name in ("StiefelSGD", "StiefelAdam"):
        X = random_stiefel(2, n, n, dtype=torch.float64)
        X[0, 0] *= torch.linalg.det(X[0])  # one of each sign
        X[1, 0] *= -torch.linalg.det(X[1])
        parameter = StiefelParameter(X)
        optimizer = getattr(optim, name)([parameter], lr=0.5)
        for _ in range(50):
            parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        torch.testing.assert_close(
            torch.linalg.det(parameter.detach()), torch.tensor([1.0, -1.0], dtype=X.dtype)
        )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("StiefelSGD", {"lr": 0.1}),
        ("StiefelSGD", {"lr": 0.1, "integrator": "paper"}),
        ("StiefelSGD", {"lr": 0.1, "metric": "euclidean", "expm": "cayley"}),
        ("StiefelAdam", {"lr": 0.01}),
        ("ProjectedStiefelSGD", {"lr": 0.2}),
        ("ProjectedStiefelAdam", {"lr": 0.05}),
        ("MomentumlessStiefelSGD", {"lr": 0.4}),
    ],
)
def test_every_method_finds_the_leading_eigenspace(name, options):
    n, m = 20, 3
    Q = random_stiefel(n, n, dtype=torch.float64)
    A = Q @ torch.diag(torch.linspace(-1, 1, n, dtype=torch.float64)) @ Q.T
    best = torch.linalg.eigvalsh(A)[-m:].sum()
    parameter = StiefelParameter(random_stiefel(n, m, dtype=torch.float64))
    optimizer = getattr(optim, name)([parameter], maximize=True, **options)
    for _ in range(800):
        parameter.grad = 2 * A @ parameter.detach()
        optimizer.step()
    value = torch.trace(parameter.detach().T @ A @ parameter.detach())
    assert best - value < 1e-4
    assert value - best < 1e-5  # off the manifold one could do better
