"""Entropic optimal transport, and the projection that makes two point clouds hardest to match.

`sinkhorn` solves  min_π ⟨π, C⟩ + reg ⟨π, log π − 1⟩  over the plans π with marginals a and b, for one pair
of measures or a batch of them.  The optimum is  π = exp((f ⊕ g − C) / reg)  with potentials f, g.  They are
kept in the log domain; in between, sweeps run as two matrix-vector products with the kernel
K = exp((f ⊕ g − C) / reg)  at the potentials of a moment ago, so a sweep costs no exponential, and the
scalings u, v on top of K are absorbed into f, g before they lose digits.  Where even that is not enough (the
first sweeps at a tiny reg), the sweeps are done again with log-sum-exp: slower, and never out of range.
Two things save sweeps: over-relaxation, and a cold start that brings reg down in steps.

`projection_robust_wasserstein` maximises the value over projections U ∈ St(d, k) of both clouds (Paty &
Cuturi 2019; Lin et al. 2020), alternating a warm-started Sinkhorn solve with one step of an optimizer on a
`StiefelParameter`.  Any optimizer of `ortho_vit.optim` will do; `RGAS` and `RAGAS` here are the ones of Lin
et al.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ortho_vit.optim import StiefelSGD
from ortho_vit.parameter import StiefelParameter
from ortho_vit.stiefel import polar, project_tangent, qr

__all__ = ["RAGAS", "RGAS", "ProjectionResult", "SinkhornResult", "projection_robust_wasserstein", "sinkhorn"]

OptimizerFactory = Callable[[list[StiefelParameter]], Optimizer]

_CHUNK = 8  # sweeps between two looks at the error: each look is one host synchronisation
_WALK = 4096  # on a CPU, pairs with more entries are solved one by one: a kernel then stays in cache


@dataclass(frozen=True)
class SinkhornResult:
    """A solved transport problem; leading dimensions are those of the input.

    `plan` (…, n, m); `potentials` f (…, n) and g (…, m) with plan = exp((f ⊕ g − C) / reg), −inf where a
    weight is zero; `value` the transport cost ⟨plan, C⟩, without the entropy; `iterations` the sweeps made;
    `error` the ℓ¹ distance of the plan's marginals from a and b, summed over both; `converged` whether the
    distance came below the tolerance.
    """

    plan: Tensor
    potentials: tuple[Tensor, Tensor]
    value: Tensor
    iterations: int
    error: Tensor
    converged: Tensor


@torch.no_grad()
def sinkhorn(
    a: Tensor,
    b: Tensor,
    C: Tensor,
    reg: float,
    *,
    potentials: tuple[Tensor, Tensor] | None = None,
    tolerance: float | None = None,
    max_sweeps: int = 10_000,
) -> SinkhornResult:
    """Entropic optimal transport between the weights a (…, n) and b (…, m) at the cost C (…, n, m).

    `potentials` of an earlier result warm-start the solve.  It stops once the ℓ¹ error of the marginals is
    below `tolerance` (default 1e-9 in float64, 1e-5 in float32) for every pair, or after `max_sweeps`.  No
    gradient flows through.
    """
    _check_positive("sinkhorn", reg=reg, max_sweeps=max_sweeps)
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"sinkhorn: tolerance must be at least 0, got {tolerance}")
    a, b, C, batch = _check_problem("sinkhorn", a, b, C)
    tolerance = _default_tolerance(C.dtype) if tolerance is None else tolerance
    warm = None if potentials is None else _check_potentials(potentials[1], b, batch) / reg
    _check_scale("sinkhorn", C, reg)
    parts = [
        _solve(a[s], b[s], C[s] / -reg, None if warm is None else warm[s], tolerance, max_sweeps)
        for s in _slices(len(C), C[0].numel(), C.device)
    ]
    plan, phi, psi, row_error = (
        _join(list(tensors)) for tensors in zip(*(part[:4] for part in parts), strict=True)
    )
    error = (plan.sum(-1) - a).abs().sum(-1) + (plan.sum(-2) - b).abs().sum(-1)
    return SinkhornResult(
        plan=plan.unflatten(0, batch) if batch else plan[0],
        potentials=((phi * reg).reshape(*batch, -1), (psi * reg).reshape(*batch, -1)),
        value=torch.linalg.vecdot(plan.flatten(1), C.flatten(1)).reshape(batch),
        iterations=max(part.sweeps for part in parts),
        error=error.reshape(batch),
        converged=row_error.le(tolerance).reshape(batch),
    )


class _Solution(NamedTuple):
    plan: Tensor  # (B, n, m)
    phi: Tensor  # (B, n), f / reg
    psi: Tensor  # (B, m), g / reg
    error: Tensor  # (B,), ℓ¹ error of the rows; the columns were scaled last and are exact to rounding
    sweeps: int


def _solve(
    a: Tensor, b: Tensor, M: Tensor, psi: Tensor | None, tolerance: float, max_sweeps: int
) -> _Solution:
    """Sinkhorn on M = −C / reg from the column potentials `psi`, by scaling an absorbed kernel.

    Entries of K below the smallest normal number are lost.  With u, v held below its −1/3 power, what is lost
    is below its 1/3 power (3e-103 in float64, 2e-13 in float32): chunks that leave this range are redone in
    the log domain.
    """
    tiny = torch.finfo(M.dtype).tiny
    void_a, void_b = (a == 0).to(M), (b == 0).to(M)  # makes 0/0 of an empty support 0/1
    psi, sweeps = _cold_start(a, b, M, max_sweeps) if psi is None else (psi, 0)
    psi = psi.nan_to_num(neginf=0.0)
    K = M + psi.unsqueeze(-2)
    phi = -K.amax(-1)  # the largest entry of every row of K is 1
    K = K.add_(phi.unsqueeze(-1)).exp_()
    relax, previous = _Relaxation(), math.inf
    u, v = 1 - void_a, 1 - void_b
    Kv = _matvec(K, v)
    while True:
        chunk = min(max(sweeps, 1), max(_CHUNK, sweeps // 4), max_sweeps - sweeps)
        start, last = (u, v, Kv), sweeps + chunk >= max_sweeps
        for i in range(chunk):
            omega = relax.omega if i < chunk - 1 and not last else 1.0  # then a plain one: errors compare
            u = _scale(u, a / (Kv + void_a), omega)
            v = _scale(v, b / (_matvec(K.mT, u) + void_b), omega)
            Kv = _matvec(K, v)
        sweeps += chunk
        scalings = torch.cat([u + void_a, v + void_b], -1)
        error = (u * Kv - a).abs().sum(-1)
        worst, low, high = torch.stack([error.amax(), scalings.amin(), scalings.amax()]).tolist()
        reach = max(high, 1 / low) if low > 0 and math.isfinite(worst) else math.inf
        if not last and not relax.accepts(previous, worst if reach < math.inf else math.inf, chunk):
            u, v, Kv = start
            continue
        previous = worst
        if reach > tiny ** (-1 / 3):
            phi, psi = _log_sweeps(a.log(), b.log(), M, psi + start[1].log(), chunk)
            previous = math.inf
        elif worst <= tolerance or last:
            plan = K.mul_(u.unsqueeze(-1)).mul_(v.unsqueeze(-2))
            return _Solution(plan, phi + u.log(), psi + v.log(), error, sweeps)
        elif reach > tiny ** (-1 / 6):
            phi, psi = phi + u.log(), psi + v.log()
        else:
            continue
        u, v, K = 1 - void_a, 1 - void_b, (M + phi.unsqueeze(-1)).add_(psi.unsqueeze(-2)).exp_()
        Kv = _matvec(K, v)
        if last:
            return _Solution(K, phi, psi, (Kv - a).abs().sum(-1), sweeps)


def _cold_start(a: Tensor, b: Tensor, M: Tensor, max_sweeps: int) -> tuple[Tensor, int]:
    """Potentials to start from, and the sweeps they took: those of a larger reg, brought down by fours.

    Sinkhorn moves potentials by a few reg a sweep; where the costs span hundreds of reg this is the short way.
    """
    low, high = (end.item() for end in M.aminmax())
    psi, sweeps, heat = torch.zeros_like(b), 0, (high - low) / 50
    while heat > 4 and sweeps < max_sweeps // 2 - 100:
        rough = _solve(a, b, M / heat, psi / heat, 1e-2, 100)
        psi, sweeps, heat = rough.psi * heat, sweeps + rough.sweeps, heat / 4
    return psi, sweeps


class _Relaxation:
    """Over-relaxed sweeps, u ← u^(1−ω) (a / Kv)^ω, with ω fitted to the observed rate of convergence.

    Near the solution a sweep is a Gauss–Seidel step of rate θ < 1, so over-relaxation brings the rate to
    ω − 1 at ω = 2 / (1 + √(1 − θ)): as many sweeps as the square root of before (Thibault et al. 2017).  θ
    follows from the rate λ of the last chunk by Young's relation  (λ + ω − 1)² = λ ω² θ.  Away from the
    solution nothing is promised: a chunk that raised the error is undone and the next ones, twice as many
    each time, are plain sweeps, which always converge.
    """

    def __init__(self) -> None:
        self.omega, self._plain, self._penalty = 1.0, 0, 1

    def accepts(self, before: float, after: float, sweeps: int) -> bool:
        if self.omega > 1 and not after < before:
            self.omega, self._plain = 1.0, self._penalty
            self._penalty *= 2
            return False
        self._plain -= 1
        if self._plain < 0 and sweeps >= _CHUNK // 2 and 0 < after < before < math.inf:
            rate = (after / before) ** (1 / sweeps)
            if rate > self.omega - 1:
                theta = min((rate + self.omega - 1) ** 2 / (rate * self.omega**2), 1 - 1e-6)
                self.omega = max(2 / (1 + math.sqrt(1 - theta)), self.omega)
        return True


def _scale(old: Tensor, new: Tensor, omega: float) -> Tensor:
    return new if omega == 1 else new * (new / old.clamp(min=torch.finfo(old.dtype).tiny)).pow_(omega - 1)


def _matvec(K: Tensor, v: Tensor) -> Tensor:
    return (K @ v.unsqueeze(-1)).squeeze(-1)


def _log_sweeps(log_a: Tensor, log_b: Tensor, M: Tensor, psi: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sinkhorn as it is written, with log-sum-exp: what the kernel form must agree with."""
    phi = psi  # always replaced: count ≥ 1
    for _ in range(count):
        phi = log_a - torch.logsumexp(M + psi.unsqueeze(-2), -1)
        psi = log_b - torch.logsumexp(M + phi.unsqueeze(-1), -2)
    return phi, psi


def _slices(batch: int, entries: int, device: torch.device) -> Iterator[slice]:
    """Pairs to solve together: all of them, or on a CPU one by one when a pair is large."""
    size = 1 if device.type == "cpu" and entries > _WALK else max(batch, 1)
    return (slice(i, i + size) for i in range(0, batch, size))


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# ---- projection-robust Wasserstein ---------------------------------------------------------------


@dataclass(frozen=True)
class ProjectionResult:
    """What `projection_robust_wasserstein` found; leading dimensions are those of the input.

    `projection` U (…, d, k); `plan` (…, n, m) the entropic plan at U; `value` Σ planᵢⱼ ‖Uᵀxᵢ − Uᵀyⱼ‖²,
    without the entropy; `history` (steps + 1, …) that value at the start and after every step, so `value`
    is its last row; `converged` whether the Riemannian gradient and the plan's marginals both came below
    their tolerances.
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
    _check_positive("projection_robust_wasserstein", reg=reg, iterations=iterations, sweeps=sweeps)
    x, y, a, b, batch = _check_clouds("projection_robust_wasserstein", x, y, a, b)
    centre = 0.5 * (a.unsqueeze(-2) @ x + b.unsqueeze(-2) @ y)
    x, y = x - centre, y - centre  # the cost does not see a common shift; its rounding does
    parameter = StiefelParameter(_start_projection(start, x, k, batch))
    opt = _default_optimizer(x, y, a, b, [parameter]) if optimizer is None else optimizer([parameter])
    sign = 1.0 if opt.param_groups[0].get("maximize") else -1.0

    history: list[Tensor] = []
    U, now = parameter.detach(), _Evaluation()
    solve = partial(_evaluate, x, y, a, b, reg=reg, tolerance=sinkhorn_tolerance, sweeps=sweeps)
    for _ in range(iterations):
        now = solve(U, now.psi)
        if bool(_is_flat(U, now, tolerance, sinkhorn_tolerance).all()):
            break
        history.append(now.value)
        parameter.grad = now.gradient.mul_(sign)
        opt.step()
        U = polar(parameter.detach())  # to rounding the parameter itself, unless its optimizer drifts
    now = solve(U, now.psi, keep_plan=True)
    history.append(now.value)
    return ProjectionResult(
        projection=U.reshape(*batch, -1, k),
        value=now.value.reshape(batch),
        plan=now.plan.reshape(*batch, *now.plan.shape[-2:]),
        history=torch.stack(history).reshape(-1, *batch),
        converged=_is_flat(U, now, tolerance, sinkhorn_tolerance).reshape(batch),
    )


class _Evaluation(NamedTuple):
    """The inner minimum at one U, over all pairs."""

    psi: Tensor | None = None  # (B, m), column potentials / reg; None before the first
    gradient: Tensor = torch.empty(0)  # (B, d, k), 2 V_π U
    value: Tensor = torch.empty(0)  # (B,), tr(Uᵀ V_π U)
    error: Tensor = torch.empty(0)  # (B,), ℓ¹ error of the plan's marginals
    plan: Tensor = torch.empty(0)  # (B, n, m), where asked for


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
    """Solve for the plans at U and collect  V_π U = Xᵀ(r∘XU − π YU) + Yᵀ(c∘YU − πᵀ XU),  r and c the plan's
    own marginals.

    V_π = Σ πᵢⱼ (xᵢ − yⱼ)(xᵢ − yⱼ)ᵀ is neither formed nor are the n·m displacements.
    """
    parts = []
    for s in _slices(len(x), x.shape[-2] * y.shape[-2], x.device):
        p, q = x[s] @ U[s], y[s] @ U[s]  # (·, n, k), (·, m, k)
        M = (p @ q.mT).mul_(2).sub_(p.square().sum(-1, keepdim=True)).sub_(q.square().sum(-1).unsqueeze(-2))
        warm = None if psi is None else psi[s]
        plan, _, psi_s, error, _ = _solve(a[s], b[s], M.div_(reg), warm, tolerance, sweeps)
        VU = x[s].mT @ (plan.sum(-1, keepdim=True) * p - plan @ q)
        VU += y[s].mT @ (plan.sum(-2).unsqueeze(-1) * q - plan.mT @ p)
        value = torch.linalg.vecdot(U[s].flatten(1), VU.flatten(1))
        parts.append((psi_s, VU.mul_(2), value, error, plan if keep_plan else plan.new_empty(0)))
    return _Evaluation(*(_join(list(tensors)) for tensors in zip(*parts, strict=True)))


def _is_flat(U: Tensor, now: _Evaluation, tolerance: float, sinkhorn_tolerance: float) -> Tensor:
    slope = project_tangent(U, now.gradient).flatten(1).norm(dim=-1)
    return (slope <= tolerance * now.gradient.flatten(1).norm(dim=-1)) & (now.error <= sinkhorn_tolerance)


def _start_projection(start: Tensor | None, x: Tensor, k: int, batch: torch.Size) -> Tensor:
    """The identity's first k columns for every pair, or `start` checked and made orthonormal to rounding."""
    d = x.shape[-1]
    if not isinstance(k, int) or not 1 <= k <= d:
        raise ValueError(f"projection_robust_wasserstein: k must be between 1 and d = {d}, got {k}")
    if start is None:
        return torch.eye(d, k, dtype=x.dtype, device=x.device).repeat(len(x), 1, 1)
    if start.shape[-2:] != (d, k) or start.shape[:-2] not in ((), batch):
        raise ValueError(
            f"projection_robust_wasserstein: start must be (…, {d}, {k}), got {tuple(start.shape)}"
        )
    try:
        return polar(start.detach().to(x).expand(*batch, d, k).reshape(-1, d, k).clone())
    except ValueError as error:
        raise ValueError(f"projection_robust_wasserstein: start: {error}") from error


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

    The baseline of projection-robust Wasserstein; it moves `StiefelParameter`s without free rows, and has
    no momentum.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, maximize: bool = False) -> None:
        _check_positive("RGAS", lr=lr)
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

    def __init__(
        self, params: Iterable[Any], *, lr: float, beta: float = 0.8, maximize: bool = False
    ) -> None:
        _check_positive("RAGAS", lr=lr)
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


# ---- what a user can get wrong -------------------------------------------------------------------


def _check_positive(who: str, **numbers: float) -> None:
    for name, number in numbers.items():
        if not (number > 0 and math.isfinite(number)):
            raise ValueError(f"{who}: {name} must be positive and finite, got {number}")


def _default_tolerance(dtype: torch.dtype) -> float:
    return 1e-9 if dtype == torch.float64 else 1e-5


def _check_floating(who: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{who}: {name} must be float32 or float64, got {tensor.dtype}")
        if not all(end.isfinite() for end in tensor.aminmax()):
            raise ValueError(f"{who}: {name} has entries that are not finite")


def _check_weights(who: str, name: str, weights: Tensor) -> Tensor:
    """Weights summing to one up to rounding, made to sum to one exactly."""
    total = weights.sum(-1, keepdim=True)
    if bool((weights < 0).any()):
        raise ValueError(f"{who}: {name} has negative weights, the least is {weights.min().item():.3g}")
    if bool(((total - 1).abs() > (1e-6 if weights.dtype == torch.float64 else 1e-4)).any()):
        off = total.flatten()[(total.flatten() - 1).abs().argmax()].item()
        raise ValueError(f"{who}: {name} must sum to one, got {off:.6g}; divide it by its sum")
    return weights / total


def _check_problem(who: str, a: Tensor, b: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
    """The problem flattened to one batch dimension, and the leading dimensions it had."""
    if C.ndim < 2 or a.ndim < 1 or b.ndim < 1 or (a.shape[-1], b.shape[-1]) != C.shape[-2:]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (a, b, C))
        raise ValueError(f"{who}: a, b and C must be (…, n), (…, m) and (…, n, m), got {shapes}")
    n, m = C.shape[-2:]
    if C.numel() == 0:
        raise ValueError(f"{who}: nothing to transport, C is {tuple(C.shape)}")
    _check_floating(who, C=C, a=a, b=b)
    batch = _common_batch(who, a.shape[:-1], b.shape[:-1], C.shape[:-2])
    a = _check_weights(who, "a", a.to(C)).expand(*batch, n).reshape(-1, n)
    b = _check_weights(who, "b", b.to(C)).expand(*batch, m).reshape(-1, m)
    return a, b, C.expand(*batch, n, m).reshape(-1, n, m), batch


def _common_batch(who: str, *shapes: torch.Size) -> torch.Size:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError as error:
        sizes = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{who}: the leading dimensions must be alike, got {sizes}") from error


def _check_scale(who: str, C: Tensor, reg: float) -> None:
    largest = C.abs().amax().item()
    if not math.isfinite((C.new_tensor(largest) / reg).item()):
        raise ValueError(f"{who}: reg = {reg:g} is too small for costs up to {largest:.3g}; raise it")


def _check_potentials(g: Tensor, b: Tensor, batch: torch.Size) -> Tensor:
    columns = b.shape[-1]
    if g.ndim < 1 or g.shape[-1] != columns or g.shape[:-1] not in ((), batch):
        raise ValueError(
            f"sinkhorn: potentials must be for {columns} columns and pairs {tuple(batch)}, got {tuple(g.shape)}"
        )
    if bool((g.isnan() | g.isposinf()).any()):  # −inf is that of an empty column
        raise ValueError("sinkhorn: potentials have entries that are not finite")
    return g.to(b).expand(*batch, -1).reshape(b.shape)


def _check_clouds(
    who: str, x: Tensor, y: Tensor, a: Tensor | None, b: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, torch.Size]:
    """The clouds and their weights flattened to one batch dimension, and the leading dimensions they had."""
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-1]:
        raise ValueError(
            f"{who}: x and y must be (…, n, d) and (…, m, d), got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    (n, d), m = x.shape[-2:], y.shape[-2]
    if x.numel() == 0 or y.numel() == 0:
        raise ValueError(f"{who}: a cloud is empty: x is {tuple(x.shape)}, y is {tuple(y.shape)}")
    _check_floating(who, x=x, y=y)
    a = x.new_full((n,), 1 / n) if a is None else a.to(x)
    b = x.new_full((m,), 1 / m) if b is None else b.to(x)
    if a.shape[-1:] != (n,) or b.shape[-1:] != (m,):
        raise ValueError(
            f"{who}: a and b must be (…, {n}) and (…, {m}), got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    _check_floating(who, a=a, b=b)
    a, b = _check_weights(who, "a", a), _check_weights(who, "b", b)
    batch = _common_batch(who, x.shape[:-2], y.shape[:-2], a.shape[:-1], b.shape[:-1])
    x, y = x.expand(*batch, n, d).reshape(-1, n, d), y.to(x).expand(*batch, m, d).reshape(-1, m, d)
    return x, y, a.expand(*batch, n).reshape(-1, n), b.expand(*batch, m).reshape(-1, m), batch
