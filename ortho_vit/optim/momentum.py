"""Momentum Stiefel SGD and Adam (Kong, Wang & Tao, ICLR 2023), and how a step is computed.

Two ideas keep a step exact without special cases.  *Whatever must hold of X at the end of a step is measured at the end
of the step*: X Xᵀ is never assumed to be I, and what rounding (or other code) did to X is removed by the retraction
that the step needs anyway.  *Momentum is projected where it acts, not where it is stored.*

Blocks are rows, X (B, m, n) with m < n; notation as in `ortho_vit.stiefel`.  η is the learning rate, μ the momentum,
κ = 1 − dampening, a the metric's parameter; a tilde marks a deviation from I, which is how small factors are kept; ‖·‖
is the Frobenius norm of a block.  One step of StiefelSGD:

    limits    λ(G) = min(η, 64/max|G|) ;   τ(A) = min(η, 0.8 ρ(A Aᵀ)^(−½)) ,  ρ(S) = √‖S²‖        η in every ordinary step
    kick      H = μU − κ(λ(G)/η)G ;   K = X Hᵀ ;   Z ← μZ + (K − Kᵀ)/(2(1−a)) ;   V = H − KᵀX
    turn      W = τ(Z)Z ;   R = (I + W Wᵀ)^(−½) ;   Ẽ = W + R̃ + W R̃
    carry     Y = X + ẼᵀX + τ(V)V
    retract   D = Y Yᵀ − I ;   R = (I + D)^(−½) ;   X ← Y + R̃Y
    transport U ← R⁻¹V ,   R⁻¹ − I = R̃ + D + D R̃

V is U½ of Algorithm 1: gradient and old momentum, projected at this X in one product.  The new U has a part along the
new X, ηS X with S = V Vᵀ; it is symmetric, so it does not reach K − Kᵀ, and the next kick projects it out.  Without it
U is the U⁺ of the isometric integrator, whose U Uᵀ is that of V (`ortho_vit.optim.reference` has the step in the paper's
notation).  ρ bounds the spectral norm, so neither half of a step turns a direction by more than 39°; being up to m^(1/4)
times too large, it may act from about 21° on at m = 384 when all directions move alike.

StiefelAdam transports U to the new X at the beginning of the next step, by projecting and rescaling it, because its second
moment makes the direction of the step another one than U's.  Square blocks (m = n; the transpose of what is stored) have
no U: Algorithms 4 and 5.

`norm` is what the host knows of ‖G‖ (None: it must not look).  It serves to leave out what an ordinary step does not
need, a limit that does not act or a polynomial's higher terms, and never changes a bit of the result.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ortho_vit.optim.base import BlockRule, Group, Params, StiefelOptimizer, is_count
from ortho_vit.optim.free import ADAM, ADAMW, SGD, Checks, State
from ortho_vit.optim.reference import REACH, STEEP, printed_adam_step, printed_sgd_step
from ortho_vit.stiefel import (
    add_symmetric_,
    add_to_diagonal,
    frobenius,
    identity,
    inverse_sqrt,
    spectral_bound,
    symmetric_matmul,
)

Metric = Literal["canonical", "euclidean"] | float
Expm = Literal["euler", "cayley", "exact"]
Integrator = Literal["isometric", "paper"]
Rate = float | Tensor

METRICS = {"canonical": 0.5, "euclidean": 0.0}
FARTHEST = 0.655  # the ρ(Y Yᵀ − I) beyond which Y was not made by a step from the manifold; a step's own is at most 0.8²


# ------------------------------------------------------------------------------------------------------ the pieces


def kick_of(G: Tensor, lr: Rate, weight: float, norm: float | None) -> Tensor:
    """weight·λ(G)/η for each block, (B, 1, 1): the weight in an ordinary step, 0 where η = 0."""
    if isinstance(lr, float | int) and (lr == 0 or (norm is not None and lr * norm <= REACH)):
        return G.new_full((len(G), 1, 1), weight if lr else 0.0)
    kick = (largest(G) * lr).reciprocal_().mul_(REACH).clamp_(max=1).mul_(weight)
    return kick * (lr > 0) if isinstance(lr, Tensor) else kick


def largest(A: Tensor) -> Tensor:
    """The largest |entry| of each block, (B, 1, 1)."""
    return torch.linalg.vector_norm(A, math.inf, dim=(-2, -1), keepdim=True)


def rate_of(A: Tensor, lr: Rate, host: bool) -> Tensor:
    """min(η, 0.8/σ) for each block, (B, 1, 1), with σ² = ρ(A Aᵀ) ≥ ‖A‖₂²: A turns nothing by more than 39°."""
    size = frobenius(A)
    if host and lr * float(size.amax()) <= STEEP:
        return A.new_full((len(A), 1, 1), float(lr))
    A = A / size.clamp(min=1e-18)  # so that no fourth power overflows; what is shorter still needs no limit
    sigma = spectral_bound(symmetric_matmul(A, A.mT)).sqrt_().mul_(size)
    reach = sigma.mul_((1 - 1e-5) / STEEP).reciprocal_()  # rounding must not limit an ordinary step
    return torch.minimum(reach, lr.to(reach)) if isinstance(lr, Tensor) else reach.clamp_(max=lr)


def turn(W: Tensor, expm: Expm, host: bool) -> Tensor:
    """Ẽ = E − I for the rotation E by W: polar(I + W), Cayley(W) or expm(W)."""
    if expm == "exact":
        return torch.linalg.matrix_exp(W) - identity(W)
    if expm == "cayley":
        return torch.linalg.solve_ex(identity(W) - W / 2, W)[0]
    R = inverse_sqrt(symmetric_matmul(W, W.mT), host=host)
    return add_symmetric_(W + R, W, R, sign=-1)  # the product is skew, as R̃ is a polynomial in W²


def deviation(Y: Tensor) -> tuple[Tensor, Tensor]:
    """D = Y Yᵀ − I and D²."""
    D = add_to_diagonal(symmetric_matmul(Y, Y.mT), -1.0)
    return D, symmetric_matmul(D, D)


def retract(X: Tensor, Y: Tensor, D: Tensor, D2: Tensor, host: bool) -> tuple[Tensor, Tensor]:
    """Write the polar factor of Y into X; returns D = Y Yᵀ − I and R̃.

    A step from the manifold has ‖D‖₂ ≤ 0.64.  A Y that is farther off, because other code wrote X, is first scaled to
    ‖Y‖₂ ≤ 1, and reaches its polar factor over several steps.
    """
    bound = frobenius(D2).sqrt_()
    if not (host and float(bound.amax()) <= FARTHEST):
        k2 = F.threshold(bound, FARTHEST, 0.0).add_(1).reciprocal_()  # 1/(1 + ρ(D)); 1 where ρ(D) is less
        Y.mul_(k2.sqrt())
        D2 = symmetric_matmul(add_to_diagonal(D.mul_(k2), k2 - 1), D)
    R = inverse_sqrt(D, D2, host=host)
    torch.baddbmm(Y, R, Y, out=X)
    return D, R


def turn_momentum_(U: Tensor, X: Tensor, Z: Tensor, lr: Rate, a: float, host: bool) -> Tensor:
    """U turned by Cayley((2a − 1)ηZ) with the old Z, in place: the identity at the canonical metric.

    U is projected at X first: turned, its part along X would no longer be symmetric.
    """
    if a != 0.5:
        U.baddbmm_(torch.bmm(U, X.mT), X, alpha=-1)
        E = turn((2 * a - 1) * (Z * rate_of(Z, lr, host)), "cayley", host)
        U.add_(torch.bmm(E.mT, U))
    return U


def move_square(X: Tensor, W: Tensor, expm: Expm, host: bool, scratch: Tensor | None) -> None:
    """Algorithms 4 and 5: X ← polar(EᵀX) for W = ηZ, which is overwritten.

    The retraction itself makes E = polar(I + W) of I + W.  So D = W Wᵀ shows the host whether the limit of a step acts,
    which is rare, for less than the limit's own products.
    """
    looks = host and expm == "euler"
    if not looks:
        W.mul_(rate_of(W, 1.0, host))
    Y, D, D2 = rotated(X, W, expm, host, scratch)
    if looks and not float(frobenius(D2).amax()) < 0.95 * STEEP**4:
        W.mul_(rate_of(W, 1.0, host))
        Y, D, D2 = rotated(X, W, expm, host, scratch)
    del W  # the retraction needs memory too
    retract(X, Y, D, D2, host)


def rotated(
    X: Tensor, W: Tensor, expm: Expm, host: bool, scratch: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Y = EᵀX for square X, or (I + W)ᵀX, whose polar factor that is; with D = Y Yᵀ − I and D²."""
    E = W if expm == "euler" else turn(W, expm, host)
    Y = torch.baddbmm(X, E.mT, X, out=scratch)
    return Y, *deviation(Y)


# ------------------------------------------------------------------------------------------------------- the steps


def sgd_step(
    X: Tensor,
    G: Tensor,
    state: State,
    lr: Rate,
    *,
    momentum: float,
    dampening: float,
    a: float,
    expm: Expm,
    norm: float | None,
    scratch: Tensor | None = None,
) -> None:
    """The step at the top of this file, on blocks X (B, m, n) and their state in place.  `scratch` may be G."""
    Z, U, host, half = state["Z"], state.get("U"), norm is not None, 1 / (2 * (1 - a))
    kick = kick_of(G, lr, dampening - 1, norm)
    if U is None:
        K = torch.bmm(X, G.mT)
        Z.mul_(momentum).addcmul_(K - K.mT, kick, value=half)
        del K
        return move_square(X, Z * lr, expm, host, scratch)
    H = turn_momentum_(U, X, Z, lr, a, host).mul_(momentum).addcmul_(G, kick)
    K = torch.bmm(X, H.mT)
    Z.mul_(momentum).add_(K - K.mT, alpha=half)
    V = H.baddbmm_(K.mT, X, alpha=-1)
    E = turn(Z * rate_of(Z, lr, host), expm, host)
    Y = torch.baddbmm(X, E.mT, X, out=scratch).addcmul_(V, rate_of(V, lr, host))
    D, R = retract(X, Y, *deviation(Y), host)
    V.add_(torch.bmm(add_symmetric_(R + D, D, R), V, out=Y))
    return None


def adam_step(
    X: Tensor,
    G: Tensor,
    state: State,
    lr: Rate,
    *,
    betas: tuple[float, float],
    eps: float,
    a: float,
    expm: Expm,
    norm: float | None,
    scratch: Tensor | None = None,
) -> None:
    """Algorithm 2 in the same manner; `state["step"]` counts this step.  `scratch` may be G."""
    Z, p, U, q = state["Z"], state["p"], state.get("U"), state.get("q")
    host, (beta1, beta2), half = norm is not None, betas, 1 / (2 * (1 - a))
    c1, c2 = bias_corrections(betas, state["step"], X.dtype)
    slope, floor = c1 / c2.sqrt(), c1 * eps

    def rescaled(momentum: Tensor, second: Tensor, out: Tensor | None = None) -> Tensor:
        scale = torch.sqrt(second, out=out).mul_(slope).add_(floor)
        return torch.div(momentum, scale, out=scale)

    if norm is None or not norm <= 1e15:  # so that it can be squared
        G = G * largest(G).reciprocal_().mul_(1e15).clamp_(max=1)
    K = torch.bmm(X, G.mT)
    f = K.mT - K if half == 1 else (K.mT - K) * half  # −f of the paper, which Z is an average of; g likewise
    p.mul_(beta2).addcmul_(f, f, value=1 - beta2)
    if U is None or q is None:
        Z.lerp_(f, 1 - beta1)
        del K, f
        return move_square(X, rescaled(Z, p).mul_(lr), expm, host, scratch)
    transport_(U, X)
    turn_momentum_(U, X, Z, lr, a, host)
    Z.lerp_(f, 1 - beta1)
    g = torch.baddbmm(G, K.mT, X, beta=-1, out=scratch)
    q.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    V = rescaled(U.lerp_(g, 1 - beta1), q, out=g)
    Z_hat = rescaled(Z, p)
    E, rate = turn(Z_hat * rate_of(Z_hat, lr, host), expm, host), rate_of(V, lr, host)
    E = torch.addcmul(E.mT, torch.bmm(V, X.mT), rate, value=-1)  # V is projected at X in the same product
    Y = torch.baddbmm(X, E, X).addcmul_(V, rate)
    retract(X, Y, *deviation(Y), host)
    return None


def transport_(U: Tensor, X: Tensor) -> Tensor:
    """U projected at X and rescaled to its own norm, in place.

    X turned by at most 39° since U was made, so the factor is at most 1.3; it is larger only where other code wrote X.
    """
    before = frobenius(U)
    U.baddbmm_(torch.bmm(U, X.mT), X, alpha=-1)
    after = frobenius(U)
    return U.mul_((before / after.clamp(min=1e-37)).clamp_(max=1.5))


def bias_corrections(betas: tuple[float, float], step: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """1 − βᵗ for both β, accurate in float32 too, where t is a tensor that the host need not read."""
    t = step.to(dtype)
    c = torch._foreach_mul([t, t], [math.log(beta) if beta else -math.inf for beta in betas])
    torch._foreach_expm1_(c)
    torch._foreach_neg_(c)
    return c


# ----------------------------------------------------------------------------------------------------------- the rules


CHECKS: Checks = {
    "metric": (
        lambda a, _: (
            a in METRICS or (isinstance(a, int | float) and not isinstance(a, bool) and -math.inf < a < 1)
        ),
        "must be 'canonical', 'euclidean' or a number < 1",
    ),
    "expm": (lambda e, _: e in ("euler", "cayley", "exact"), "must be 'euler', 'cayley' or 'exact'"),
    "integrator": (lambda i, _: i in ("isometric", "paper"), "must be 'isometric' or 'paper'"),
    "inner_steps": (
        lambda k, group: k is None or (is_count(k) and group["integrator"] == "paper"),
        "must be None or, with integrator='paper', at least 1",
    ),
}


def metric_of(group: Group) -> float:
    return METRICS[group["metric"]] if group["metric"] in METRICS else float(group["metric"])


def new_momentum(X: Tensor, within: tuple[str, ...], outside: tuple[str, ...]) -> State:
    """Zeros (B, m, m) for each name `within`, and like X for each `outside` unless X is square."""
    B, m, n = X.shape
    state = {name: X.new_zeros(B, m, m) for name in within}
    if m < n:
        state |= {name: torch.zeros_like(X, memory_format=torch.contiguous_format) for name in outside}
    return state


def run_printed(
    step: Callable[..., tuple[Tensor, ...]], X: Tensor, G: Tensor, state: State, keys: str, options: Group
) -> None:
    """Make a step of `ortho_vit.optim.reference`, which has frames as columns, on blocks and their state in place."""
    old = [state[k] if k in "Zp" else state.get(k, torch.zeros_like(X)).mT for k in keys]
    made = step(X.mT, G.mT, *old, **options)
    if not made[0].isfinite().all():
        raise ValueError("the step is not finite")
    for x, new in zip((X.mT, *old), made, strict=True):
        x.copy_(new)


class MomentumRule(BlockRule):
    """What Algorithms 1 and 2 share."""

    checks = CHECKS
    squares_gradients = False

    def reads_device(self, group: Group) -> str | None:
        if group["integrator"] == "paper":
            return "integrator='paper', whose retraction may need a singular value decomposition"
        exact = group["expm"] == "exact"
        return "expm='exact', as torch's matrix exponential reads the device" if exact else None


class MomentumSGD(MomentumRule):
    """Algorithm 1, isometric or as printed."""

    def new_state(self, X: Tensor) -> State:
        return new_momentum(X, within=("Z",), outside=("U",))

    def move(self, X, G, state, lr, group, norm, scratch) -> None:
        options = {key: group[key] for key in ("momentum", "dampening", "expm")} | {"a": metric_of(group)}
        if group["integrator"] == "isometric":
            sgd_step(X, G, state, lr, **options, norm=norm, scratch=scratch)
        else:
            options |= {"lr": lr, "inner_steps": group["inner_steps"]}
            run_printed(printed_sgd_step, X, G, state, "ZU", options)


class MomentumAdam(MomentumRule):
    """Algorithm 2, isometric or as printed."""

    def new_state(self, X: Tensor) -> State:
        return new_momentum(X, within=("Z", "p"), outside=("U", "q"))

    def move(self, X, G, state, lr, group, norm, scratch) -> None:
        options = {key: group[key] for key in ("betas", "eps", "expm")} | {"a": metric_of(group)}
        if group["integrator"] == "isometric":
            adam_step(X, G, state, lr, **options, norm=norm, scratch=scratch)
        else:
            options |= {"lr": lr, "inner_steps": group["inner_steps"]}
            options["corrections"] = bias_corrections(group["betas"], state["step"], X.dtype)
            run_printed(printed_adam_step, X, G, state, "ZUpq", options)


# ------------------------------------------------------------------------------------------------------ the optimizers


class StiefelSGD(StiefelOptimizer):
    """Stiefel SGD with momentum for constrained parameters, `torch.optim.SGD` for the rest, with one learning rate.

        optimizer = StiefelSGD(model.parameters(), lr=0.15, momentum=0.9, weight_decay=5e-5)

    The default momentum is 0.9, where that of `torch.optim.SGD` is 0.

    Args:
        params: parameters, named parameters or groups, as for any torch optimizer.
        lr: learning rate.
        momentum, dampening: as in `torch.optim.SGD`.
        weight_decay: decays free parameters only.
        stiefel_lr: another learning rate for constrained blocks; schedulers keep its ratio to `lr`.
        metric: "canonical" (a = 1/2), "euclidean" (a = 0), or the metric's a < 1.
        expm: how Z turns X: "euler", "cayley", or "exact" (the matrix exponential).
        integrator: "isometric", stable at any learning rate, or "paper", the algorithm as printed.
        inner_steps: for the printed integrator, the number of Newton–Schulz iterations in the retraction; None: to
            working precision.
        foreach: step parameters of one shape as one batch; None: on an accelerator.
        capturable: never read the device from the host, as CUDA graphs need it; None: on an accelerator.  Blocks whose
            gradient is not finite are then left as they are, where otherwise the step is refused.
        shard_stiefel: in a data-parallel run, step a share of the constrained blocks on each rank and exchange them: among
            all ranks (True), or within groups of so many consecutive ones, such as the 8 of a node.
        maximize: ascend.
    """

    free_rule = SGD
    block_rule = MomentumSGD()

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        stiefel_lr: float | None = None,
        metric: Metric = "canonical",
        expm: Expm = "euler",
        integrator: Integrator = "isometric",
        inner_steps: int | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        shard_stiefel: bool | int = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, locals())


class StiefelAdam(StiefelOptimizer):
    """Stiefel Adam for constrained parameters, `torch.optim.Adam` for the rest, with one learning rate.

    Args:
        betas, eps: as in `torch.optim.Adam`, bias corrections included.
        The others: as in `StiefelSGD`.
    """

    free_rule = ADAM
    block_rule = MomentumAdam()

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        stiefel_lr: float | None = None,
        metric: Metric = "canonical",
        expm: Expm = "euler",
        integrator: Integrator = "isometric",
        inner_steps: int | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        shard_stiefel: bool | int = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, locals())


class StiefelAdamW(StiefelOptimizer):
    """Stiefel Adam for constrained parameters, `torch.optim.AdamW` for the rest, with one learning rate.

    The default weight decay is that of `torch.optim.AdamW`, 0.01; it touches free parameters only.

    Args: as in `StiefelAdam`.
    """

    free_rule = ADAMW
    block_rule = MomentumAdam()

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        stiefel_lr: float | None = None,
        metric: Metric = "canonical",
        expm: Expm = "euler",
        integrator: Integrator = "isometric",
        inner_steps: int | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        shard_stiefel: bool | int = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, locals())
