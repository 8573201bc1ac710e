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

import math
from functools import cache

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
    require_matrices("project_tangent", X)
    require_matrices("project_tangent", G)
    if is_tall(X):
        return G - X @ sym(X.mT @ G)
    return G - sym(G @ X.mT) @ X


def cayley(M: Tensor) -> Tensor:
    """(I − M/2)⁻¹ (I + M/2): orthogonal for skew M, and expm(M) to second order."""
    require_matrices("cayley", M)
    if M.shape[-2] != M.shape[-1]:
        raise ValueError(f"cayley: needs square matrices, got {tuple(M.shape)}")
    A = M.to(working_dtype(M.dtype)) / 2
    return torch.linalg.solve(identity(A) - A, identity(A) + A).to(M.dtype)


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
    dtype = dtype or torch.get_default_dtype()
    if len(size) < 2 or min(size) < 1:
        raise ValueError(
            f"random_stiefel: needs at least two dimensions, none of them empty, got {tuple(size)}"
        )
    if not dtype.is_floating_point:
        raise ValueError(f"random_stiefel: needs a real floating-point dtype, got {dtype}")
    A = torch.randn(size, dtype=working_dtype(dtype), device=device, generator=generator)
    Q = qr(A) if is_tall(A) else qr(A.mT).mT
    return polar(Q).to(dtype).contiguous()  # what QR leaves of rounding


def qr(A: Tensor) -> Tensor:
    """The orthonormal factor of a tall A, with diag(R) > 0: the QR retraction."""
    Q, R = torch.linalg.qr(A)
    signs = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(A.dtype)
    return Q * signs.unsqueeze(-2)


def orthogonality_error(x: Tensor | nn.Module) -> float:
    """The largest |(X Xᵀ − I)ᵢⱼ| (XᵀX where X is tall), over every block of a tensor, a `StiefelParameter` or a module.

    Measured in float64, so that what is reported is the error of X and not of the measurement.  A module without
    constrained parameters has none: 0.
    """
    if isinstance(x, nn.Module):
        errors = [orthogonality_error(p) for p in x.parameters() if hasattr(p, "matrices")]
        return max(errors, key=nan_first, default=0.0)
    require_matrices("orthogonality_error", x)
    X = (x.matrices() if hasattr(x, "matrices") else x.detach()).double()
    A = X.mT @ X if is_tall(X) else X @ X.mT
    return (A - torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)).abs().max().item()


def nan_first(value: float) -> float:
    """A key for `max` under which what is no number is the largest."""
    return math.inf if math.isnan(value) else value


def require_matrices(who: str, X: Tensor) -> None:
    if X.ndim < 2 or X.numel() == 0:
        shape = tuple(X.shape)
        raise ValueError(f"{who}: needs at least two dimensions, none of them empty, got {shape}")
    if not X.is_floating_point():
        raise ValueError(f"{who}: needs a real floating-point dtype, got {X.dtype}")


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision to compute in: float32 for what is narrower, itself otherwise."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


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
    require_matrices("polar", X)
    if is_tall(X):
        return polar(X.mT, inner_steps=inner_steps).mT.contiguous()
    dtype, X = X.dtype, X.to(working_dtype(X.dtype))
    M = gram_deviation(X)
    if inner_steps is not None:
        return (X + inverse_sqrt_fixed(M, inner_steps) @ X).to(dtype)
    distance = torch.linalg.matrix_norm(M)
    if not float(distance.amax()) < 0.6:
        return polar(polar_svd(X, far=~(distance < 0.6))).to(dtype)
    R, rough = inverse_sqrt(M, positive=False)
    Y = X + R @ X
    return (Y if rough is None else torch.where(rough[..., None, None], polar(Y), Y)).to(dtype)


def gram_deviation(X: Tensor) -> Tensor:
    """X Xᵀ − I, accumulated in float64: in float32 the sum itself would be off by some 4e-7 at n = 384."""
    X64 = X if X.device.type == "mps" else X.double()
    return (symmetric_matmul(X64, X64.mT) - identity(X64)).to(X.dtype)


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


STRIP = 96  # rows computed at a time where half of a product is enough; below two of them it is not worth the calls


def symmetric_matmul(A: Tensor, B: Tensor, *, sign: int = 1) -> Tensor:
    """A B, known to be symmetric (or skew: sign = −1): on a CPU only strips of its lower half are computed.

    Costs 5/8 of the product at m = 384.  A large batch, as an accelerator, is better served by one call.
    """
    m = A.shape[-2]
    if m < 2 * STRIP or A.device.type != "cpu" or math.prod(A.shape[:-2]) > 4:
        return torch.bmm(A, B) if A.ndim == 3 else A @ B
    C = A.new_empty((*A.shape[:-1], m))
    for i in range(0, m, STRIP):
        j = min(i + STRIP, m)
        torch.matmul(A[..., i:j, :], B[..., :, :j], out=C[..., i:j, :j])
        C[..., :i, i:j] = C[..., i:j, :i].mT if sign > 0 else -C[..., i:j, :i].mT
    return C


DEGREES = (1, 2, 3, 6)  # of the polynomials; evaluated with 0, 1, 2 and 3 products


@cache
def polynomials(
    dtype: torch.dtype, device: torch.device, *, positive: bool
) -> tuple[list[float], Tensor, Tensor]:
    """Polynomials x q(x) ≈ (1 + x)^(−1/2) − 1: how far each reaches (as numbers, and all but the last as a tensor), and
    their coefficients, a row a degree.

    q interpolates −1/(s(1 + s)), s = √(1 + x), at Chebyshev nodes of [0, h] (or [−h, h]).  The error of degree d is at
    most 4 c ℓ (ℓ/4)ᵈ with c = |binomial(−1/2, d + 1)| (at the left end) and ℓ the interval's length; h is where that is a
    quarter of the last place.
    """
    tolerance = torch.finfo(dtype).eps / 4
    reaches, rows = [], []
    for d in DEGREES:
        c = math.comb(2 * d + 2, d + 1) / 4 ** (d + 1)
        length = 4 * (tolerance / (16 * c)) ** (1 / (d + 1))
        low, high = (0.0, length) if positive else (-length / 2, length / 2)
        angles = (torch.arange(d, dtype=torch.float64) + 0.5) * math.pi / d
        x = (low + high) / 2 + length / 2 * angles.cos()
        s = (1 + x).sqrt()
        scaled = torch.linalg.solve(torch.vander(x / high, d, increasing=True), -1 / (s * (1 + s)))
        coefficients = scaled / high ** torch.arange(d, dtype=torch.float64)
        reaches.append(high)
        rows.append(torch.cat([coefficients, coefficients.new_zeros(DEGREES[-1] - d)]))
    edges = torch.tensor(reaches[:-1], dtype=dtype, device=device)
    return reaches, edges, torch.stack(rows).to(device, dtype)[..., None, None]


def inverse_sqrt(M: Tensor, *, positive: bool) -> tuple[Tensor, Tensor | None]:
    """(I + M)^(−1/2) − I for symmetric M (B, m, m), M ⪰ 0 if `positive`; and which of the batch were rough (None: none).

    Only the deviation from I is computed, so its error is relative to the *deviation*: X + R̃X rounds each entry of X
    once, where (I + R̃)X would round it m times.  That is what keeps a training step from drifting.

    In float32 polynomials reach up to ‖M‖ = 0.0003, 0.007, 0.036 and 0.28 (M ⪰ 0; half of that otherwise), which covers
    nearly every training step.  A wider spectrum is first drawn together (`_draw_together`), some four products a round,
    one round up to ‖M‖ = 2 and four up to 100; beyond 1,000 it is an eigendecomposition.  Those round absolutely, an
    error of some m·eps: they are the rough ones, for the caller to put right.

    How much is computed follows from the widest spectrum of the batch (one or two synchronisations), but what happens to
    a matrix depends on that matrix alone: terms and rounds it does not need leave it as it is, to the bit.  So results do
    not depend on the batching, but for how a product itself rounds.
    """
    reaches, edges, rows = polynomials(M.dtype, M.device, positive=positive)
    bound = torch.linalg.matrix_norm(M)
    worst = float(bound.amax())
    if worst > reaches[0]:
        M2 = symmetric_matmul(M, M)
    if worst > reaches[1]:
        tight = torch.linalg.matrix_norm(M2).sqrt()  # ‖M‖ ≤ √‖M²‖_F ≤ ‖M‖_F
        bound = torch.where(bound > reaches[1], tight, bound)
        worst = float(bound.amax())
    if not worst < (1e3 if positive else 0.9):
        return _inverse_sqrt_far(M, bound, positive)
    wide, Y = None, None
    if worst > reaches[-1]:
        wide = bound > reaches[-1]
        M, Y, bound = _draw_together(M, bound, worst, positive)
        M2 = symmetric_matmul(M, M)
        worst = reaches[-1]
    q = rows[torch.bucketize(bound, edges)].unbind(-3)
    R = q[0] * M
    if worst > reaches[0]:
        R.addcmul_(q[1], M2)
    if worst > reaches[1]:
        M3 = symmetric_matmul(M, M2)
        R.addcmul_(q[2], M3)
    if worst > reaches[2]:
        C = (q[3] * M).addcmul_(q[4], M2).addcmul_(q[5], M3)
        del M2
        R.add_(symmetric_matmul(C, M3))
    return (R, wide) if Y is None else ((Y - identity(M)) + symmetric_matmul(R, Y), wide)


def _draw_together(M: Tensor, bound: Tensor, worst: float, positive: bool):
    """Rounds of T ← F T F and Y ← Y F, with F = I + D/2 + 3D²/8 ≈ T^(−1/2), D = I − T, and T scaled to be centred at 1.

    They end with every T − I within what the polynomials reach; Y is what they have multiplied together.
    """
    I = identity(M)
    reach = polynomials(M.dtype, M.device, positive=positive)[0][-1]
    wide = bound > reach
    ends = (torch.zeros_like(bound) if positive else -bound, bound)
    host = (0.0 if positive else -worst, worst)
    Y = None
    while max(-host[0], host[1]) > reach:
        wide = wide & (torch.maximum(-ends[0], ends[1]) > reach)
        mask = wide[..., None, None]
        centre = torch.where(wide, 2 / (2 + ends[0] + ends[1]), 1.0)[..., None, None]
        T = centre * (I + M)
        D = torch.where(mask, I - T, 0.0)
        F = I + D / 2 + 3 / 8 * symmetric_matmul(D, D)
        M = torch.where(mask, symmetric_matmul(symmetric_matmul(F, T), F) - I, M)
        F = centre.sqrt() * F
        Y = F if Y is None else symmetric_matmul(Y, F)
        reach = polynomials(M.dtype, M.device, positive=False)[0][
            -1
        ]  # from now on spectra lie on both sides of 1
        after = _after_round(*ends)
        ends = (torch.where(wide, after[0], ends[0]), torch.where(wide, after[1], ends[1]))
        bound = torch.where(wide, reach, bound)
        host = _after_round(*host)
    return M, Y, bound


def _after_round(lower, upper):
    """Where a round sends the ends of a spectrum [1 + lower, 1 + upper]: x ↦ (1 + x)(1 − x/2 + 3x²/8)² is monotone."""
    x = (upper - lower) / (2 + lower + upper)
    return tuple((1 + e) * (1 - e / 2 + 3 / 8 * e**2) ** 2 - 1 for e in (-x, x))


def _inverse_sqrt_far(M: Tensor, bound: Tensor, positive: bool) -> tuple[Tensor, Tensor]:
    """`inverse_sqrt` where some spectra are too wide to iterate on: those by eigendecomposition in float64."""
    if not M.isfinite().all():
        raise FloatingPointError("the step overflowed; lower the learning rate")
    far = ~(bound < (1e3 if positive else 0.9))
    mask = far[..., None, None]
    eigenvalues, Q = torch.linalg.eigh(M[far].double())
    eigenvalues = eigenvalues.clamp_min(0 if positive else -1)
    R_far = (Q * ((1 + eigenvalues).rsqrt() - 1).unsqueeze(-2)) @ Q.mT
    R, wide = inverse_sqrt(torch.where(mask, 0.0, M), positive=positive)
    return R.masked_scatter(mask, R_far.to(M.dtype)), far if wide is None else far | wide


def inverse_sqrt_fixed(M: Tensor, steps: int) -> Tensor:
    """(I + M)^(−1/2) − I after `steps` coupled Newton–Schulz iterations (Alg. 3), from a scale at which they converge.

    Near the manifold each iteration squares the error: e becomes 3e²/2, from e = ‖M‖/2.
    """
    I = identity(M)
    A = I + M
    size = torch.linalg.matrix_norm(A, torch.inf)
    scale = torch.where(size < 1.9, 1.0, 1.9 / size)[..., None, None]
    Y, Z = A * scale, I.expand_as(A)
    for _ in range(steps):
        F = (3 * I - Z @ Y) / 2
        Y, Z = Y @ F, F @ Z
    return Z * scale.sqrt() - I
