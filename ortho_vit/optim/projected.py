"""Projected Stiefel SGD and Adam (Li, Li & Todorovic, ICLR 2020): a baseline of the paper.

The momentum M lives in the ambient space and is projected to the tangent space, as WX with W skew (n × n).  X moves along
the Cayley curve of W, whose implicit equation Y = X + α/2 W(X + Y) is iterated a few times; what that leaves undone drifts
off the manifold and is removed by a QR retraction now and then.

W is never formed.  In the paper's columns W = AXᵀ − XAᵀ with the thin A = M − X XᵀM / 2, and every iterate is
Y = XC + AD: the iteration runs on the m × m coefficients C and D, so a step costs 8 products of m²n whatever their number.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ortho_vit.optim.base import BlockRule, Group, Params, State, StiefelOptimizer, is_count
from ortho_vit.optim.free import ADAM, SGD, Checks
from ortho_vit.optim.momentum import bias_corrections
from ortho_vit.stiefel import identity, qr


def projected_step(X: Tensor, M: Tensor, lr: float, scale: Tensor | None, cayley_steps: int) -> Tensor:
    """Move X (B, m, n) along M, in place, and return the momentum projected to the tangent space, WX.

    The step is capped at 1/‖W‖, as its authors do to make the iteration contract, with the Frobenius norm, which bounds
    the spectral norm and is known from the m × m Gram matrices.  `scale` divides W (Adam).
    """
    J = torch.bmm(X, M.mT)
    A = torch.baddbmm(M, J.mT, X, alpha=-0.5)
    Q, N = torch.bmm(X, X.mT), torch.bmm(A, A.mT)
    K = torch.baddbmm(J, Q, J, alpha=-0.5)  # X Aᵀ
    momentum = torch.baddbmm(torch.bmm(Q, A), K, X, alpha=-1)
    start = torch.ones_like(J[..., :1, :1])
    if scale is not None:
        A, N, K, start = A / scale, N / scale**2, K / scale, start * scale
    norm = (2 * (Q * N).sum((-2, -1)) - 2 * (K * K.mT).sum((-2, -1))).clamp_min(0).sqrt()[..., None, None]
    alpha = torch.minimum(1 / (norm + 1e-8), torch.as_tensor(lr, dtype=X.dtype, device=X.device))
    I = identity(X)
    C, D = I + alpha / 2 * J, alpha * start * I
    for _ in range(cayley_steps):
        C, D = I - alpha / 2 * (K.mT @ (I + C) + N @ D), alpha / 2 * (Q @ (I + C) + K @ D)
    X.copy_(torch.baddbmm(torch.bmm(C.mT, X), D.mT, A))
    return momentum


class ProjectedRule(BlockRule):
    """What Projected SGD and Adam share: a drift between two QR retractions, which is the method."""

    checks: ClassVar[Checks] = {
        "cayley_steps": (lambda k, _: is_count(k), "must be at least 1"),
        "qr_every": (lambda k, _: k is None or is_count(k), "must be None or at least 1"),
    }
    exact = False

    def reads_device(self, group: Group) -> str | None:
        return None if group["qr_every"] is None else "a QR retraction every so many steps; set qr_every=None"

    def retract(self, X: Tensor, state: State, group: Group) -> None:
        """The QR retraction of the blocks whose step it is."""
        if group["qr_every"] is None:
            return
        due = (state["step"] % group["qr_every"] == 0).to(X.device)
        if due.any():
            X.copy_(torch.where(due, qr(X.mT).mT, X))


class ProjectedSGD(ProjectedRule):
    def new_state(self, X: Tensor) -> State:
        return {"M": torch.zeros_like(X, memory_format=torch.contiguous_format)}

    def move(self, X, G, state, lr, group, norm, scratch) -> None:
        M = state["M"].mul_(group["momentum"]).sub_(G, alpha=1 - group["dampening"])
        M.copy_(projected_step(X, M, lr, None, group["cayley_steps"]))
        self.retract(X, state, group)


class ProjectedAdam(ProjectedRule):
    """The second moment is one number per block, ‖G‖² averaged."""

    def new_state(self, X: Tensor) -> State:
        zeros = torch.zeros_like(X, memory_format=torch.contiguous_format)
        return {"m": zeros, "v": X.new_zeros(len(X), 1, 1)}

    def move(self, X, G, state, lr, group, norm, scratch) -> None:
        beta1, beta2 = group["betas"]
        c1, c2 = bias_corrections((beta1, beta2), state["step"], X.dtype)
        m = state["m"].mul_(beta1).add_(G, alpha=1 - beta1)
        v = state["v"].mul_(beta2).add_(torch.linalg.matrix_norm(G, keepdim=True) ** 2, alpha=1 - beta2)
        scale = (v / c2 + group["eps"]).sqrt()
        m.copy_(projected_step(X, m / -c1, lr, scale, group["cayley_steps"]).mul_(-c1))
        self.retract(X, state, group)


class ProjectedStiefelSGD(StiefelOptimizer):
    """Projected Stiefel SGD for constrained parameters, `torch.optim.SGD` for the rest.

    The authors' released code never stores its momentum: `momentum=0` is what it runs; this is what their paper says.

    Args:
        cayley_steps: iterations of the Cayley curve's equation.
        qr_every: steps between two QR retractions; None: never.
        The others: as in `StiefelSGD`.  `stiefel_lr` is usually 10 times `lr`.
    """

    free_rule = SGD
    block_rule = ProjectedSGD()

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        stiefel_lr: float | None = None,
        cayley_steps: int = 5,
        qr_every: int | None = 100,
        foreach: bool | None = None,
        capturable: bool | None = None,
        shard_stiefel: bool | int = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, locals())


class ProjectedStiefelAdam(StiefelOptimizer):
    """Projected Stiefel Adam for constrained parameters, `torch.optim.Adam` for the rest.

    Args:
        betas, eps: as in `torch.optim.Adam`; for the blocks ε stands under the root.
        The others: as in `ProjectedStiefelSGD`.
    """

    free_rule = ADAM
    block_rule = ProjectedAdam()

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        stiefel_lr: float | None = None,
        cayley_steps: int = 5,
        qr_every: int | None = 100,
        foreach: bool | None = None,
        capturable: bool | None = None,
        shard_stiefel: bool | int = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, locals())
