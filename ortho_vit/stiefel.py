"""The Stiefel manifold: orthonormal frames, and the few maps the optimizers are made of.

Notation, here and in `ortho_vit.optim` (the paper is Kong, Wang & Tao, ICLR 2023):

    symbol   shape   meaning                                                        paper
    X        m × n   a block, m ≤ n, with orthonormal rows: X Xᵀ = I                Xᵀ ∈ St(n, m)
    G        m × n   ∂f/∂X                                                          (∂f/∂X)ᵀ
    Z        m × m   momentum within the span of X; skew                            Z, eq. (10)
    U        m × n   momentum out of that span; X Uᵀ = 0                            Uᵀ, eq. (10)
    f, g             the gradient's parts that drive Z and U                        Alg. 1
    E        m × m   orthogonal: what turns X within its span, X½ = Eᵀ X            expm(ηZ)
    R        m × m   (X† X†ᵀ)^(−1/2), the polar retraction: X⁺ = R X†               Alg. 3

The paper writes frames as columns; `nn.Linear` stores them as rows.  Ours are rows, so every formula is the paper's,
transposed (Z, E and R are the paper's own).  Leading dimensions are always a batch.  The public functions take tall
matrices too and mean their columns.

One routine carries the cost: the inverse square root of a symmetric matrix whose spectrum is known to be near 1.
"""

import torch
from torch import Tensor, nn

__all__ = [
    "cayley",
    "inverse_sqrt",
    "orthogonality_error",
    "polar",
    "project_tangent",
    "random_stiefel",
    "skew",
    "sym",
    "symmetric_matmul",
]


def sym(A: Tensor) -> Tensor:
    """The symmetric part, (A + Aᵀ)/2."""
    return (A + A.mT) / 2


def skew(A: Tensor) -> Tensor:
    """The skew part, (A − Aᵀ)/2."""
    return (A - A.mT) / 2


def is_tall(X: Tensor) -> bool:
    return X.shape[-2] > X.shape[-1]


def project_tangent(X: Tensor, G: Tensor) -> Tensor:
    """Project G onto the tangent space at X (Euclidean metric):  G − sym(G Xᵀ) X,  or  G − X sym(XᵀG)  where X is tall."""
    if is_tall(X):
        return G - X @ sym(X.mT @ G)
    return G - sym(G @ X.mT) @ X


def cayley(M: Tensor) -> Tensor:
    """(I − M/2)⁻¹ (I + M/2): orthogonal for skew M, and expm(M) to second order."""
    I = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    return torch.linalg.solve(I - M / 2, I + M / 2)


def random_stiefel(
    *shape: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A point drawn uniformly: `random_stiefel(32, 384)` has orthonormal rows, `random_stiefel(384, 32)` columns.

    QR of a Gaussian matrix with the signs fixed so that diag(R) > 0, without which the draw is not uniform.
    """
    size = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    if len(size) < 2:
        raise ValueError(f"random_stiefel: needs at least two dimensions, got {tuple(size)}")
    dtype = dtype or torch.get_default_dtype()
    A = torch.randn(size, dtype=working_dtype(dtype), device=device, generator=generator)
    Q = qr(A) if is_tall(A) else qr(A.mT).mT
    return Q.to(dtype).contiguous()


def qr(A: Tensor) -> Tensor:
    """The orthonormal factor of a tall A, with diag(R) > 0: the QR retraction."""
    Q, R = torch.linalg.qr(A)
    signs = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(A.dtype)
    return Q * signs.unsqueeze(-2)


def orthogonality_error(x: Tensor | nn.Module) -> float:
    """The largest |(X Xᵀ − I)ᵢⱼ| (XᵀX where X is tall), over every block of a tensor, a `StiefelParameter` or a module.

    Measured in float64, so that what is reported is the error of X and not of the measurement.
    """
    if isinstance(x, nn.Module):
        return max((orthogonality_error(p) for p in x.parameters() if hasattr(p, "matrices")), default=0.0)
    X = (x.matrices() if hasattr(x, "matrices") else x.detach()).double()
    A = X.mT @ X if is_tall(X) else X @ X.mT
    return (A - torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)).abs().max().item()


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision to compute in: float32 for what is narrower, itself otherwise."""
    return torch.promote_types(dtype, torch.float32)


def polar(X: Tensor, *, inner_steps: int | None = None) -> Tensor:
    """The nearest orthonormal matrix, (X Xᵀ)^(−1/2) X, to working precision for any X of full rank.

    Near the manifold this takes the Gram matrix, a few m × m products and one more to apply the factor; how many follows
    from the measured distance, with one synchronisation.  Far from it (a squared singular value off 1 by 0.6 or more)
    the factor comes from a singular value decomposition in float64.

    `inner_steps` fixes the number of Newton–Schulz iterations instead (the paper's Algorithm 3): no synchronisation,
    no fall-back, and an error that is whatever that many iterations leave.
    """
    if inner_steps is not None and inner_steps < 1:
        raise ValueError(f"polar: inner_steps must be at least 1, got {inner_steps}")
    if is_tall(X):
        return polar(X.mT, inner_steps=inner_steps).mT.contiguous()
    dtype, X = X.dtype, X.to(working_dtype(X.dtype))
    M = symmetric_matmul(X, X) - identity(X)
    if inner_steps is not None:
        return (X + inverse_sqrt_fixed(M, inner_steps) @ X).to(dtype)
    distance = norm_bound(M)
    worst = float(distance.amax())
    if worst <= taylor_reach(4, M.dtype):
        return (X + inverse_sqrt(M, -distance, distance) @ X).to(dtype)
    if worst < 0.6:
        return polar(X + inverse_sqrt(M, -distance, distance) @ X).to(dtype)
    return polar(polar_svd(X, far=~(distance < 0.6))).to(dtype)


def identity(X: Tensor) -> Tensor:
    """The m × m identity for a block X of m rows."""
    return torch.eye(X.shape[-2], dtype=X.dtype, device=X.device)


def polar_svd(X: Tensor, far: Tensor) -> Tensor:
    """Replace the matrices of X that are `far` by their polar factors, from a singular value decomposition in float64."""
    if not X.isfinite().all():
        raise ValueError("polar: the matrix has entries that are not finite")
    P, sigma, Qh = torch.linalg.svd(X[far].double(), full_matrices=False)
    if (sigma[..., -1] <= sigma[..., 0] * torch.finfo(torch.float64).eps * max(X.shape[-2:])).any():
        raise ValueError(
            f"polar: the matrix is rank-deficient (singular values from {sigma[..., -1].min():.3g} to "
            f"{sigma[..., 0].max():.3g}): no orthonormal matrix is nearest to it"
        )
    return X.masked_scatter(far[..., None, None], (P @ Qh).to(X.dtype))


# ------------------------------------------------------------------------------------------ symmetric matrices near I


def norm_bound(A: Tensor) -> Tensor:
    """An upper bound of the spectral norm of symmetric A: the smaller of its Frobenius and its largest row sum.

    For a random A of size 384 it is about four times the norm; for a low-rank one nearly the norm itself.
    """
    return torch.minimum(torch.linalg.matrix_norm(A), A.abs().sum(-1).amax(-1))


STRIP = 96  # rows computed at a time where half of a product is enough; below two of them it is not worth the calls


def symmetric_matmul(A: Tensor, B: Tensor, *, sign: int = 1) -> Tensor:
    """A Bᵀ, known to be symmetric (or skew: sign = −1): on a CPU only strips of its lower half are computed.

    Costs 5/8 of the product at m = 384.
    """
    m = A.shape[-2]
    if m < 2 * STRIP or A.device.type != "cpu":
        return A @ B.mT
    C = A.new_empty(A.shape[:-1] + (m,))
    for i in range(0, m, STRIP):
        j = min(i + STRIP, m)
        C[..., i:j, :j] = A[..., i:j, :] @ B[..., :j, :].mT
        C[..., :i, i:j] = C[..., i:j, :i].mT if sign > 0 else -C[..., i:j, :i].mT
    return C


# (1 + x)^(−1/2) = Σ TAYLOR[k] xᵏ.  Cut after degree d it leaves at most |TAYLOR[d + 1]| |x|ᵈ⁺¹ / (1 − |x|).
TAYLOR = (1, -1 / 2, 3 / 8, -5 / 16, 35 / 128, -63 / 256)


def taylor_reach(degree: int, dtype: torch.dtype) -> float:
    """The largest |x| for which the Taylor polynomial of that degree is exact to a quarter of the last place."""
    return (torch.finfo(dtype).eps / 4 / abs(TAYLOR[degree + 1])) ** (1 / (degree + 1))


def inverse_sqrt(M: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """(I + M)^(−1/2) − I, for symmetric M (…, m, m) with spectrum in [lower, upper] (…).

    Only the deviation from I is computed, so its error is relative to the *deviation*: X + R̃X rounds each entry of X
    once, where (I + R̃)X would round it m times.  That is what keeps a training step from drifting.

    Up to ‖M‖ = 0.0003, 0.0045 and 0.026 (float32; nearly every training step) a Taylor polynomial of degree 1, 2 or 4 is
    exact to rounding and costs no, one or two products.  A wider spectrum is first drawn together by `_draw_together`,
    some five products a round, one or two rounds up to ‖M‖ = 3; those round absolutely, an error of some m·eps, which
    `polar` and the optimizers take out again.

    How much is computed follows from the widest spectrum in the batch (one synchronisation), but what happens to a
    matrix depends on that matrix alone: terms and rounds it does not need leave it as it is, to the bit.  So results do
    not depend on the batching.
    """
    low, high = torch.stack([lower.amin(), upper.amax()]).tolist()
    if not (low > -1 and high < 1e3):
        return _inverse_sqrt_far(M, lower, upper)
    linear, quadratic, quartic = (taylor_reach(d, M.dtype) for d in (1, 2, 4))
    worst, Y = max(-low, high), None
    while max(-low, high) > quartic:
        M, Y, lower, upper = _draw_together(M, Y, lower, upper, quartic)
        low, high = _ends_after_round(low, high)
    R = M * TAYLOR[1]
    if worst > linear:
        r = torch.maximum(-lower, upper)[..., None, None]
        M2 = symmetric_matmul(M, M)
        R = R + torch.where(r > linear, TAYLOR[2], 0.0) * M2
        if worst > quadratic:
            C = torch.where(r > quadratic, TAYLOR[3] * M + TAYLOR[4] * M2, 0.0)
            R = R + symmetric_matmul(C, M2)
    return R if Y is None else (Y - identity(M)) + symmetric_matmul(Y, R)


def _draw_together(M: Tensor, Y: Tensor | None, lower: Tensor, upper: Tensor, reach: float):
    """One round: scale T = I + M to have its spectrum centred at 1, then T ← F T F and Y ← Y F, F ≈ T^(−1/2)."""
    I = identity(M)
    wide = torch.maximum(-lower, upper) > reach
    mask = wide[..., None, None]
    centre = torch.where(wide, 2 / (2 + lower + upper), 1.0)[..., None, None]
    T = centre * (I + M)
    D = torch.where(mask, T - I, 0.0)
    F = I + TAYLOR[1] * D + TAYLOR[2] * symmetric_matmul(D, D)
    M = torch.where(mask, symmetric_matmul(symmetric_matmul(F, T), F) - I, M)
    Y = centre.sqrt() * F if Y is None else symmetric_matmul(Y, centre.sqrt() * F)
    ends = _ends_after_round(lower, upper)
    return M, Y, torch.where(wide, ends[0], lower), torch.where(wide, ends[1], upper)


def _ends_after_round(lower, upper):
    """Where a round sends the ends of M's spectrum: 1 + x, centred, goes to (1 + x)(1 − x/2 + 3x²/8)², which is monotone."""
    x = (upper - lower) / (2 + lower + upper)
    return tuple((1 + e) * (1 + TAYLOR[1] * e + TAYLOR[2] * e**2) ** 2 - 1 for e in (-x, x))


def _inverse_sqrt_far(M: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """`inverse_sqrt` where some spectra are too wide to iterate on: those by eigendecomposition in float64."""
    if not M.isfinite().all():
        raise FloatingPointError("the step overflowed: lower the learning rate")
    far = ~((lower > -1) & (upper < 1e3))
    eigenvalues, Q = torch.linalg.eigh(M[far].double())
    R_far = (Q * ((1 + eigenvalues).rsqrt() - 1).unsqueeze(-2)) @ Q.mT
    near = [torch.where(far, 0.0, x) for x in (lower, upper)]
    R = inverse_sqrt(torch.where(far[..., None, None], 0.0, M), *near)
    return R.masked_scatter(far[..., None, None], R_far.to(M.dtype))


def inverse_sqrt_fixed(M: Tensor, steps: int) -> Tensor:
    """(I + M)^(−1/2) − I after `steps` coupled Newton–Schulz iterations (Alg. 3), from a scale at which they converge.

    Near the manifold each iteration squares the error: e becomes 3e²/2, from e = ‖M‖/2.
    """
    I = identity(M)
    A = I + M
    size = norm_bound(A)
    scale = torch.where(size < 1.9, 1.0, 1.9 / size)[..., None, None]
    Y, Z = A * scale, I.expand_as(A)
    for _ in range(steps):
        F = (3 * I - Z @ Y) / 2
        Y, Z = Y @ F, F @ Z
    return Z * scale.sqrt() - I
