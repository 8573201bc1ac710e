"""Entropic optimal transport by Sinkhorn's algorithm.

`sinkhorn` solves  min_π ⟨π, C⟩ + reg ⟨π, log π − 1⟩  over the plans π with marginals a and b, for one pair of measures or
a batch of them.  The optimum is  π = exp((f ⊕ g − C) / reg)  with potentials f, g.  They are kept in the log domain; in
between, sweeps run as two matrix-vector products with the kernel  K = exp((f ⊕ g − C) / reg)  at recent potentials, so a
sweep costs no exponential, and the scalings u, v on top of K are absorbed into f, g before they lose digits.  Where even
that is not enough (the first sweeps at a tiny reg), the sweeps are repeated with log-sum-exp: slower, and never out of
range.  Two things save sweeps: over-relaxation, and a cold start that lowers reg in steps.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 8  # sweeps between two looks at the error: each look is one host synchronisation
_WALK = 4096  # on a CPU, pairs with more entries are solved one by one: a kernel then stays in cache


@dataclass(frozen=True)
class SinkhornResult:
    """A solved transport problem; leading dimensions are those of the input.

    `plan` (…, n, m); `potentials` f (…, n) and g (…, m) with plan = exp((f ⊕ g − C) / reg), −inf where a
    weight is zero; `value` the transport cost ⟨plan, C⟩, without the entropy; `iterations` the sweeps made;
    `error` the ℓ¹ distance of the plan's marginals from a and b, summed over both; `converged` whether that
    of the rows came below the tolerance: the columns are exact to rounding.
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
    check_positive("sinkhorn", reg=reg, max_sweeps=max_sweeps)
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"sinkhorn: tolerance must be at least 0, got {tolerance}")
    a, b, C, batch = _check_problem(a, b, C, reg)
    if tolerance is None:
        tolerance = 1e-9 if C.dtype == torch.float64 else 1e-5
    warm = None if potentials is None else _check_potentials(potentials[1], b, batch) / reg
    parts = [
        solve(a[s], b[s], C[s] / -reg, None if warm is None else warm[s], tolerance, max_sweeps)
        for s in slices(len(C), C[0].numel(), C.device)
    ]
    plan, phi, psi, row_error = (
        join(list(tensors)) for tensors in zip(*(part[:4] for part in parts), strict=True)
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


def solve(
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
    """Potentials to start from, and the sweeps they took: solutions for a larger reg, which is divided by 4 each time.

    Sinkhorn moves potentials by a few reg per sweep; where the costs span hundreds of reg this needs fewer sweeps.
    """
    low, high = (end.item() for end in M.aminmax())
    psi, sweeps, heat = torch.zeros_like(b), 0, (high - low) / 50
    while heat > 4 and sweeps < max_sweeps // 2 - 100:
        coarse = solve(a, b, M / heat, psi / heat, 1e-2, 100)
        psi, sweeps, heat = coarse.psi * heat, sweeps + coarse.sweeps, heat / 4
    return psi, sweeps


class _Relaxation:
    """Over-relaxed sweeps, u ← u^(1−ω) (a / Kv)^ω, with ω fitted to the observed rate of convergence.

    Near the solution a sweep is a Gauss–Seidel step of rate θ < 1, so over-relaxation brings the rate to
    ω − 1 at ω = 2 / (1 + √(1 − θ)): the number of sweeps falls to about its square root (Thibault et al. 2017).  θ
    follows from the rate λ of the last chunk by Young's relation  (λ + ω − 1)² = λ ω² θ.  Away from the
    solution this may not converge: a chunk that raised the error is undone and the next ones, twice as many
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
    """Sinkhorn in the log domain, with log-sum-exp; the kernel form must agree with it."""
    phi = psi  # always replaced: count ≥ 1
    for _ in range(count):
        phi = log_a - torch.logsumexp(M + psi.unsqueeze(-2), -1)
        psi = log_b - torch.logsumexp(M + phi.unsqueeze(-1), -2)
    return phi, psi


def slices(batch: int, entries: int, device: torch.device) -> Iterator[slice]:
    """Pairs to solve together: all of them, or on a CPU one by one when a pair is large."""
    size = 1 if device.type == "cpu" and entries > _WALK else max(batch, 1)
    return (slice(i, i + size) for i in range(0, batch, size))


def join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# ---- what a user can get wrong -------------------------------------------------------------------


def check_positive(who: str, **numbers: float) -> None:
    for name, number in numbers.items():
        if not (number > 0 and math.isfinite(number)):
            raise ValueError(f"{who}: {name} must be positive and finite, got {number}")


def check_floating(who: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{who}: {name} must be float32 or float64, got {tensor.dtype}")
        if not all(end.isfinite() for end in tensor.aminmax()):
            raise ValueError(f"{who}: {name} has entries that are not finite")


def check_weights(who: str, name: str, weights: Tensor) -> Tensor:
    """Weights summing to one up to rounding, made to sum to one exactly."""
    total = weights.sum(-1, keepdim=True)
    if bool((weights < 0).any()):
        raise ValueError(f"{who}: {name} has negative weights, the least is {weights.min().item():.3g}")
    if bool(((total - 1).abs() > (1e-6 if weights.dtype == torch.float64 else 1e-4)).any()):
        off = total.flatten()[(total.flatten() - 1).abs().argmax()].item()
        raise ValueError(f"{who}: {name} must sum to one, got {off:.6g}; divide it by its sum")
    return weights / total


def _check_problem(a: Tensor, b: Tensor, C: Tensor, reg: float) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
    """The problem flattened to one batch dimension, and the leading dimensions it had."""
    if C.ndim < 2 or a.ndim < 1 or b.ndim < 1 or (a.shape[-1], b.shape[-1]) != C.shape[-2:]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (a, b, C))
        raise ValueError(f"sinkhorn: a, b and C must be (…, n), (…, m) and (…, n, m), got {shapes}")
    if C.numel() == 0:
        raise ValueError(f"sinkhorn: nothing to transport, C is {tuple(C.shape)}")
    check_floating("sinkhorn", C=C, a=a, b=b)
    batch = common_batch("sinkhorn", a.shape[:-1], b.shape[:-1], C.shape[:-2])
    a, b = check_weights("sinkhorn", "a", a.to(C)), check_weights("sinkhorn", "b", b.to(C))
    largest = C.abs().amax()
    if not (largest / reg).isfinite():
        raise ValueError(
            f"sinkhorn: reg = {reg:g} is too small for costs up to {largest.item():.3g}; raise it"
        )
    return flatten(a, batch, 1), flatten(b, batch, 1), flatten(C, batch, 2), batch


def flatten(tensor: Tensor, batch: torch.Size, dims: int) -> Tensor:
    """The last `dims` dimensions of a tensor, with one batch dimension in place of `batch`, to which it is expanded."""
    shape = tensor.shape[-dims:]
    return tensor.expand(*batch, *shape).reshape(-1, *shape)


def common_batch(who: str, *shapes: torch.Size) -> torch.Size:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError as error:
        sizes = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{who}: the leading dimensions must be alike, got {sizes}") from error


def _check_potentials(g: Tensor, b: Tensor, batch: torch.Size) -> Tensor:
    columns = b.shape[-1]
    if g.ndim < 1 or g.shape[-1] != columns or g.shape[:-1] not in ((), batch):
        raise ValueError(
            f"sinkhorn: potentials must be for {columns} columns and pairs {tuple(batch)}, got {tuple(g.shape)}"
        )
    if bool((g.isnan() | g.isposinf()).any()):  # −inf is that of an empty column
        raise ValueError("sinkhorn: potentials have entries that are not finite")
    return flatten(g.to(b), batch, 1)
