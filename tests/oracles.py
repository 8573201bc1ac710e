"""Plain transcriptions to test against: float64, one matrix at a time, in the paper's column notation, nothing clever."""

import torch
from torch import Tensor


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def polar(A: Tensor) -> Tensor:
    P, _, Qh = torch.linalg.svd(A, full_matrices=False)
    return P @ Qh


def inverse_sqrt(A: Tensor) -> Tensor:
    eigenvalues, Q = torch.linalg.eigh(A)
    return (Q * eigenvalues.rsqrt()) @ Q.T


def cayley(M: Tensor) -> Tensor:
    return torch.linalg.inv(eye(len(M)) - M / 2) @ (eye(len(M)) + M / 2)


def exponential(W: Tensor, expm: str, integrator: str) -> Tensor:
    if expm == "euler":
        return eye(len(W)) + W if integrator == "paper" else polar(eye(len(W)) + W)
    return cayley(W) if expm == "cayley" else torch.linalg.matrix_exp(W)


class StiefelSGD:
    """Algorithm 1, or its isometric form."""

    def __init__(self, X, lr, momentum=0.9, dampening=0.0, a=0.5, expm="euler", integrator="isometric"):
        n, m = X.shape
        self.Z, self.U = torch.zeros(m, m, dtype=X.dtype), torch.zeros(n, m, dtype=X.dtype)
        self.options = lr, momentum, dampening, a, expm, integrator

    def step(self, X: Tensor, G: Tensor) -> Tensor:
        lr, mu, tau, a, expm, integrator = self.options
        b = a / (a - 1)
        f = (1 - b) / 2 * (X.T @ G - G.T @ X)
        g = G - X @ (X.T @ G)
        if integrator == "paper":
            U = mu * self.U - (3 * a - 2) / 2 * lr * self.U @ self.Z - (1 - tau) * g
        else:
            U = mu * self.U @ cayley((2 * a - 1) * lr * self.Z) - (1 - tau) * g
        self.Z = mu * self.Z - (1 - tau) * f
        X_half = X @ exponential(lr * self.Z, expm, integrator)
        X_dagger = X_half + lr * U @ (X_half.T @ X_half if integrator == "paper" else eye(X.shape[1]))
        R = inverse_sqrt(X_dagger.T @ X_dagger)
        self.U = U - lr * X_half @ (U.T @ U)
        if integrator == "isometric":
            self.U = self.U @ R
        return X_dagger @ R


class StiefelAdam:
    """Algorithm 2, or its isometric form."""

    def __init__(self, X, lr, betas=(0.9, 0.999), eps=1e-8, a=0.5, expm="euler", integrator="isometric"):
        n, m = X.shape
        self.Z, self.p = torch.zeros(m, m, dtype=X.dtype), torch.zeros(m, m, dtype=X.dtype)
        self.U, self.q = torch.zeros(n, m, dtype=X.dtype), torch.zeros(n, m, dtype=X.dtype)
        self.options, self.t = (lr, betas, eps, a, expm, integrator), 0

    def step(self, X: Tensor, G: Tensor) -> Tensor:
        lr, (beta1, beta2), eps, a, expm, integrator = self.options
        self.t += 1
        c1, c2 = 1 - beta1**self.t, 1 - beta2**self.t
        b = a / (a - 1)
        f = (1 - b) / 2 * (X.T @ G - G.T @ X)
        g = G - X @ (X.T @ G)
        if X.shape[0] == X.shape[1]:
            g = torch.zeros_like(g)  # exactly, as in Algorithm 5: here rounding would be rescaled to order 1
        self.p = beta2 * self.p + (1 - beta2) * f * f
        self.q = beta2 * self.q + (1 - beta2) * g * g
        if integrator == "paper":
            U = beta1 * self.U - (3 * a - 2) / 2 * lr * self.U @ self.Z - (1 - beta1) * g
        else:
            U = beta1 * self.U @ cayley((2 * a - 1) * lr * self.Z) - (1 - beta1) * g
        self.Z = beta1 * self.Z - (1 - beta1) * f
        Z_hat = self.Z / ((self.p / c2).sqrt() + eps) / c1
        X_half = X @ exponential(lr * Z_hat, expm, integrator)
        U_hat = U / ((self.q / c2).sqrt() + eps) / c1
        U_tilde = U_hat - X_half @ torch.linalg.inv(X_half.T @ X_half) @ (X_half.T @ U_hat)
        X_dagger = X_half + lr * U_tilde @ (X_half.T @ X_half if integrator == "paper" else eye(X.shape[1]))
        self.U = U - lr * X_half @ (U_tilde.T @ U)
        if integrator == "isometric" and self.U.norm() > 0:
            self.U = self.U * (U.norm() / self.U.norm())
        return X_dagger @ inverse_sqrt(X_dagger.T @ X_dagger)


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
