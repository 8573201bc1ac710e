"""Projection-robust Wasserstein: the projection that makes two point clouds hardest to match.

`projection_robust_wasserstein` maximises the transport value over projections U ∈ St(d, k) of both clouds (Paty & Cuturi
2019; Lin et al. 2020), alternating a warm-started Sinkhorn solve with one step of an optimizer on a `StiefelParameter`.
Any optimizer of `ortho_vit.optim` will do; `RGAS` and `RAGAS` here are the ones of Lin et al.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ortho_vit.optim import StiefelSGD
from ortho_vit.parameter import StiefelParameter
from ortho_vit.stiefel import polar, project_tangent, qr
from ortho_vit.transport.sinkhorn import (
    check_floating,
    check_positive,
    check_weights,
    common_batch,
    flatten,
    join,
    slices,
    solve,
)

OptimizerFactory = Callable[[list[StiefelParameter]], Optimizer]
WHO = "projection_robust_wasserstein"  # in error messages


@dataclass(frozen=True)
class ProjectionResult:
    """What `projection_robust_wasserstein` found; leading dimensions are those of the input.

    `projection` U (…, d, k); `plan` (…, n, m) the entropic plan at U; `value` Σ planᵢⱼ ‖Uᵀxᵢ − Uᵀyⱼ‖²,
    without the entropy; `history` (steps + 1, …) that value at the start and after every step, so `value`
    is its last row; `converged` whether the Riemannian gradient and the plan's marginals both came below
    their tolerances.  It is False where all points agree in their projections by `start`, though not otherwise: that is
    the minimum, which no step leaves, so give another `start`.
    """

    projection: Tensor
    value: Tensor
    plan: Tensor
    history: Tensor
    converged: Tensor


@torch.no_grad()
def projection_robust_wasserstein(
    x: Tensor,
    y: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    k: int,
    reg: float,
    optimizer: OptimizerFactory | None = None,
    start: Tensor | None = None,
    iterations: int = 300,
    tolerance: float = 1e-5,
    sweeps: int = 1000,
    sinkhorn_tolerance: float = 1e-6,
) -> ProjectionResult:
    """The k-dimensional projection under which the clouds x (…, n, d) and y (…, m, d) are furthest apart:

        max_{U ∈ St(d, k)}  min_π  Σ πᵢⱼ ‖Uᵀxᵢ − Uᵀyⱼ‖² + reg ⟨π, log π − 1⟩.

    Weights a (…, n) and b (…, m) are uniform unless given; pad a smaller cloud with points of zero weight
    to batch it with larger ones.  `optimizer` builds the optimizer from a list of parameters: a class of
    `ortho_vit.optim`, or `functools.partial` of one with its learning rate.  The default is StiefelSGD at a
    learning rate taken from the data.  `start` is the identity's first k columns unless given.  It stops
    after `iterations` steps, or once the Riemannian gradient is below `tolerance` times the gradient for
    every pair.  Each step's plan takes at most `sweeps` Sinkhorn sweeps from the step before, fewer where
    its marginals are exact to `sinkhorn_tolerance` (ℓ¹).  Value and gradient are taken at the orthonormal U
    nearest to the parameter: an optimizer that drifts off the manifold gains nothing by it.
    """
    check_positive(WHO, reg=reg, iterations=iterations, sweeps=sweeps)
    x, y, a, b, batch = _check_clouds(x, y, a, b)
    centre = 0.5 * (a.unsqueeze(-2) @ x + b.unsqueeze(-2) @ y)
    x, y = x - centre, y - centre  # the cost does not see a common shift; its rounding does
    extent = torch.maximum(*(cloud.square().sum(-1).amax(-1) for cloud in (x, y)))
    if not (4 * extent / reg).isfinite().all():
        raise ValueError(
            f"{WHO}: reg = {reg:g} is too small for costs up to {4 * extent.max():.3g}; raise it"
        )
    parameter = StiefelParameter(_start_projection(start, x, k, batch))
    opt = _default_optimizer(x, y, a, b, [parameter]) if optimizer is None else optimizer([parameter])
    sign = 1.0 if opt.param_groups[0].get("maximize") else -1.0

    history: list[Tensor] = []
    U, psi = parameter.detach(), None
    evaluate = partial(_evaluate, x, y, a, b, reg=reg, tolerance=sinkhorn_tolerance, sweeps=sweeps)
    for _ in range(iterations):
        now = evaluate(U, psi)
        psi = now.psi
        if bool(_is_flat(U, now, tolerance, sinkhorn_tolerance).all()):
            break
        history.append(now.value)
        parameter.grad = now.gradient.mul_(sign)
        opt.step()
        U = polar(parameter.detach())  # to rounding the parameter itself, unless its optimizer drifts
    now = evaluate(U, psi, keep_plan=True)
    history.append(now.value)
    stuck = (now.gradient == 0).flatten(1).all(-1) & (extent > 0)  # at a minimum, which no step leaves
    return ProjectionResult(
        projection=U.reshape(*batch, -1, k),
        value=now.value.reshape(batch),
        plan=now.plan.reshape(*batch, *now.plan.shape[-2:]),
        history=torch.stack(history).reshape(-1, *batch),
        converged=(_is_flat(U, now, tolerance, sinkhorn_tolerance) & ~stuck).reshape(batch),
    )


class _Evaluation(NamedTuple):
    """The inner minimum at one U, over all pairs."""

    psi: Tensor  # (B, m), column potentials / reg
    gradient: Tensor  # (B, d, k), 2 V_π U
    value: Tensor  # (B,), tr(Uᵀ V_π U)
    error: Tensor  # (B,), ℓ¹ error of the plan's marginals
    plan: Tensor  # (B, n, m) if it was asked for, otherwise empty


def _evaluate(
    x: Tensor,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    U: Tensor,
    psi: Tensor | None,
    *,
    reg: float,
    tolerance: float,
    sweeps: int,
    keep_plan: bool = False,
) -> _Evaluation:
    """The plans at U, from the potentials psi if given, and  V_π U = Xᵀ(r∘XU − π YU) + Yᵀ(c∘YU − πᵀ XU).

    r and c are the plan's own marginals.  Neither V_π = Σ πᵢⱼ (xᵢ − yⱼ)(xᵢ − yⱼ)ᵀ nor the n·m displacements are formed.
    """
    parts = []
    for s in slices(len(x), x.shape[-2] * y.shape[-2], x.device):
        p, q = x[s] @ U[s], y[s] @ U[s]  # (·, n, k), (·, m, k)
        M = (p @ q.mT).mul_(2).sub_(p.square().sum(-1, keepdim=True)).sub_(q.square().sum(-1).unsqueeze(-2))
        warm = None if psi is None else psi[s]
        plan, _, psi_s, error, _ = solve(a[s], b[s], M.div_(reg), warm, tolerance, sweeps)
        VU = x[s].mT @ (plan.sum(-1, keepdim=True) * p - plan @ q)
        VU += y[s].mT @ (plan.sum(-2).unsqueeze(-1) * q - plan.mT @ p)
        value = torch.linalg.vecdot(U[s].flatten(1), VU.flatten(1))
        parts.append((psi_s, VU.mul_(2), value, error, plan if keep_plan else plan.new_empty(0)))
    return _Evaluation(*(join(list(tensors)) for tensors in zip(*parts, strict=True)))


def _is_flat(U: Tensor, now: _Evaluation, tolerance: float, sinkhorn_tolerance: float) -> Tensor:
    slope = project_tangent(U, now.gradient).flatten(1).norm(dim=-1)
    return (slope <= tolerance * now.gradient.flatten(1).norm(dim=-1)) & (now.error <= sinkhorn_tolerance)


def _start_projection(start: Tensor | None, x: Tensor, k: int, batch: torch.Size) -> Tensor:
    """The identity's first k columns for every pair, or `start` checked and made orthonormal to rounding."""
    d = x.shape[-1]
    if not isinstance(k, Integral) or not 1 <= k <= d:
        raise ValueError(f"{WHO}: k must be between 1 and d = {d}, got {k}")
    if start is None:
        return torch.eye(d, k, dtype=x.dtype, device=x.device).repeat(len(x), 1, 1)
    if start.shape[-2:] != (d, k) or start.shape[:-2] not in ((), batch):
        raise ValueError(f"{WHO}: start must be (…, {d}, {k}), got {tuple(start.shape)}")
    try:
        return polar(flatten(start.detach().to(x), batch, 2).clone())
    except ValueError as error:
        raise ValueError(f"{WHO}: start: {error}") from error


def _default_optimizer(
    x: Tensor, y: Tensor, a: Tensor, b: Tensor, parameters: list[StiefelParameter]
) -> Optimizer:
    """StiefelSGD at lr = 1/L,  L = 2 λ_max(V_{a⊗b}): the largest curvature at the independent plan, of all pairs."""
    shift = a.unsqueeze(-2) @ x - b.unsqueeze(-2) @ y  # (B, 1, d)
    V = x.mT @ (a.unsqueeze(-1) * x) + y.mT @ (b.unsqueeze(-1) * y)
    V = V + 0.5 * shift.mT @ shift  # x and y are centred at their common mean: the means are ±shift/2
    curvature = 2 * torch.linalg.matrix_norm(V, 2).amax().item()
    return StiefelSGD(parameters, lr=1 / curvature if curvature > 0 else 1.0, momentum=0.9)


class RGAS(Optimizer):
    """Riemannian gradient with QR retraction (Lin et al. 2020, Alg. 1):  U ← QR(U + lr·P_U(G)).

    The baseline of projection-robust Wasserstein, without momentum, for `StiefelParameter`s without free rows.
    """

    keeps_stiefel = True

    def __init__(self, params: Iterable[Any], *, lr: float, maximize: bool = False) -> None:
        check_positive("RGAS", lr=lr)
        super().__init__(params, {"lr": lr, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                U, xi = _riemannian_gradient(parameter, group["maximize"])
                U.copy_(qr(U + group["lr"] * xi))


class RAGAS(Optimizer):
    """RGAS with adaptive row and column scales (Lin et al. 2020, Alg. 2).

        U ← QR(U + lr/√(t+1) · P_U(r̂^(−1/4) ξ ĉ^(−1/4))),   ξ = P_U(G),
    r̂ and ĉ the largest running averages so far, of weight `beta`, of diag(ξξᵀ)/k and diag(ξᵀξ)/d, from 1e-6.
    """

    keeps_stiefel = True

    def __init__(
        self, params: Iterable[Any], *, lr: float, beta: float = 0.8, maximize: bool = False
    ) -> None:
        check_positive("RAGAS", lr=lr)
        if not 0 < beta < 1:
            raise ValueError(f"RAGAS: beta must be between 0 and 1, got {beta}")
        super().__init__(params, {"lr": lr, "beta": beta, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                U, xi = _riemannian_gradient(parameter, group["maximize"])
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                rows = _running_maximum(state, "rows", xi.square().mean(-1), group["beta"])
                columns = _running_maximum(state, "columns", xi.square().mean(-2), group["beta"])
                scaled = xi * rows.pow(-0.25).unsqueeze(-1) * columns.pow(-0.25).unsqueeze(-2)
                U.copy_(qr(U + group["lr"] / math.sqrt(state["step"]) * project_tangent(U, scaled)))


def _running_maximum(state: dict[str, Any], name: str, new: Tensor, beta: float) -> Tensor:
    """The largest value so far, from 1e-6, of the running average of `new`."""
    average = state.setdefault(f"{name}_average", torch.zeros_like(new)).lerp_(new, 1 - beta)
    largest = state.setdefault(f"{name}_maximum", torch.full_like(new, 1e-6))
    return torch.maximum(largest, average, out=largest)


def _riemannian_gradient(parameter: Tensor, maximize: bool) -> tuple[Tensor, Tensor]:
    """The matrices of a parameter, and the direction P_U(±G) to walk in."""
    if not isinstance(parameter, StiefelParameter) or parameter.grad is None:
        raise ValueError("RGAS and RAGAS move StiefelParameters that have a gradient, and nothing else")
    U = parameter.matrices()
    if parameter.rows < parameter.shape[-2] or U.shape[-2] < U.shape[-1]:
        shape = tuple(parameter.shape)
        raise ValueError(
            f"RGAS and RAGAS move frames of columns without free rows, got {shape}; transpose it"
        )
    if not parameter.grad.isfinite().all():
        raise FloatingPointError("RGAS and RAGAS: the gradient is not finite; nothing was changed")
    G = parameter.grad.reshape(U.shape)
    return U, project_tangent(U, G if maximize else -G)


def _check_clouds(
    x: Tensor, y: Tensor, a: Tensor | None, b: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, torch.Size]:
    """The clouds and their weights flattened to one batch dimension, and the leading dimensions they had."""
    shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-1]:
        raise ValueError(f"{WHO}: x and y must be (…, n, d) and (…, m, d), got {shapes}")
    if x.numel() == 0 or y.numel() == 0:
        raise ValueError(f"{WHO}: a cloud is empty: x is {tuple(x.shape)}, y is {tuple(y.shape)}")
    check_floating(WHO, x=x, y=y)
    n, m = x.shape[-2], y.shape[-2]
    a = x.new_full((n,), 1 / n) if a is None else a.to(x)
    b = x.new_full((m,), 1 / m) if b is None else b.to(x)
    if a.shape[-1:] != (n,) or b.shape[-1:] != (m,):
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"{WHO}: a and b must be (…, {n}) and (…, {m}), got {shapes}")
    check_floating(WHO, a=a, b=b)
    a, b = check_weights(WHO, "a", a), check_weights(WHO, "b", b)
    batch = common_batch(WHO, x.shape[:-2], y.shape[:-2], a.shape[:-1], b.shape[:-1])
    x, y = flatten(x, batch, 2), flatten(y.to(x), batch, 2)
    return x, y, flatten(a, batch, 1), flatten(b, batch, 1), batch
