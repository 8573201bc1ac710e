"""The baselines, transcribed plainly to test against: float64, one matrix at a time, in the paper's column notation.

`ortho_vit.optim.reference` has the momentum optimizers in the same form.
"""

import torch
from torch import Tensor

from ortho_vit.optim.reference import cayley


class ProjectedStiefelSGD:
    """Li et al.'s algorithm with W formed (n × n)."""

    def __init__(self, X, lr, momentum=0.9, cayley_steps=5):
        self.M, self.options = torch.zeros_like(X), (lr, momentum, cayley_steps)

    def step(self, X: Tensor, G: Tensor) -> Tensor:
        lr, mu, steps = self.options
        M = mu * self.M - G
        W = M @ X.T - X @ (X.T @ M @ X.T) / 2
        W = W - W.T
        Y, self.M = move_along(X, W, M, min(lr, 1 / (W.norm() + 1e-8)), steps), W @ X
        return Y


class ProjectedStiefelAdam:
    """The same with a scalar second moment."""

    def __init__(self, X, lr, betas=(0.9, 0.999), eps=1e-8, cayley_steps=5):
        self.m, self.v, self.t = torch.zeros_like(X), 0.0, 0
        self.options = lr, betas, eps, cayley_steps

    def step(self, X: Tensor, G: Tensor) -> Tensor:
        lr, (beta1, beta2), eps, steps = self.options
        self.t += 1
        c1, c2 = 1 - beta1**self.t, 1 - beta2**self.t
        self.m = beta1 * self.m + (1 - beta1) * G
        self.v = beta2 * self.v + (1 - beta2) * (G**2).sum()
        M, scale = -self.m / c1, (self.v / c2 + eps).sqrt()
        W = M @ X.T - X @ (X.T @ M @ X.T) / 2
        W = (W - W.T) / scale
        Y, self.m = move_along(X, W, M, min(lr, 1 / (W.norm() + 1e-8)), steps), -W @ X * scale * c1
        return Y


def move_along(X: Tensor, W: Tensor, M: Tensor, alpha: float, steps: int) -> Tensor:
    Y = X + alpha * M
    for _ in range(steps):
        Y = X + alpha / 2 * W @ (X + Y)
    return Y


class MomentumlessStiefelSGD:
    """Wen & Yin's curve with the n × n inverse."""

    def __init__(self, X, lr):
        self.lr = lr

    def step(self, X: Tensor, G: Tensor) -> Tensor:
        W = G @ X.T - X @ G.T
        return cayley(-self.lr * W) @ X
