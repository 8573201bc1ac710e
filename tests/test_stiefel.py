"""The geometry, against singular value decompositions and the definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ortho_vit import constrain
from ortho_vit.stiefel import (
    cayley,
    inverse_sqrt,
    orthogonality_error,
    polar,
    project_tangent,
    random_stiefel,
    skew,
    sym,
    symmetric_matmul,
)

# What is "working precision": largest |XXᵀ − I| measured over these shapes, and the head-room allowed.
ORTHOGONAL = {torch.float32: 3e-7, torch.float64: 8e-15}  # measured: 6e-8, 3e-15
SHAPES = [(1, 1), (1, 7), (7, 1), (5, 5), (32, 384), (384, 32), (3, 2, 8, 4), (384, 384)]


def svd_polar(X):
    P, _, Qh = torch.linalg.svd(X.double(), full_matrices=False)
    return P @ Qh


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_random_points_are_orthonormal_and_contiguous(shape, dtype):
    X = random_stiefel(*shape, dtype=dtype)
    assert X.shape == shape
    assert X.dtype == dtype
    assert X.is_contiguous()
    assert orthogonality_error(X) < 10 * ORTHOGONAL[dtype]


def test_random_points_are_uniform():
    """Without the sign fix of QR the diagonal would have a sign; and a column of a uniform frame has mean zero."""
    X = random_stiefel(4000, 6, 3, dtype=torch.float64)
    assert X.mean(0).abs().max() < 4 / math.sqrt(6 * 4000)
    assert ((X[:, 0, 0] > 0).double().mean() - 0.5).abs() < 0.05


def test_a_generator_makes_random_points_repeatable():
    draw = [random_stiefel(4, 3, generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*draw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distance", [1e-7, 1e-4, 1e-2, 0.1, 0.5, 3.0, 1e3])
@pytest.mark.parametrize("shape", SHAPES)
def test_polar_is_the_svd_factor_at_any_distance(shape, distance, dtype):
    X = random_stiefel(*shape, dtype=dtype)
    X = X + distance * torch.randn_like(X) / math.sqrt(max(shape[-2:]))
    Y = polar(X)
    sigma = torch.linalg.svdvals(X.double()).amin()
    assert orthogonality_error(Y) < ORTHOGONAL[dtype]
    assert (Y - svd_polar(X)).abs().max() < 50 * torch.finfo(dtype).eps * max(1, 1 / sigma)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_polar_does_not_depend_on_scale(scale):
    X = torch.randn(6, 10)
    torch.testing.assert_close(polar(scale * X), polar(X), rtol=0, atol=1e-5)


def test_polar_handles_bad_conditioning():
    P, _, Qh = torch.linalg.svd(torch.randn(5, 9, dtype=torch.float64), full_matrices=False)
    X = P @ torch.diag(10.0 ** -torch.arange(5, dtype=torch.float64) * 2) @ Qh
    assert (polar(X) - P @ Qh).abs().max() < 1e-6
    assert orthogonality_error(polar(X)) < 1e-14


def test_polar_is_idempotent_to_rounding():
    X = polar(torch.randn(3, 8, 20))
    assert (polar(X) - X).abs().max() <= 2e-7


def test_polar_of_a_mixed_batch_equals_polar_one_by_one():
    near, middle, far = random_stiefel(3, 6, 9)
    X = torch.stack([near + 1e-6, middle + 0.05 * torch.randn(6, 9), 40 * far + torch.randn(6, 9)])
    assert torch.equal(polar(X), torch.stack([polar(x[None])[0] for x in X]))


def test_polar_keeps_the_dtype_of_low_precision():
    Y = polar(torch.randn(8, 16).bfloat16())
    assert Y.dtype == torch.bfloat16
    assert orthogonality_error(Y) < 2e-2


def test_a_fixed_number_of_inner_steps_squares_the_error_each_time():
    X = random_stiefel(8, 30, dtype=torch.float64) + 0.01 * torch.randn(8, 30, dtype=torch.float64)
    errors = [orthogonality_error(polar(X, inner_steps=k)) for k in (1, 2, 3)]
    assert errors[0] < 2e-2
    assert errors[1] < 4 * errors[0] ** 2
    assert errors[2] < 4 * errors[1] ** 2


def test_fixed_inner_steps_converge_from_any_scale():
    for scale in (0.1, 100.0):
        assert (
            orthogonality_error(polar(scale * torch.randn(5, 40, dtype=torch.float64), inner_steps=40))
            < 1e-12
        )


def test_polar_refuses_what_has_no_polar_factor():
    with pytest.raises(ValueError, match="rank-deficient"):
        polar(torch.zeros(3, 5))
    with pytest.raises(ValueError, match="not finite"):
        polar(torch.full((3, 5), torch.nan))
    with pytest.raises(ValueError, match="inner_steps must be at least 1, got 0"):
        polar(torch.randn(3, 5), inner_steps=0)


# Largest |(I + R̃)(I + D)(I + R̃) − I|: what the polynomials leave, and rounding, which grows with m.  Measured: 9e-8, 3e-15.
ROOT = {torch.float32: 3e-7, torch.float64: 2e-14}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-7, 1e-4, 3e-3, 1e-2, 0.1, 0.5, 0.65])
@pytest.mark.parametrize("m", [1, 5, 200])
def test_inverse_square_root_is_exact_over_the_whole_range(m, size, dtype):
    A = torch.randn(3, m, m, dtype=dtype)
    D = A @ A.mT
    D = D * (size / torch.linalg.matrix_norm(D, 2))[:, None, None]
    R = inverse_sqrt(D).double()
    I = torch.eye(m, dtype=torch.float64)
    residual = (I + R) @ (I + D.double()) @ (I + R) - I
    assert residual.abs().max() < ROOT[dtype]


@pytest.mark.parametrize("host", [False, True])
def test_inverse_square_root_does_not_depend_on_its_batch_or_on_what_the_host_knows(host):
    A = torch.randn(6, 5, 5)
    D = A @ A.mT
    D = D / torch.linalg.matrix_norm(D, 2)[:, None, None]
    D = D * torch.tensor([1e-7, 1e-3, 1e-2, 0.05, 0.4, 1.0])[:, None, None]
    together = inverse_sqrt(D, host=False)
    for i in range(6):
        assert torch.equal(together[i], inverse_sqrt(D[i : i + 1], host=host)[0])


@pytest.mark.parametrize("m", [3, 192, 250])
def test_half_a_product_is_the_whole(m):
    A = torch.randn(2, m, m, dtype=torch.float64)
    torch.testing.assert_close(symmetric_matmul(A, A.mT), A @ A.mT, rtol=1e-12, atol=1e-12)
    W = skew(A)
    W = W @ W @ W  # commutes with its own square, so the product below is skew
    torch.testing.assert_close(symmetric_matmul(W, W @ W, sign=-1), W @ (W @ W), rtol=1e-9, atol=1e-6)


@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_tangent_projection_is_a_projection_onto_the_tangent_space(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    X = random_stiefel(*shape, dtype=torch.float64, generator=generator)
    G = torch.randn(shape, dtype=torch.float64, generator=generator)
    T = project_tangent(X, G)
    frame = X.mT @ T if shape[-2] > shape[-1] else T @ X.mT
    assert sym(frame).abs().max() < 1e-13
    torch.testing.assert_close(project_tangent(X, T), T, rtol=0, atol=1e-13)
    torch.testing.assert_close(
        (T * (G - T)).sum((-2, -1)), torch.zeros(shape[0], dtype=G.dtype), rtol=0, atol=1e-12
    )


def test_cayley_of_skew_is_orthogonal_and_second_order():
    W = skew(torch.randn(2, 6, 6, dtype=torch.float64))
    assert orthogonality_error(cayley(W)) < 1e-14
    errors = [(cayley(h * W) - torch.linalg.matrix_exp(h * W)).abs().max() for h in (1e-2, 5e-3)]
    assert errors[0] / errors[1] == pytest.approx(8, rel=0.1)


def test_shapes_without_two_dimensions_are_refused():
    with pytest.raises(ValueError, match="two dimensions"):
        random_stiefel(5)


def test_a_block_of_nan_is_not_passed_over():
    layers = nn.ModuleList([constrain(nn.Linear(8, 4)), constrain(nn.Linear(8, 4))])
    with torch.no_grad():
        layers[1].weight.fill_(math.nan)
    assert math.isnan(orthogonality_error(layers))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_cayley_transform_of_narrow_matrices(dtype):
    M = skew(torch.randn(4, 4, dtype=torch.float64))
    torch.testing.assert_close(cayley(M.to(dtype)).double(), cayley(M), rtol=0.05, atol=0.05)


def test_the_tangent_projection_takes_real_matrices_only():
    with pytest.raises(ValueError, match="project_tangent: needs a real floating-point dtype"):
        project_tangent(torch.eye(3, dtype=torch.complex64), torch.eye(3, dtype=torch.complex64))


def test_the_polar_factor_of_a_large_matrix_is_differentiable():
    torch.manual_seed(0)
    W = torch.randn(200, 240, dtype=torch.float64, requires_grad=True)
    V, C = torch.randn(2, 200, 240, dtype=torch.float64)
    (slope,) = torch.autograd.grad((polar(W) * C).sum(), W)
    h = 1e-6
    with torch.no_grad():
        expected = ((polar(W + h * V) - polar(W - h * V)) * C).sum() / (2 * h)
    assert (slope * V).sum().item() == pytest.approx(expected.item(), rel=1e-6)
