"""The momentum Stiefel optimizers on a page: one matrix at a time, in float64, in the paper's own notation.

This is the readable twin of `ortho_vit.optim.momentum`, and what that file is tested against.  Frames are columns,
X ∈ St(n, m) with n ≥ m and XᵀX = I; G = ∂f/∂X; Z (m × m, skew) and U (n × m, XᵀU = 0) are the momentum.  A square X has
no U: Algorithms 4 and 5 are Algorithms 1 and 2 with g = 0.

`integrator="paper"` is the algorithm as printed, with the bias corrections of `torch.optim.Adam`.  `"isometric"` is ours:
the sub-step along U conserves UᵀU, as the exact flow does, and neither half of a step turns a direction by more than 39°.

    X, optimizer = random_stiefel(9, 3, dtype=torch.float64), StiefelSGD(X, lr=0.1)
    X = optimizer.step(X, gradient(X))
"""

import torch
from torch import Tensor

REACH = 64.0  # the largest η|Gᵢⱼ| that is told apart from larger ones
STEEP = 0.8  # the tangent of the largest angle by which half a step turns a direction


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def inverse_sqrt(A: Tensor) -> Tensor:
    eigenvalues, Q = torch.linalg.eigh(A)
    return (Q * eigenvalues.rsqrt()) @ Q.T


def polar(A: Tensor) -> Tensor:
    P, _, Qh = torch.linalg.svd(A, full_matrices=False)
    return P @ Qh


def cayley(M: Tensor) -> Tensor:
    return torch.linalg.solve(eye(len(M)) - M / 2, eye(len(M)) + M / 2)


def limited(G: Tensor, lr: float) -> Tensor:
    """(λ(G)/η)G: the gradient, shortened where lr·max|G| is beyond reach; none of it where lr = 0."""
    top = lr * float(G.abs().max())
    return G * (min(1.0, REACH / top) if top else float(lr > 0))


def rate(A: Tensor, lr: float) -> float:
    """τ(A): the learning rate, or less, so that A turns no direction by more than 39°.  √‖(AᵀA)²‖ bounds ‖A‖₂²."""
    size = float(A.norm())
    if lr * size <= STEEP:
        return lr
    N = A / size
    sigma = size * float(torch.linalg.matrix_norm(N.T @ N @ N.T @ N)) ** 0.25
    return min(lr, STEEP / (sigma * (1 - 1e-5)))


def exponential(W: Tensor, expm: str, integrator: str) -> Tensor:
    """What turns X within its span."""
    if expm == "euler":
        return eye(len(W)) + W if integrator == "paper" else polar(eye(len(W)) + W)
    return cayley(W) if expm == "cayley" else torch.linalg.matrix_exp(W)


class StiefelSGD:
    """Algorithm 1, or its isometric form."""

    def __init__(
        self,
        X: Tensor,
        lr: float,
        momentum: float = 0.9,
        dampening: float = 0.0,
        a: float = 0.5,
        expm: str = "euler",
        integrator: str = "isometric",
    ) -> None:
        n, m = X.shape
        self.Z, self.U = X.new_zeros(m, m), X.new_zeros(n, m)
        self.lr, self.mu, self.kappa, self.a = lr, momentum, 1 - dampening, a
        self.expm, self.integrator = expm, integrator

    def step(self, X: Tensor, G: Tensor) -> Tensor:
        lr, mu, a = self.lr, self.mu, self.a
        if self.integrator == "isometric":
            G = limited(G, lr)
        f, g = gradient_parts(X, G, a)
        if self.integrator == "paper":
            U = mu * self.U - (3 * a - 2) / 2 * lr * self.U @ self.Z - self.kappa * g
        else:
            U = mu * self.U @ cayley((2 * a - 1) * rate(self.Z, lr) * self.Z) - self.kappa * g
        self.Z = mu * self.Z - self.kappa * f
        if self.integrator == "paper":
            X_half = X @ exponential(lr * self.Z, self.expm, "paper")
            X_dagger = X_half + lr * U @ (X_half.T @ X_half)
            self.U = U - lr * X_half @ (U.T @ U)
            return X_dagger @ inverse_sqrt(X_dagger.T @ X_dagger)
        X_half = X @ exponential(rate(self.Z, lr) * self.Z, self.expm, "isometric")
        t = rate(U, lr)
        X_dagger = X_half + t * U
        R = inverse_sqrt(X_dagger.T @ X_dagger)
        self.U = (U - t * X_half @ (U.T @ U)) @ R
        return X_dagger @ R if lr else X


class StiefelAdam:
    """Algorithm 2, or its isometric form."""

    def __init__(
        self,
        X: Tensor,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        a: float = 0.5,
        expm: str = "euler",
        integrator: str = "isometric",
    ) -> None:
        n, m = X.shape
        self.Z, self.p = X.new_zeros(m, m), X.new_zeros(m, m)
        self.U, self.q = X.new_zeros(n, m), X.new_zeros(n, m)
        self.lr, self.betas, self.eps, self.a = lr, betas, eps, a
        self.expm, self.integrator, self.t = expm, integrator, 0

    def step(self, X: Tensor, G: Tensor) -> Tensor:
        lr, (beta1, beta2), a = self.lr, self.betas, self.a
        self.t += 1
        c1, c2 = 1 - beta1**self.t, 1 - beta2**self.t
        if self.integrator == "isometric":
            G = G * min(1.0, 1e15 / max(float(G.abs().max()), 1e-300))  # so that float32 can square it
        f, g = gradient_parts(X, G, a)
        self.p = beta2 * self.p + (1 - beta2) * f * f
        self.q = beta2 * self.q + (1 - beta2) * g * g
        if self.integrator == "paper":
            U = beta1 * self.U - (3 * a - 2) / 2 * lr * self.U @ self.Z - (1 - beta1) * g
        else:
            U = beta1 * self.U @ cayley((2 * a - 1) * rate(self.Z, lr) * self.Z) - (1 - beta1) * g
        self.Z = beta1 * self.Z - (1 - beta1) * f
        Z_hat = self.Z / ((self.p / c2).sqrt() + self.eps) / c1
        U_hat = U / ((self.q / c2).sqrt() + self.eps) / c1
        if self.integrator == "paper":
            X_half = X @ exponential(lr * Z_hat, self.expm, "paper")
            N = X_half.T @ X_half
            U_tilde = U_hat - X_half @ torch.linalg.solve(N, X_half.T @ U_hat)
            X_dagger = X_half + lr * U_tilde @ N
            self.U = U - lr * X_half @ (U_tilde.T @ U)
            return X_dagger @ inverse_sqrt(X_dagger.T @ X_dagger)
        X_half = X @ exponential(rate(Z_hat, lr) * Z_hat, self.expm, "isometric")
        t = rate(U_hat, lr)
        X_dagger = X_half + t * (U_hat - X_half @ (X_half.T @ U_hat))
        X = X_dagger @ inverse_sqrt(X_dagger.T @ X_dagger) if lr else X
        brought = U - X @ (X.T @ U)
        self.U = brought * (U.norm() / brought.norm()) if brought.norm() > 0 else brought
        return X


def gradient_parts(X: Tensor, G: Tensor, a: float) -> tuple[Tensor, Tensor]:
    """f and g, which drive Z and U; g is exactly 0 for a square X, where rounding would be rescaled to order 1."""
    b = a / (a - 1)
    f = (1 - b) / 2 * (X.T @ G - G.T @ X)
    g = G - X @ (X.T @ G) if X.shape[0] > X.shape[1] else torch.zeros_like(G)
    return f, g
