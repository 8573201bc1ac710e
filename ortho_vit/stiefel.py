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

import contextlib
import math
from collections.abc import Iterator

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
        constrained = {name: p for name, p in x.named_parameters() if hasattr(p, "matrices")}
        for name in constrained:
            require_effective(name)
        return max(map(orthogonality_error, constrained.values()), key=nan_first, default=0.0)
    require_matrices("orthogonality_error", x)
    X = (x.matrices() if hasattr(x, "matrices") else x.detach()).double()
    A = X.mT @ X if is_tall(X) else X @ X.mT
    return (A - torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)).abs().max().item()


def require_effective(name: str) -> None:
    """Raise ValueError for a constrained parameter, by its name, that is not the weight its module computes with."""
    if "parametrizations." in name or name.endswith("_orig"):
        raise ValueError(
            f"{name!r} is constrained, but torch's parametrize or prune computes another weight from it, which is not; "
            "remove the one or the other"
        )


def nan_first(value: float) -> float:
    """A key for `max` under which NaN is the largest value."""
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

    Near the manifold (‖X Xᵀ − I‖ < 0.3) this is one or two iterations, each of which takes the Gram matrix, an m × m
    product and one more to apply the factor.  Farther away a singular value decomposition in float64 comes first.  The
    host reads the distances to choose between the two.

    `inner_steps` fixes the number of Newton–Schulz iterations instead (the paper's Algorithm 3): the host looks at
    nothing, and the error is whatever that many iterations leave.
    """
    if inner_steps is not None and inner_steps < 1:
        raise ValueError(f"polar: inner_steps must be at least 1, got {inner_steps}")
    require_matrices("polar", X)
    if is_tall(X):
        return polar(X.mT, inner_steps=inner_steps).mT.contiguous()
    dtype, shape, X = X.dtype, X.shape, X.to(working_dtype(X.dtype)).reshape(-1, *X.shape[-2:])
    with full_precision(X.device):
        D = gram_deviation(X)
        if inner_steps is not None:
            return torch.baddbmm(X, newton_schulz(D, inner_steps), X).to(dtype).view(shape)
        inaccurate = ~(frobenius(D) < 0.3)
        if inaccurate.any():
            X = polar_svd(X, inaccurate.flatten())
            D = gram_deviation(X)
        while ((distance := frobenius(D)) > SMALL[0]).any():
            R = (D * -0.5).add_(symmetric_matmul(D, D), alpha=0.375)  # turns ‖D‖ into 5/8 ‖D‖³
            X = torch.where(distance > SMALL[0], torch.baddbmm(X, R, X), X)
            D = gram_deviation(X)
        return torch.baddbmm(X, inverse_sqrt(D), X).to(dtype).view(shape)


def gram_deviation(X: Tensor) -> Tensor:
    """X Xᵀ − I, accumulated in float64 where there is one: in float32 the sum itself is off by some 4e-7 at n = 384."""
    X64 = X if X.device.type == "mps" else X.double()
    return (symmetric_matmul(X64, X64.mT) - identity(X64)).to(X.dtype)


def identity(X: Tensor) -> Tensor:
    """The m × m identity for a block X of m rows."""
    return torch.eye(X.shape[-2], dtype=X.dtype, device=X.device)


def polar_svd(X: Tensor, chosen: Tensor) -> Tensor:
    """Replace the `chosen` matrices of X by their polar factors, from a singular value decomposition in float64."""
    if not X.isfinite().all():
        raise ValueError("polar: the matrix has entries that are not finite")
    matrices = X[chosen] if X.device.type == "mps" else X[chosen].double()
    P, sigma, Qh = torch.linalg.svd(matrices, full_matrices=False)
    if (sigma[..., -1] <= sigma[..., 0] * torch.finfo(matrices.dtype).eps * max(X.shape[-2:])).any():
        raise ValueError(
            f"polar: the matrix is rank-deficient (singular values from {sigma[..., -1].min():.3g} to "
            f"{sigma[..., 0].max():.3g}): no orthonormal matrix is nearest to it"
        )
    return X.masked_scatter(chosen[..., None, None], (P @ Qh).to(X.dtype))


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products inside are computed in the precision of their operands: no autocast, no TF32.

    A compiled step cannot change the precision while it runs: the optimizers refuse to be compiled under another.
    """
    with torch.autocast(device.type, enabled=False) if autocasts(device) else contextlib.nullcontext():
        if torch.compiler.is_compiling():
            yield
            return
        before = float32_precision()
        if before == "highest":
            yield
            return
        _set_float32_precision("highest" if isinstance(before, str) else ("ieee",) * len(before))
        try:
            yield
        finally:
            _set_float32_precision(before)


Precision = str | tuple[str, ...]
_BACKENDS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]


def float32_precision() -> Precision:
    """How float32 products are computed: "highest", another word of torch's, or a word of each backend.

    The latter where they were set as `torch.backends.cuda.matmul.fp32_precision`: torch refuses to mix the two ways.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        words = tuple(backend.fp32_precision for backend in _BACKENDS)
        return "highest" if set(words) == {"ieee"} else words


def _set_float32_precision(precision: Precision) -> None:
    if isinstance(precision, str):
        torch.set_float32_matmul_precision(precision)
        return
    for backend, word in zip(_BACKENDS, precision, strict=True):
        backend.fp32_precision = word


def autocasts(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


# ------------------------------------------------------------------------------------------ symmetric matrices near I


STRIP = 96  # rows computed at a time where half of a product is enough; below two of them it is not worth the calls


def is_halved(A: Tensor) -> bool:
    """Whether half of a symmetric product with A is computed: for few large matrices on a CPU."""
    return A.shape[-2] >= 2 * STRIP and A.device.type == "cpu" and math.prod(A.shape[:-2]) <= 4


def symmetric_matmul(A: Tensor, B: Tensor, *, sign: int = 1) -> Tensor:
    """A B, known to be symmetric (or skew: sign = −1): on a CPU only strips of its lower half are computed.

    Costs 5/8 of the product at m = 384.  A large batch, as an accelerator, is better served by one call.
    """
    m = A.shape[-2]
    differentiated = torch.is_grad_enabled() and (A.requires_grad or B.requires_grad)
    if not is_halved(A) or differentiated:
        return torch.bmm(A, B) if A.ndim == 3 else A @ B
    C = A.new_empty((*A.shape[:-1], m))
    for i in range(0, m, STRIP):
        j = min(i + STRIP, m)
        torch.matmul(A[..., i:j, :], B[..., :, :j], out=C[..., i:j, :j])
        C[..., :i, i:j] = C[..., i:j, :i].mT if sign > 0 else -C[..., i:j, :i].mT
    return C


def add_symmetric_(C: Tensor, A: Tensor, B: Tensor, *, sign: int = 1) -> Tensor:
    """C + A B, in place, for a product that is symmetric (or skew)."""
    if is_halved(A):
        return C.add_(symmetric_matmul(A, B, sign=sign))
    return C.baddbmm_(A, B)


def frobenius(A: Tensor) -> Tensor:
    """The Frobenius norm of each matrix, as (B, 1, 1)."""
    return torch.linalg.vector_norm(A, dim=(-2, -1), keepdim=True)


def add_to_diagonal(A: Tensor, c: Tensor | float) -> Tensor:
    """A + c I, in place; c is a number, or one for each matrix, (B, 1, 1)."""
    A.diagonal(dim1=-2, dim2=-1).add_(c[..., 0] if isinstance(c, Tensor) else c)
    return A


# (I + D)^(−1/2) − I ≈ c₁D + c₂D² + S(k₀ + k₁D + k₂D² + S),  S = c₃D³ + c₄D⁴: degree 8 by two products besides D².  These
# minimise the error for a spectrum in [0, 0.66], where it is 8.1e-9; c₁ and c₂ are nearly those of the binomial series.
C1, C2, C3, C4 = -0.499998828, 0.374946486, -0.277513702, 0.120329756
K0, K1, K2 = 1.123034136, -0.474845462, 0.576833088
# The ‖D‖₂ up to which the first two terms, and those with k₀S, are enough: the rest is 1.5e-8
SMALL = (3.6e-3, 1.8e-2)


def inverse_sqrt(D: Tensor, D2: Tensor | None = None, *, host: bool = True) -> Tensor:
    """(I + D)^(−1/2) − I for symmetric D (B, m, m) with its spectrum in [0, 0.66], up to rounding.

    Only the deviation from I is computed, so its error is relative to the *deviation*: X + R̃X rounds each entry of X
    once, where (I + R̃)X would round it m times.

    A small D, as in nearly every training step, needs only the first terms of a polynomial.  The number of terms of each
    matrix depends on its own ρ = √‖D²‖ ≥ ‖D‖₂ alone.  With `host`, the host reads the largest ρ of the batch and skips
    terms that no matrix needs, which changes no bit.  float64 adds one Newton–Schulz iteration, which squares the error.
    """
    D2 = symmetric_matmul(D, D) if D2 is None else D2
    size = frobenius(D2)  # ρ²
    largest = math.sqrt(float(size.detach().amax())) if host else math.inf
    R = (D * C1).add_(D2, alpha=C2)
    if largest > SMALL[0]:
        S = symmetric_matmul(D2, (D * C3).add_(D2, alpha=C4))
        R.addcmul_(S, size > SMALL[0] ** 2, value=K0)
    if largest > SMALL[1]:
        T = torch.add(S, D2, alpha=K2).add_(D, alpha=K1).mul_(size > SMALL[1] ** 2)
        R = add_symmetric_(R, S, T)
    return _polished(D, R) if D.dtype == torch.float64 else R


def spectral_bound(D: Tensor) -> Tensor:
    """√‖D²‖ for symmetric D, as (B, 1, 1): at least ‖D‖₂, at most m^(1/4) times that."""
    return frobenius(symmetric_matmul(D, D)).sqrt()


def _polished(D: Tensor, R: Tensor) -> Tensor:
    """R̃ after R ← R + R(I − (I + D)R²)/2, in deviations from I."""
    P = (R @ R).add_(R, alpha=2)  # R² − I
    residual = (D @ P).add_(P).add_(D).neg_()
    return R + (R @ residual).add_(residual) / 2


def newton_schulz(D: Tensor, steps: int) -> Tensor:
    """(I + D)^(−1/2) − I after `steps` coupled Newton–Schulz iterations (Alg. 3), from a scale at which they converge.

    Near the manifold each iteration squares the error: e becomes 3e²/2, from e = ‖D‖/2.
    """
    I = identity(D)
    A = I + D
    size = torch.linalg.matrix_norm(A, torch.inf)
    scale = torch.where(size < 1.9, 1.0, 1.9 / size)[..., None, None]
    Y, Z = A * scale, I.expand_as(A)
    for _ in range(steps):
        F = (3 * I - Z @ Y) / 2
        Y, Z = Y @ F, F @ Z
    return Z * scale.sqrt() - I
