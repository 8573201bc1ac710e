"""Momentumless Stiefel SGD (Wen & Yin, 2013): a baseline of the paper.

X moves along the Cayley curve of W = GXᵀ − XGᵀ (columns), X⁺ = (I + η/2 W)⁻¹(I − η/2 W)X, which stays on the manifold
exactly.  W has rank 2m: where that is less than n the inverse is taken of a 2m × 2m matrix (Sherman–Morrison–Woodbury).
"""

import torch
from torch import Tensor

from ortho_vit.optim.base import FreeSGD, Group, Params, State, given
from ortho_vit.stiefel import identity, polar


def cayley_step(X: Tensor, G: Tensor, lr: float) -> None:
    """Move X (B, m, n) against G along the Cayley curve, in place.

    The gradient is taken at unit norm and its norm given to the learning rate, which changes nothing but keeps the linear
    system balanced.  A step of length beyond 1/2 is followed by a polar projection: the solve rounds too much to be trusted.
    """
    m, n = X.shape[-2:]
    norm = torch.linalg.matrix_norm(G, keepdim=True)
    G = G / torch.where(norm > 0, norm, 1.0)
    lr_norm = lr * norm
    K = X @ G.mT
    if 2 * m < n:
        # [G, X] and [X, −G] of the formula, by blocks; X Xᵀ = I is known.
        I, N = identity(X).expand_as(K), G @ G.mT
        BA = torch.cat([torch.cat([K, I], -1), torch.cat([-N, -K.mT], -1)], -2)
        BX = torch.cat([I, -K.mT], -2)
        Y = torch.linalg.solve(identity(BA) + lr_norm / 2 * BA, BX) * -lr_norm
        X_new = torch.baddbmm(X, Y[:, :m].mT, G).baddbmm_(Y[:, m:].mT, X)
    else:
        W = G.mT @ X - X.mT @ G  # n × n, n ≤ 2m
        I = torch.eye(n, dtype=X.dtype, device=X.device)
        X_new = X + torch.linalg.solve(I + lr_norm / 2 * W, -lr_norm * (W @ X.mT)).mT
    far = lr_norm > 0.5
    X.copy_(torch.where(far, polar(X_new), X_new) if far.any() else X_new)


class MomentumlessStiefelSGD(FreeSGD):
    """Gradient descent along Cayley curves for constrained parameters, `torch.optim.SGD` with momentum for the rest.

    Args: as in `StiefelSGD`; `momentum` and `dampening` are those of the free parameters.
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
        foreach: bool | None = None,
        shard_stiefel: bool | int = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, given(locals()))

    def new_state(self, X: Tensor, group: Group) -> State:
        return {}

    def stiefel_step(
        self, X: Tensor, G: Tensor, state: State, lr: float, group: Group, scratch: Tensor | None
    ) -> None:
        cayley_step(X, G, lr)
