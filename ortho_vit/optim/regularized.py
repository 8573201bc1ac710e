"""SGD and Adam with orthogonality as a penalty (Cisse et al., 2017): a baseline of the paper.

Before each step the blocks take one gradient step on λ/4 ‖XXᵀ − I‖²:  X ← (1 + λ) X − λ XXᵀX.  Then everything moves by
torch's own SGD or Adam.  Nothing stays on the manifold.
"""

import math

import torch
from torch import Tensor

from ortho_vit.optim.base import Group, Params, State, StiefelOptimizer, hyper_parameters
from ortho_vit.optim.free import ADAM, SGD, Part, Rules

RULES: Rules = {"penalty": (lambda x, _: 0 <= x < math.inf, "must be finite and >= 0")}


def penalize(X: Tensor, penalty: float) -> None:
    """X ← X − λ (XXᵀ − I) X, in place."""
    X.copy_(torch.baddbmm(X, X @ X.mT, X, beta=1 + penalty, alpha=-penalty))


def without_decay(group: Group, lr: float | Tensor) -> Group:
    """The options of torch's step on the blocks, which do not decay; `maximize` is done already."""
    return {**group, "lr": lr, "weight_decay": 0, "maximize": False}


class RegularizedSGD(StiefelOptimizer):
    """`torch.optim.SGD` with a penalty on the constrained blocks.

    Args:
        penalty: λ, the step on the penalty.
        The others: as in `StiefelSGD`.
    """

    free_rule = SGD
    rules = RULES
    exact = False
    starts_on_manifold = False

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
        capturable: bool | None = None,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, hyper_parameters(locals()))

    def new_state(self, X: Tensor, group: Group) -> State:
        return {}

    def move(self, X, G, state, lr, group, norm, scratch) -> None:
        penalize(X, group["penalty"])
        self.free_rule.step([Part(X, G, state)], without_decay(group, lr), norm is None)


class RegularizedAdam(StiefelOptimizer):
    """`torch.optim.Adam` with a penalty on the constrained blocks.

    Args:
        penalty: λ, the step on the penalty.
        The others: as in `StiefelAdam`.
    """

    free_rule = ADAM
    rules = RULES
    exact = False
    starts_on_manifold = False

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
        capturable: bool | None = None,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, hyper_parameters(locals()))

    def new_state(self, X: Tensor, group: Group) -> State:
        zeros = torch.zeros_like(X, memory_format=torch.contiguous_format)
        return {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def move(self, X, G, state, lr, group, norm, scratch) -> None:
        penalize(X, group["penalty"])
        # torch adds one itself; blocks of one batch are stepped together
        count = state["step"].flatten()[0] - 1
        moments = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"], "step": count}
        self.free_rule.step([Part(X, G, moments)], without_decay(group, lr), norm is None)
