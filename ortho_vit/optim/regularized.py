"""SGD and Adam with orthogonality as a penalty (Cisse et al., 2017): a baseline of the paper.

Before each step the blocks take one gradient step on λ/4 ‖XXᵀ − I‖²:  X ← (1 + λ) X − λ XXᵀX.  Then everything moves by
torch's own SGD or Adam.  Nothing stays on the manifold.
"""

import math

import torch
from torch import Tensor

from ortho_vit.optim.base import FreeAdam, FreeSGD, Group, Params, Part, State, StiefelOptimizer, given


class Regularized(StiefelOptimizer):
    """What the two share: the penalty."""

    exact = False
    starts_on_manifold = False

    def check(self, group: Group) -> None:
        super().check(group)
        self.require(group, "penalty", lambda x: 0 <= x < math.inf, "must be finite and >= 0")

    def penalize(self, X: Tensor, group: Group) -> None:
        """X ← X − λ (XXᵀ − I) X, in place."""
        X.copy_(torch.baddbmm(X, X @ X.mT, X, beta=1 + group["penalty"], alpha=-group["penalty"]))

    def move(self, X: Tensor, G: Tensor, state: State, lr: float, group: Group) -> None:
        """torch's step on the blocks, which do not decay."""
        self.free_step([Part(X, G, state)], {**group, "lr": lr, "weight_decay": 0, "maximize": False})


class RegularizedSGD(Regularized, FreeSGD):
    """`torch.optim.SGD` with a penalty on the constrained blocks.

    Args:
        penalty: λ, the step on the penalty.
        The others: as in `StiefelSGD`.
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
        penalty: float = 1e-6,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, given(locals()))

    def new_state(self, X: Tensor, group: Group) -> State:
        return {}

    def stiefel_step(
        self, X: Tensor, G: Tensor, state: State, lr: float, group: Group, scratch: Tensor | None
    ) -> None:
        self.penalize(X, group)
        self.move(X, G, state, lr, group)


class RegularizedAdam(Regularized, FreeAdam):
    """`torch.optim.Adam` with a penalty on the constrained blocks.

    Args:
        penalty: λ, the step on the penalty.
        The others: as in `StiefelAdam`.
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
        penalty: float = 1e-6,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, given(locals()))

    def new_state(self, X: Tensor, group: Group) -> State:
        zeros = torch.zeros_like(X, memory_format=torch.contiguous_format)
        return {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def stiefel_step(
        self, X: Tensor, G: Tensor, state: State, lr: float, group: Group, scratch: Tensor | None
    ) -> None:
        self.penalize(X, group)
        moments = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        self.move(X, G, {**moments, "step": torch.tensor(float(state["step"] - 1))}, lr, group)
