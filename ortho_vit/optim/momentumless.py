"""Momentumless Stiefel SGD (Wen & Yin, 2013): a baseline of the paper.

X moves along the Cayley curve of W = GXᵀ − XGᵀ (columns), X⁺ = (I + η/2 W)⁻¹(I − η/2 W)X, which stays on the manifold
exactly.  W has rank 2m: where that is less than n the inverse is taken of a 2m × 2m matrix (Sherman–Morrison–Woodbury).
"""

import torch
from torch import Tensor

from ortho_vit.optim.base import BlockRule, Params, StiefelOptimizer
from ortho_vit.optim.free import SGD
from ortho_vit.optim.momentum import deviation, retract
from ortho_vit.stiefel import identity


def cayley_step(X: Tensor, G: Tensor, lr: float | Tensor, host: bool) -> None:
    """Move X (B, m, n) against G along the Cayley curve, in place.

    The gradient is divided by its norm and the learning rate multiplied by it, which changes nothing but keeps the linear
    system balanced.  What the solve rounds is removed by a retraction, as in `ortho_vit.optim.momentum`; so that it remains
    small, a step is not longer than η‖G‖ = ε^(−1/2), where the curve has long arrived.
    """
    m, n = X.shape[-2:]
    norm = torch.linalg.matrix_norm(G, keepdim=True)
    G = G / torch.where(norm > 0, norm, 1.0)
    lr_norm = (lr * norm).clamp(max=torch.finfo(X.dtype).eps ** -0.5)
    K = X @ G.mT
    if 2 * m < n:
        # [G, X] and [X, −G] of the formula, by blocks; X Xᵀ = I is known.
        I, N = identity(X).expand_as(K), G @ G.mT
        BA = torch.cat([torch.cat([K, I], -1), torch.cat([-N, -K.mT], -1)], -2)
        BX = torch.cat([I, -K.mT], -2)
        Y = torch.linalg.solve_ex(identity(BA) + lr_norm / 2 * BA, BX)[0] * -lr_norm
        X_new = torch.baddbmm(X, Y[:, :m].mT, G).baddbmm_(Y[:, m:].mT, X)
    else:
        W = G.mT @ X - X.mT @ G  # n × n, n ≤ 2m
        I = torch.eye(n, dtype=X.dtype, device=X.device)
        X_new = X + torch.linalg.solve_ex(I + lr_norm / 2 * W, -lr_norm * (W @ X.mT))[0].mT
    retract(X, X_new, *deviation(X_new), host)


class CayleyRule(BlockRule):
    def move(self, X, G, state, lr, group, norm, scratch) -> None:
        cayley_step(X, G, lr, host=norm is not None)


class MomentumlessStiefelSGD(StiefelOptimizer):
    """Gradient descent along Cayley curves for constrained parameters, `torch.optim.SGD` with momentum for the rest.

    Args: as in `StiefelSGD`; `momentum` and `dampening` are those of the free parameters.
    """

    free_rule = SGD
    block_rule = CayleyRule()

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        stiefel_lr: float | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        shard_stiefel: bool | int = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, locals())
