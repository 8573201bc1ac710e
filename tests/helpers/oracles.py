"""The printed algorithms and the baselines, transcribed plainly to test against.

In float64, one matrix at a time, in the paper's column notation.  `ortho_vit.optim.reference` has the isometric step.
"""

import torch
from torch import Tensor


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def cayley(M: Tensor) -> Tensor:
    return torch.linalg.solve(eye(len(M)) - M / 2, eye(len(M)) + M / 2)


def exponential(W: Tensor, expm: str) -> Tensor:
    """What turns X within its span, as printed."""
    if expm == "euler":
        return eye(len(W)) + W
    return cayley(W) if expm == "cayley" else torch.linalg.matrix_exp(W)


def retracted(X: Tensor) -> Tensor:
    """X (XᵀX)^(−1/2), by an eigendecomposition."""
    eigenvalues, Q = torch.linalg.eigh(X.T @ X)
    return X @ (Q * eigenvalues.rsqrt()) @ Q.T


class PrintedStiefelSGD:
    """Algorithm 1, and 4 for square X."""

    def __init__(self, X, lr, momentum=0.9, dampening=0.0, a=0.5, expm="euler"):
        self.Z, self.U = X.new_zeros(X.shape[1], X.shape[1]), torch.zeros_like(X)
        self.options = lr, momentum, 1 - dampening, a, expm

    def step(self, X: Tensor, G: Tensor) -> Tensor:
        lr, mu, kappa, a, expm = self.options
        f = (1 - a / (a - 1)) / 2 * (X.T @ G - G.T @ X)
        g = (G - X @ X.T @ G) * (X.shape[0] > X.shape[1])
        U = mu * self.U - (3 * a - 2) / 2 * lr * self.U @ self.Z - kappa * g
        self.Z = mu * self.Z - kappa * f
        X_half = X @ exponential(lr * self.Z, expm)
        self.U = U - lr * X_half @ U.T @ U
        return retracted(X_half + lr * U @ X_half.T @ X_half)


class PrintedStiefelAdam:
    """Algorithm 2, and 5 for square X, with the bias corrections of `torch.optim.Adam`."""

    def __init__(self, X, lr, betas=(0.9, 0.999), eps=1e-8, a=0.5, expm="euler"):
        self.Z, self.U = X.new_zeros(X.shape[1], X.shape[1]), torch.zeros_like(X)
        self.p, self.q, self.t = torch.zeros_like(self.Z), torch.zeros_like(X), 0
        self.options = lr, betas, eps, a, expm

    def step(self, X: Tensor, G: Tensor) -> Tensor:
        lr, (beta1, beta2), eps, a, expm = self.options
        self.t += 1
        c1, c2 = 1 - beta1**self.t, 1 - beta2**self.t
        f = (1 - a / (a - 1)) / 2 * (X.T @ G - G.T @ X)
        g = (G - X @ X.T @ G) * (X.shape[0] > X.shape[1])
        self.p = beta2 * self.p + (1 - beta2) * f**2
        self.q = beta2 * self.q + (1 - beta2) * g**2
        U = beta1 * self.U - (3 * a - 2) / 2 * lr * self.U @ self.Z - (1 - beta1) * g
        self.Z = beta1 * self.Z - (1 - beta1) * f
        X_half = X @ exponential(lr * self.Z / ((self.p / c2).sqrt() + eps) / c1, expm)
        N, V = X_half.T @ X_half, U / ((self.q / c2).sqrt() + eps) / c1
        V = V - X_half @ torch.linalg.inv(N) @ X_half.T @ V
        self.U = U - lr * X_half @ V.T @ U
        return retracted(X_half + lr * V @ N)


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
