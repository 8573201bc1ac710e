"""Momentum SGD and Adam on the Stiefel manifold (Kong, Wang & Tao 2023, Algorithms 1 and 2; 4 and 5 where m = n).

The momentum of X is kept in two parts that need no transport: Z, skew, moves X within its span; U, with X Uᵀ = 0, moves it
out of it.  A step kicks both with the gradient (φ₂ and half of φ₁), turns X by Z to X½ = EᵀX (φ₁), then carries X along U,
and U along X (φ₃).

Two integrators of this one flow.  "paper" is the algorithm as printed.  "isometric", ours and the default, makes every
sub-step an isometry, as in the exact flow: E is orthogonal, and φ₃ leaves U Uᵀ as it was, where the printed φ₃ multiplies
it by I + η²U Uᵀ and so diverges once η‖U‖ nears 1.

Cost.  X Xᵀ = I and X Uᵀ = 0 are known, not measured, and small factors are multiplied together before they touch an m × n
matrix: SGD takes 5 products of m²n, Adam 8, the square case 2, and each a few half products of m³.  What rounding adds to
X Xᵀ and X Uᵀ is taken out every `REFRESH` steps, and after a step so large that its factors were rough.

Names with a tilde in formulas are deviations from I, which is how small factors are kept: E = I + Ẽ is `E` in the code.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ortho_vit.optim.base import FreeAdam, FreeSGD, Group, Params, State, StiefelOptimizer, given, is_count
from ortho_vit.stiefel import (
    cayley,
    identity,
    inverse_sqrt,
    inverse_sqrt_fixed,
    polar,
    symmetric_matmul,
)

Metric = Literal["canonical", "euclidean"] | float
Expm = Literal["euler", "cayley", "exact"]
Integrator = Literal["isometric", "paper"]

METRICS: dict[Any, float] = {"canonical": 0.5, "euclidean": 0.0}


class Flow(NamedTuple):
    """Which of the equivalent forms of the step is taken; see `StiefelSGD`."""

    a: float
    expm: Expm
    integrator: Integrator
    inner_steps: int | None


def sgd_step(
    X: Tensor,
    G: Tensor,
    Z: Tensor,
    U: Tensor | None,
    lr: float,
    momentum: float,
    dampening: float,
    flow: Flow,
    scratch: Tensor | None = None,
) -> None:
    """Algorithm 1 on blocks X (B, m, n), in place; U is None where m = n.

    `scratch` is memory like X to work in.  It may be G, which is then lost.
    """
    kick, half = 1 - dampening, 1 / (2 * (1 - flow.a))  # (1−b)/2 = 1/(2(1−a))
    if U is None:
        K = torch.bmm(X, G.mT)
        Z.mul_(momentum).sub_(torch.sub(K, K.mT, out=scratch), alpha=kick * half)
        del K
        move_square(X, torch.mul(Z, lr, out=scratch), flow)
        return
    turned_(U, Z, lr, momentum, flow).sub_(G, alpha=kick)
    H, Ht = U, U.mT
    K = torch.bmm(X, Ht)  # −(1−τ) X Gᵀ, because X Uᵀ = 0
    Kt = K.mT
    Z.mul_(momentum).add_(K - Kt, alpha=half)
    # U½ = H − KᵀX is never formed.  H Hᵀ − KᵀK is its Gram matrix, and its part in X goes with the factors of X; so
    # what rounding had left of X Uᵀ is projected out as well.
    S = gram(H, Kt)
    size = torch.linalg.matrix_norm(S).sqrt()
    far, lost = look_ahead(size, lr, size, K)
    Y, H, Kt, W = in_double(far, X, H, Kt, lr * Z)
    S = gram(H, Kt) if far else S  # for its small eigenvalues, which η² makes large
    factors = small_factors(W, lr**2 * S, Y, flow)
    T = None if far else scratch
    D = plus_one_T(factors.E, S)
    C, D = torch.add(Kt, D, alpha=lr), plus_one(factors.B, D)
    if flow.integrator == "isometric":
        C = torch.add(plus_one(factors.B, Kt), D, alpha=lr)
        H.add_(torch.bmm(factors.B, H, out=T))
    H.baddbmm_(C, Y, alpha=-1)  # U⁺, from which X⁺ follows:  X⁺ = (I + A + η²D) X + ηU⁺, printed (I + B) U⁺
    T = torch.baddbmm(H, torch.add(factors.A, D, alpha=lr**2), Y, beta=lr, out=T)
    if flow.integrator == "paper":
        T.baddbmm_(factors.B, H, alpha=lr)
    elif far:  # where even float64 has lost I beside η²S, the momentum's size at least stays what it was
        before = S.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0).sqrt()
        after = torch.linalg.matrix_norm(H)
        H.mul_(torch.where(after > before, before / after, 1.0)[..., None, None])
    close(X, Y.add_(T), U, H, factors.rough, lost)


def adam_step(
    X: Tensor,
    G: Tensor,
    state: State,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    flow: Flow,
    scratch: Tensor | None = None,
) -> None:
    """Algorithm 2 on blocks X (B, m, n), in place; the state has no U and q where m = n.  `scratch`: see `sgd_step`."""
    Z, p, U, q = state["Z"], state["p"], state.get("U"), state.get("q")
    beta1, beta2 = betas
    c1, c2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]

    def rescaled(momentum: Tensor, second: Tensor, out: Tensor | None = None) -> Tensor:
        scale = torch.sqrt(second, out=out).mul_(c1 / c2**0.5).add_(c1 * eps)
        return torch.div(momentum, scale, out=scale)

    K = torch.bmm(X, G.mT)
    f = (K - K.mT).mul_(1 / (2 * (1 - flow.a)))
    p.mul_(beta2).addcmul_(f, f, value=1 - beta2)
    g = None
    if U is not None and q is not None:
        g = torch.baddbmm(G, K.mT, X, alpha=-1, out=scratch)
        q.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        turned_(U, Z, lr, beta1, flow).sub_(g, alpha=1 - beta1)  # U½
    Z.mul_(beta1).sub_(f, alpha=1 - beta1)
    if U is None or q is None:
        del K, f
        move_square(X, rescaled(Z, p, out=scratch).mul_(lr), flow)
        return
    # Ũ = V − LX is never formed: its Gram matrix is V Vᵀ − L Lᵀ, and its part in X goes with the factors of X.
    V = rescaled(U, q, out=g)
    L, T = torch.bmm(V, X.mT), torch.bmm(U, V.mT)  # U½ Ũᵀ = U½ Vᵀ, because U½ Xᵀ = 0
    S = gram(V, L)
    size = torch.linalg.matrix_norm(U)
    far, lost = look_ahead(torch.linalg.matrix_norm(S).sqrt(), lr, size, K)
    Y, H, V, L, T, W = in_double(far, X, U, V, L, T, rescaled(Z, p).mul_(lr))
    S = gram(V, L) if far else S
    factors = small_factors(W, lr**2 * S, Y, flow)
    C = plus_one_T(factors.E, T).mul_(lr)
    if flow.integrator == "isometric":  # scaled to the norm of U½:  ‖U⁺‖² = ‖U½‖² + ‖C‖²
        shrink = torch.where(size > 0, size / torch.hypot(size, torch.linalg.matrix_norm(C)), 1.0)[
            ..., None, None
        ]
        H.mul_(shrink)
        C.mul_(shrink)
    H.baddbmm_(C, Y, alpha=-1)
    moved = torch.baddbmm(V, torch.sub(factors.A, plus_one(factors.B, L), alpha=lr), Y, beta=lr)
    close(X, Y.add_(moved.baddbmm_(factors.B, V, alpha=lr)), U, H, factors.rough, lost)


def close(X: Tensor, Y: Tensor, U: Tensor, H: Tensor, *marks: Tensor | None) -> None:
    """End a step at X⁺ = Y and U⁺ = H, which are X and U themselves unless they were moved in float64."""
    if Y is not X:
        X.copy_(Y)
        U.copy_(H)
    put_back(X, U, *marks)


def move_square(X: Tensor, W: Tensor, flow: Flow) -> None:
    """Algorithms 4 and 5: X⁺ = polar(EᵀX), where the polar factor has only rounding to take out."""
    Y, W = in_double(not float(torch.linalg.matrix_norm(W).amax()) < FAR, X, W)
    factors = small_factors(W, None, Y, flow)
    columns = Y.mT  # as they are stored
    X.mT.copy_(torch.baddbmm(columns, columns, factors.A.mT))
    put_back(X, None, factors.rough)


def gram(V: Tensor, L: Tensor) -> Tensor:
    """(V − LX)(V − LX)ᵀ where V Xᵀ = L."""
    return torch.baddbmm(symmetric_matmul(V, V.mT), L, L.mT, alpha=-1)


FAR = 20  # the length of a step, η‖V‖, from which a deviation from I says too little about I + deviation


def look_ahead(length: Tensor, lr: float, size: Tensor, K: Tensor) -> tuple[bool, Tensor | None]:
    """Whether a step along V, √‖V Vᵀ‖ = length, is FAR; and where U, of this size, is so much smaller than the K it was
    separated from that rounding would show in X Uᵀ.  One synchronisation for both.
    """
    margin = torch.sub(size, torch.linalg.matrix_norm(K), alpha=0.01)
    longest, least = torch.stack([length.amax(), margin.amin()]).tolist()
    return not lr * longest < FAR, margin < 0 if least < 0 else None


def in_double(far: bool, *tensors: Tensor) -> Iterator[Tensor]:
    """The tensors of a step, in float64 if it is far."""
    return (x.double() if far and x.device.type != "mps" else x for x in tensors)


def turned_(U: Tensor, Z: Tensor, lr: float, momentum: float, flow: Flow) -> Tensor:
    """φ₂ without the kick, in place: μU turned by Cayley((2a−1)ηZ), or the printed μU + c η U Z (rows: −Z U)."""
    if flow.integrator == "paper":
        return U.copy_(torch.baddbmm(U, Z, U, beta=momentum, alpha=(3 * flow.a - 2) / 2 * lr))
    if flow.a != 0.5:
        W = next(
            in_double(True, (2 * flow.a - 1) * lr * Z)
        )  # so large at times that I would be lost beside it
        U.copy_(cayley(W).to(U.dtype).mT @ U)
    return U.mul_(momentum)


class Factors(NamedTuple):
    """The m × m factors of a step: X⁺ = (I + A) X + η (I + B) V.  A square block has no V, and B is of no use."""

    E: Tensor
    A: Tensor
    B: Tensor
    rough: Tensor | None  # which of the batch rounded absolutely; None: none


def small_factors(W: Tensor, P: Tensor | None, X: Tensor, flow: Flow) -> Factors:
    """E from W = ηZ, and the retraction R = (X† X†ᵀ)^(−1/2) from P = η² V Vᵀ (None: square, there is no V).

    With N = X½ X½ᵀ − I, which only the printed Euler step has:  X† = X½ + η (I + N) V,  X† X†ᵀ = I + N + (I + N) P (I + N).
    """
    printed = flow.integrator == "paper" and P is not None
    E, N, M = W, None, None
    if flow.expm == "cayley":
        E = torch.linalg.solve(identity(W) - W / 2, W)
    elif flow.expm == "exact":
        E = torch.linalg.matrix_exp(W) - identity(W)
    else:
        M = symmetric_matmul(W, W.mT)
        N = M if printed else None
    Q = P if N is None or P is None else N + plus_one_T(N, plus_one(N, P))
    if flow.inner_steps is not None:
        return fixed_factors(E, N, M, Q, X, flow)
    unknown = [A for A in (None if printed else M, Q) if A is not None]
    roots, rough = inverse_sqrts(unknown)
    if M is not None and not printed:
        root = roots.pop(0)
        E = symmetric_matmul(W, root, sign=-1).add_(W).add_(root)
    if flow.expm != "euler":
        rough = torch.ones(len(W), dtype=torch.bool, device=W.device)
    if not roots:
        return Factors(E, E.mT, E, rough)
    R = roots[0]
    return Factors(E, R + plus_one(R, E.mT), R if N is None else R + plus_one(R, N), rough)


def inverse_sqrts(matrices: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """(I + M)^(−1/2) − I of each batch, all at once; and which of a batch are too wide to be exact to rounding."""
    if not matrices:
        return [], None
    roots, rough = inverse_sqrt(torch.cat(matrices) if len(matrices) > 1 else matrices[0], positive=True)
    rough = None if rough is None else rough.view(len(matrices), -1).any(0)
    return list(roots.chunk(len(matrices))), rough


def fixed_factors(
    E: Tensor, N: Tensor | None, M: Tensor | None, Q: Tensor | None, X: Tensor, flow: Flow
) -> Factors:
    """`small_factors` with a fixed number of inner iterations: what they leave of X Xᵀ − I is measured and comes again."""
    if M is not None and N is None:
        E = E + plus_one(E, inverse_sqrt_fixed(M, flow.inner_steps or 1))
    D = symmetric_matmul(X, X.mT) - identity(X)
    D = plus_one_T(E.mT, plus_one(E.mT, D))
    R = inverse_sqrt_fixed(D if Q is None else Q + D, flow.inner_steps or 1)
    return Factors(E, R + plus_one(R, E.mT), R if N is None else R + plus_one(R, N), None)


def plus_one(A: Tensor, B: Tensor) -> Tensor:
    """(I + A) B."""
    return torch.baddbmm(B, A, B)


def plus_one_T(A: Tensor, B: Tensor) -> Tensor:
    """B (I + A)ᵀ."""
    return torch.baddbmm(B, B, A.mT)


def put_back(X: Tensor, U: Tensor | None, *which: Tensor | None) -> None:
    """Take out what rounding has put into X Xᵀ and X Uᵀ, in the matrices of the batch that any of `which` marks."""
    marks = [mark for mark in which if mark is not None]
    if not marks:
        return
    mark = torch.stack(marks).any(0)[..., None, None]
    X.copy_(torch.where(mark, polar(X), X))
    if U is None:
        return
    for _ in range(2):  # twice, because the first rounds relative to what it takes out
        U.baddbmm_(torch.where(mark, torch.bmm(U, X.mT), 0.0), X, alpha=-1)


class MomentumStiefel(StiefelOptimizer):
    """What StiefelSGD and StiefelAdam share: the options of the flow."""

    def check(self, group: Group) -> None:
        super().check(group)
        self.require(group, "metric", is_metric, "must be 'canonical', 'euclidean' or a number < 1")
        self.require(
            group, "expm", lambda e: e in ("euler", "cayley", "exact"), "must be 'euler', 'cayley' or 'exact'"
        )
        self.require(
            group, "integrator", lambda i: i in ("isometric", "paper"), "must be 'isometric' or 'paper'"
        )
        self.require(group, "inner_steps", lambda k: k is None or is_count(k), "must be None or at least 1")

    def refresh(self, X: Tensor, state: State) -> None:
        put_back(X, state.get("U"), torch.ones(len(X), dtype=torch.bool, device=X.device))

    def flow(self, group: Group) -> Flow:
        a = METRICS[group["metric"]] if group["metric"] in METRICS else float(group["metric"])
        return Flow(a, group["expm"], group["integrator"], group["inner_steps"])


def is_metric(a: Any) -> bool:
    return a in METRICS or (isinstance(a, int | float) and not isinstance(a, bool) and -math.inf < a < 1)


def new_momentum(X: Tensor, within: tuple[str, ...], outside: tuple[str, ...]) -> State:
    """Zeros (B, m, m) for each name `within`, and like X for each `outside` unless X is square."""
    B, m, n = X.shape
    state = {name: X.new_zeros(B, m, m) for name in within}
    if m < n:
        state |= {name: torch.zeros_like(X, memory_format=torch.contiguous_format) for name in outside}
    return state


class StiefelSGD(MomentumStiefel, FreeSGD):
    """Stiefel SGD with momentum for constrained parameters, `torch.optim.SGD` for the rest, with one learning rate.

        optimizer = StiefelSGD(model.parameters(), lr=0.15, momentum=0.9, weight_decay=5e-5)

    Args:
        params: parameters, named parameters or groups, as for any torch optimizer.
        lr: learning rate.
        momentum, dampening: as in `torch.optim.SGD`.
        weight_decay: decays free parameters only.
        stiefel_lr: another learning rate for constrained blocks; schedulers keep its ratio to `lr`.
        metric: "canonical" (a = 1/2), "euclidean" (a = 0), or the metric's a < 1.
        expm: how Z turns X: "euler", "cayley", or "exact" (the matrix exponential).
        integrator: "isometric", stable at any learning rate, or "paper", the algorithm as printed.
        inner_steps: so many Newton–Schulz iterations in the retraction; None: to working precision.
        foreach: step parameters of one shape as one batch; None: on a GPU.
        shard_stiefel: in a data-parallel run, step a share of the constrained blocks on each rank and exchange them: among
            all ranks (True), or within groups of so many consecutive ones, such as the 8 of a node.
        maximize: ascend.
    """

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
        shard_stiefel: bool | int = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, given(locals()))

    def new_state(self, X: Tensor, group: Group) -> State:
        return new_momentum(X, within=("Z",), outside=("U",))

    def stiefel_step(
        self, X: Tensor, G: Tensor, state: State, lr: float, group: Group, scratch: Tensor | None
    ) -> None:
        Z, U, flow = state["Z"], state.get("U"), self.flow(group)
        sgd_step(X, G, Z, U, lr, group["momentum"], group["dampening"], flow, scratch)


class StiefelAdam(MomentumStiefel, FreeAdam):
    """Stiefel Adam for constrained parameters, `torch.optim.Adam` for the rest, with one learning rate.

    Args:
        betas, eps: as in `torch.optim.Adam`, bias corrections included.
        The others: as in `StiefelSGD`.
    """

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
        shard_stiefel: bool | int = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, given(locals()))

    def new_state(self, X: Tensor, group: Group) -> State:
        return new_momentum(X, within=("Z", "p"), outside=("U", "q"))

    def stiefel_step(
        self, X: Tensor, G: Tensor, state: State, lr: float, group: Group, scratch: Tensor | None
    ) -> None:
        adam_step(X, G, state, lr, group["betas"], group["eps"], self.flow(group), scratch)
