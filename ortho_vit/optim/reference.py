"""The momentum Stiefel optimizers on a page, in the paper's own notation.

Frames are columns, X ∈ St(n, m) with n ≥ m and XᵀX = I; G = ∂f/∂X; Z (m × m, skew) and U (n × m, XᵀU = 0) are the
momentum.  A square X has no U: Algorithms 4 and 5 are Algorithms 1 and 2 with g = 0.

The `printed` steps are Algorithms 1 and 2 with the bias corrections of `torch.optim.Adam`; leading dimensions are a
batch.  They are what `integrator="paper"` runs.  The `isometric` steps are ours, for one matrix: the sub-step along U
conserves UᵀU, as the exact flow does, and neither half of a step turns a direction by more than 39°.  They are the
readable twin of `ortho_vit.optim.momentum`, and what that file is tested against.

    X, optimizer = random_stiefel(9, 3, dtype=torch.float64), StiefelSGD(X, lr=0.1)
    X = optimizer.step(X, gradient(X))
"""

from typing import Any

import torch
from torch import Tensor

from ortho_vit.stiefel import cayley, identity, polar

REACH = 64.0  # the largest η|Gᵢⱼ| that is told apart from larger ones
STEEP = 0.8  # the tangent of the largest angle by which half a step turns a direction


def gradient_parts(X: Tensor, G: Tensor, a: float) -> tuple[Tensor, Tensor]:
    """f and g, which drive Z and U; g is exactly 0 for a square X, where rounding would be rescaled to order 1."""
    b, K = a / (a - 1), X.mT @ G
    f = (1 - b) / 2 * (K - K.mT)
    return f, G - X @ K if X.shape[-2] > X.shape[-1] else torch.zeros_like(G)


def exponential(W: Tensor, expm: str) -> Tensor:
    """What turns X within its span; for "euler" only nearly orthogonal."""
    if expm == "euler":
        return identity(W) + W
    return cayley(W) if expm == "cayley" else torch.linalg.matrix_exp(W)


# ------------------------------------------------------------------------------------------------------------ printed


def printed_sgd_step(X, G, Z, U, *, lr, momentum, dampening, a, expm, inner_steps=None) -> tuple[Tensor, ...]:
    """Algorithm 1: the new X, Z and U."""
    f, g = gradient_parts(X, G, a)
    U = momentum * U - (3 * a - 2) / 2 * lr * U @ Z - (1 - dampening) * g
    Z = momentum * Z - (1 - dampening) * f
    X_half = X @ exponential(lr * Z, expm)
    X_dagger = X_half + lr * U @ (X_half.mT @ X_half)
    return polar(X_dagger, inner_steps=inner_steps), Z, U - lr * X_half @ (U.mT @ U)


def printed_adam_step(
    X, G, Z, U, p, q, *, lr, betas, corrections, eps, a, expm, inner_steps=None
) -> tuple[Tensor, ...]:
    """Algorithm 2: the new X, Z, U, p and q.  `corrections` are 1 − βᵗ for both β."""
    (beta1, beta2), (c1, c2) = betas, corrections
    f, g = gradient_parts(X, G, a)
    p = beta2 * p + (1 - beta2) * f * f
    q = beta2 * q + (1 - beta2) * g * g
    U = beta1 * U - (3 * a - 2) / 2 * lr * U @ Z - (1 - beta1) * g
    Z = beta1 * Z - (1 - beta1) * f
    Z_hat = Z / ((p / c2).sqrt() + eps) / c1
    U_hat = U / ((q / c2).sqrt() + eps) / c1
    X_half = X @ exponential(lr * Z_hat, expm)
    N = X_half.mT @ X_half
    U_tilde = U_hat - X_half @ torch.linalg.solve(N, X_half.mT @ U_hat)
    X_dagger = X_half + lr * U_tilde @ N
    return polar(X_dagger, inner_steps=inner_steps), Z, U - lr * X_half @ (U_tilde.mT @ U), p, q


# ---------------------------------------------------------------------------------------------------------- isometric


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


def isometric_sgd_step(X, G, Z, U, *, lr, momentum, dampening, a, expm) -> tuple[Tensor, ...]:
    f, g = gradient_parts(X, limited(G, lr), a)
    U = momentum * U @ cayley((2 * a - 1) * rate(Z, lr) * Z) - (1 - dampening) * g
    Z = momentum * Z - (1 - dampening) * f
    X_half = X @ polar(exponential(rate(Z, lr) * Z, expm))
    t = rate(U, lr)
    X_dagger = X_half + t * U
    R = X_dagger.T @ polar(X_dagger)  # (X†ᵀX†)^(1/2)
    U = torch.linalg.solve(R, U - t * X_half @ (U.T @ U), left=False)
    return polar(X_dagger) if lr else X, Z, U


def isometric_adam_step(X, G, Z, U, p, q, *, lr, betas, corrections, eps, a, expm) -> tuple[Tensor, ...]:
    (beta1, beta2), (c1, c2) = betas, corrections
    G = G * min(1.0, 1e15 / max(float(G.abs().max()), 1e-300))  # so that float32 can square it
    f, g = gradient_parts(X, G, a)
    p = beta2 * p + (1 - beta2) * f * f
    q = beta2 * q + (1 - beta2) * g * g
    U = beta1 * U @ cayley((2 * a - 1) * rate(Z, lr) * Z) - (1 - beta1) * g
    Z = beta1 * Z - (1 - beta1) * f
    Z_hat = Z / ((p / c2).sqrt() + eps) / c1
    U_hat = U / ((q / c2).sqrt() + eps) / c1
    X_half = X @ polar(exponential(rate(Z_hat, lr) * Z_hat, expm))
    X_dagger = X_half + rate(U_hat, lr) * (U_hat - X_half @ (X_half.T @ U_hat))
    X = polar(X_dagger) if lr else X
    transported = U - X @ (X.T @ U)
    return (
        X,
        Z,
        transported * (U.norm() / transported.norm()) if transported.norm() > 0 else transported,
        p,
        q,
    )


# --------------------------------------------------------------------------------------------- with state, to be used


class StiefelSGD:
    """Algorithm 1, or its isometric form."""

    def __init__(
        self, X: Tensor, lr: float, momentum=0.9, dampening=0.0, a=0.5, expm="euler", integrator="isometric"
    ) -> None:
        self.Z, self.U = X.new_zeros(X.shape[1], X.shape[1]), torch.zeros_like(X)
        self.move = printed_sgd_step if integrator == "paper" else isometric_sgd_step
        self.options: dict[str, Any] = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "a": a, "expm": expm,
        }  # fmt: skip

    def step(self, X: Tensor, G: Tensor) -> Tensor:
        X, self.Z, self.U = self.move(X, G, self.Z, self.U, **self.options)
        return X


class StiefelAdam:
    """Algorithm 2, or its isometric form."""

    def __init__(
        self, X: Tensor, lr: float, betas=(0.9, 0.999), eps=1e-8, a=0.5, expm="euler", integrator="isometric"
    ) -> None:
        self.Z, self.U = X.new_zeros(X.shape[1], X.shape[1]), torch.zeros_like(X)
        self.p, self.q, self.t = torch.zeros_like(self.Z), torch.zeros_like(X), 0
        self.move = printed_adam_step if integrator == "paper" else isometric_adam_step
        self.options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "a": a, "expm": expm}

    def step(self, X: Tensor, G: Tensor) -> Tensor:
        self.t += 1
        corrections = tuple(1 - beta**self.t for beta in self.options["betas"])
        state = self.Z, self.U, self.p, self.q
        X, self.Z, self.U, self.p, self.q = self.move(X, G, *state, corrections=corrections, **self.options)
        return X
