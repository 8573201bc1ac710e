"""What must hold after any number of steps, at any shape, learning rate, layout and precision."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ortho_vit import StiefelParameter, optim, orthogonality_error
from ortho_vit.stiefel import random_stiefel

EXACT = ["StiefelSGD", "StiefelAdam", "MomentumlessStiefelSGD"]
ALL = optim.__all__

# Largest |XXᵀ − I| after any step: what is promised, and in brackets what was measured on the shapes here.
ORTHOGONAL = {torch.float32: 2e-6, torch.float64: 1e-14}  # (2e-7, 3e-15)


def make(shape, count=1, dtype=torch.float32, free=2, blocks=2):
    r, c = shape
    made = []
    for _ in range(count):
        frame = random_stiefel(blocks, r, c, dtype=dtype).reshape(blocks * r, c)
        made.append(
            StiefelParameter(
                torch.cat([frame, torch.randn(free, c, dtype=dtype)]), blocks=blocks, rows=blocks * r
            )
        )
    return made


def wobble(parameters, i, scale=1.0):
    """A gradient that is neither constant nor random."""
    for j, p in enumerate(parameters):
        p.grad = scale * torch.sin(3 * p.detach() + i + j) * (1 + j)


def momentum(state, parameter) -> torch.Tensor:
    """U without its part along X, which the next step projects out."""
    X = parameter.matrices()
    X = X if X.shape[-2] < X.shape[-1] else X.mT
    return state["U"] - state["U"] @ X.mT @ X


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_ten_thousand_float32_steps_do_not_drift(name):
    parameters = [make(shape)[0] for shape in ((8, 96), (24, 8), (12, 12), (3, 4), (1, 1))]
    optimizer = getattr(optim, name)(parameters, lr=1e-3 if name == "StiefelAdam" else 0.05)
    for i in range(10_000):
        wobble(parameters, i)
        optimizer.step()
        if i % 997 == 0 or i > 9_980:
            assert max(map(orthogonality_error, parameters)) <= ORTHOGONAL[torch.float32]
    for p in parameters:
        state = optimizer.state[p]
        if "Z" in state:
            assert torch.equal(state["Z"], -state["Z"].mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(32, 384), (384, 384), (16, 192)])
@pytest.mark.parametrize("name", EXACT)
def test_shapes_of_the_zoo_stay_exact_step_by_step(name, shape, dtype):
    parameters = make(shape, dtype=dtype)
    optimizer = getattr(optim, name)(parameters, lr=1e-3 if name == "StiefelAdam" else 0.1)
    for i in range(18):
        wobble(parameters, i, scale=0.01 * 30 ** (i % 3))
        optimizer.step()
        assert orthogonality_error(parameters[0]) <= ORTHOGONAL[dtype]


@pytest.mark.parametrize("lr", [1e-3, 2.0, 100.0, 1e5])
@pytest.mark.parametrize("shape", [(5, 40), (40, 5), (6, 6), (6, 7), (1, 3)])
@pytest.mark.parametrize("name", ["StiefelSGD", "StiefelAdam"])
def test_isometric_steps_are_stable_at_any_learning_rate(name, shape, lr):
    parameters = make(shape)
    optimizer = getattr(optim, name)(parameters, lr=lr)
    kick = 0.0
    for i in range(60):
        wobble(parameters, i)
        with torch.no_grad():
            parameters[0].free().zero_()  # the free rows have no such protection
        optimizer.step()
        kick = max(kick, float(parameters[0].grad.norm()))
        assert orthogonality_error(parameters[0]) <= ORTHOGONAL[torch.float32]
    state = optimizer.state[parameters[0]]
    if "U" in state:
        bound = 1.001 * kick / (1 - 0.9)  # a momentum conserved between kicks is bounded by them
        assert momentum(state, parameters[0]).norm() <= bound


def test_the_eigenvalue_problem_at_twenty_times_its_learning_rate():
    """Where the printed step overflows, the isometric one converges."""
    n, m = 200, 10
    A = torch.randn(n, n, dtype=torch.float64)
    A = (A + A.T) / (2 * n**0.5)
    best = torch.linalg.eigvalsh(A)[-m:].sum()

    def run(lr, steps, **options):
        p = StiefelParameter(random_stiefel(n, m, dtype=torch.float64))
        optimizer = optim.StiefelSGD([p], lr=lr, maximize=True, **options)
        for _ in range(steps):
            p.grad = 2 * A @ p.detach()
            optimizer.step()
        return float(best - torch.trace(p.detach().T @ A @ p.detach())), orthogonality_error(p)

    assert run(0.1, 300)[0] < 1e-6
    error, orthogonality = run(0.5, 300)
    assert error < 1e-6
    assert run(2.0, 300)[1] <= 1e-14
    with pytest.raises(RuntimeError, match="the step overflowed; lower the learning rate"):
        run(0.5, 300, integrator="paper")
    assert orthogonality <= 1e-14


@given(
    name=st.sampled_from(ALL),
    r=st.integers(1, 7),
    c=st.integers(1, 9),
    blocks=st.integers(1, 3),
    free=st.integers(0, 2),
    lr=st.floats(1e-4, 1e-1),
    seed=st.integers(0, 2**31),
)
@example(name="StiefelAdam", r=7, c=9, blocks=1, free=1, lr=0.08203125, seed=11535)  # differs by 2.3e-5
@settings(max_examples=150, deadline=None)
def test_random_shapes_and_blocks_under_every_optimizer(name, r, c, blocks, free, lr, seed):
    """The exact ones stay on the manifold; foreach and the plain loop agree; gradients are not touched."""
    ends = []
    for foreach in (False, True):
        torch.manual_seed(seed)
        parameters = make((r, c), count=3, free=free, blocks=blocks)
        optimizer = getattr(optim, name)(parameters, lr=lr, weight_decay=0.01, foreach=foreach)
        for i in range(4):
            wobble(parameters, i)
            before = [p.grad.clone() for p in parameters]
            optimizer.step()
            assert all(torch.equal(p.grad, b) for p, b in zip(parameters, before, strict=True))
        ends.append([p.detach().clone() for p in parameters])
        if name in EXACT:
            assert max(map(orthogonality_error, parameters)) <= ORTHOGONAL[torch.float32]
    tolerance = 1e-4 if "Adam" in name else 5e-6  # division by √q amplifies rounding where q is small
    for looped, stacked in zip(*ends, strict=True):
        torch.testing.assert_close(looped, stacked, rtol=0, atol=tolerance)


@pytest.mark.parametrize("integrator", ["isometric", "paper"])
@pytest.mark.parametrize(("blocks", "r", "c"), [(24, 16, 192), (24, 32, 384), (12, 8, 96)])
def test_foreach_gives_the_same_bits_on_shapes_of_the_zoo(blocks, r, c, integrator):
    ends = []
    for foreach in (False, True):
        torch.manual_seed(0)
        parameters = make((r, c), count=3, free=4, blocks=blocks)
        optimizer = optim.StiefelSGD(parameters, lr=0.1, integrator=integrator, foreach=foreach)
        for i in range(3):
            wobble(parameters, i, scale=0.003 * 10**i)
            optimizer.step()
        ends.append(parameters)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_batched_equals_looped(name):
    """A stack of blocks in one parameter moves as each would alone."""
    X = random_stiefel(3, 4, 7)
    together = StiefelParameter(X.clone())
    alone = [StiefelParameter(x.clone()) for x in X]
    optimizers = [getattr(optim, name)([together], lr=0.05), getattr(optim, name)(alone, lr=0.05)]
    for i in range(20):
        together.grad = torch.sin(3 * together.detach() + i)
        for p in alone:
            p.grad = torch.sin(3 * p.detach() + i)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(together.detach(), torch.stack([p.detach() for p in alone]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(4, 9), (9, 4)])
def test_layout_of_parameter_and_gradient_does_not_matter(name, shape):
    start = random_stiefel(*shape, dtype=torch.float64)
    plain, strided = StiefelParameter(start.clone()), StiefelParameter(start.T.contiguous().T)
    assert not strided.is_contiguous()
    optimizers = [getattr(optim, name)([p], lr=0.05) for p in (plain, strided)]
    for i in range(5):
        gradient = torch.sin(3 * plain.detach() + i)
        plain.grad, strided.grad = gradient, gradient.T.contiguous().T
        for optimizer in optimizers:
            optimizer.step()
    assert not strided.is_contiguous()
    torch.testing.assert_close(plain.data, strided.data, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["StiefelSGD", "StiefelAdam"])
def test_a_transposed_problem_has_the_transposed_solution(name):
    X = random_stiefel(9, 4, dtype=torch.float64)
    tall, wide = StiefelParameter(X.clone()), StiefelParameter(X.T.clone())
    optimizers = [getattr(optim, name)([p], lr=0.05) for p in (tall, wide)]
    for i in range(10):
        tall.grad = torch.sin(3 * tall.detach() + i)
        wide.grad = torch.sin(3 * wide.detach() + i)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(tall.detach(), wide.detach().T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_keep_float32_masters(name, dtype):
    start = make((4, 12))[0].detach()
    narrow, bias = (
        StiefelParameter(start.to(dtype), blocks=2, rows=8),
        torch.nn.Parameter(torch.zeros(3, dtype=dtype)),
    )
    optimizer = getattr(optim, name)([narrow, bias], lr=1e-3)
    for i in range(10):
        narrow.grad, bias.grad = torch.sin(start + i).to(dtype), torch.ones_like(bias)
        optimizer.step()
    state = optimizer.state[narrow]
    assert all(v.dtype == torch.float32 for v in state.values() if isinstance(v, torch.Tensor))
    assert torch.equal(narrow.detach(), state["master"].to(dtype))
    assert torch.equal(bias.detach(), optimizer.state[bias]["master"].to(dtype))
    if name in EXACT:
        assert (
            orthogonality_error(StiefelParameter(state["master"], blocks=2, rows=8))
            <= ORTHOGONAL[torch.float32]
        )


def test_a_step_of_zero_learning_rate_moves_nothing():
    for name in EXACT:
        parameters = make((4, 9))
        before = parameters[0].detach().clone()
        optimizer = getattr(optim, name)(parameters, lr=0.0)
        wobble(parameters, 0)
        optimizer.step()
        torch.testing.assert_close(parameters[0].detach(), before, rtol=0, atol=2e-7)


def test_zero_gradients_leave_everything_finite():
    for name in ALL:
        parameters = make((4, 9))
        optimizer = getattr(optim, name)(parameters, lr=0.1)
        for _ in range(3):
            parameters[0].grad = torch.zeros_like(parameters[0])
            optimizer.step()
        assert parameters[0].isfinite().all()


def test_huge_finite_gradients_are_survived_by_the_isometric_step():
    parameters = make((4, 9), free=0)
    optimizer = optim.StiefelSGD(parameters, lr=0.1)
    for _ in range(5):
        parameters[0].grad = 1e15 * torch.randn_like(parameters[0])
        optimizer.step()
    assert orthogonality_error(parameters[0]) <= ORTHOGONAL[torch.float32]
    assert math.isfinite(optimizer.state[parameters[0]]["U"].norm())


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("size", [1e4, 1e8, 1e12, 1e15])
def test_momentum_of_any_length_never_grows_by_itself(size, rank):
    """One gradient as an exploding network has them, then none: float32 used to multiply what it left."""
    torch.manual_seed(0)
    X = StiefelParameter(random_stiefel(64, 8).mT)
    optimizer = optim.StiefelSGD([X], lr=1.2, momentum=0.9)
    X.grad = torch.randn(8, rank) @ torch.randn(rank, 64)
    X.grad *= size / X.grad.norm()
    lengths = []
    for _ in range(6):
        optimizer.step()
        lengths.append(float(momentum(optimizer.state[X], X).norm()))
        X.grad = torch.zeros_like(X)
    assert all(after <= 0.9001 * before for before, after in pairwise(lengths))
    assert lengths[0] <= 1.0001 * size
    assert orthogonality_error(X) <= 2e-6
