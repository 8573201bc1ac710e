"""SGD and Adam with orthogonality as a penalty (Cisse et al., 2017): a baseline of the paper.

Before each step the blocks take one gradient step on λ/4 ‖XXᵀ − I‖²:  X ← (1 + λ) X − λ XXᵀX.  Then everything moves by
torch's own SGD or Adam.  Nothing stays on the manifold.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor

from ortho_vit.optim.base import BlockRule, Params, State, StiefelOptimizer
from ortho_vit.optim.free import ADAM, SGD, AdamRule, Checks, FreeRule, Part


class Penalized(BlockRule):
    """Torch's rule for free parameters on the blocks as well, after the penalty."""

    checks: ClassVar[Checks] = {"penalty": (lambda x, _: 0 <= x < math.inf, "must be finite and >= 0")}
    exact = False
    starts_on_manifold = False
    stacks = False  # torch's rule has one counter for each tensor

    def __init__(self, rule: FreeRule) -> None:
        self.rule = rule

    def new_state(self, X: Tensor) -> State:
        keys = ("exp_avg", "exp_avg_sq") if isinstance(self.rule, AdamRule) else ()
        return {key: torch.zeros_like(X, memory_format=torch.contiguous_format) for key in keys}

    def move(self, X, G, state, lr, group, norm, scratch) -> None:
        penalty = group["penalty"]
        X.copy_(torch.baddbmm(X, X @ X.mT, X, beta=1 + penalty, alpha=-penalty))
        # torch counts the step itself.  `maximize` is done already.
        own = state | {"step": state["step"] - 1}
        options = group | {"lr": lr, "weight_decay": 0, "maximize": False}
        self.rule.step([Part(X, G, own)], options, norm is None)
        state |= {key: own[key] for key in own.keys() - {"step"}}


class RegularizedSGD(StiefelOptimizer):
    """`torch.optim.SGD` with a penalty on the constrained blocks.

    Args:
        penalty: λ, the step on the penalty.
        The others: as in `StiefelSGD`.
    """

    free_rule = SGD
    block_rule = Penalized(SGD)

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
        super().__init__(params, locals())


class RegularizedAdam(StiefelOptimizer):
    """`torch.optim.Adam` with a penalty on the constrained blocks.

    Args:
        penalty: λ, the step on the penalty.
        The others: as in `StiefelAdam`.
    """

    free_rule = ADAM
    block_rule = Penalized(ADAM)

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
        super().__init__(params, locals())
