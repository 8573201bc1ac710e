"""Stiefel Muon: steps of equal length in every direction, on the manifold.

Muon (Jordan et al., 2024) replaces the momentum of a weight by the nearest matrix with equal singular values, msign.  Here
constrained blocks move by the same idea: the momentum M is projected to the tangent space at X, and

    D = M − sym(M Xᵀ) X ;   X ← polar(X − η msign(D))

with the polar factor to working precision, from a start on the manifold.  Free weights of two dimensions move by Muon as
`torch.optim.Muon` has it, everything else by `torch.optim.AdamW`.

msign is a quintic Newton–Schulz iteration in float32.  Five iterations send singular values above 1e-3 of the norm to
between 0.68 and 1.14 instead of 1, which Muon's users found to be enough; the manifold does not depend on it.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from ortho_vit.optim.base import BlockRule, Group, Params, StiefelOptimizer, is_count
from ortho_vit.optim.free import ADAMW, AdamRule, Checks, FreeRule, Part, State
from ortho_vit.optim.momentum import deviation, retract
from ortho_vit.stiefel import frobenius, sym

QUINTIC = (3.4445, -4.7750, 2.0315)
LONGEST = 0.25  # a step of X; beyond it X − η msign(D) may come near to losing rank


def msign(D: Tensor, steps: int) -> Tensor:
    """P Qᵀ for D = P S Qᵀ (…, m, n), m ≤ n, with singular values near 1 as the top of this file says; 0 for D = 0."""
    a, b, c = QUINTIC
    Y = D / frobenius(D).clamp(min=1e-30)
    for _ in range(steps):
        A = Y @ Y.mT
        Y = a * Y + (b * A + c * A @ A) @ Y
    return Y


class MuonRule(FreeRule):
    """Muon for tensors of two dimensions in groups with `muon`, AdamW for the others."""

    checks: ClassVar[Checks] = AdamRule.checks | {
        "momentum": (lambda x, _: 0 <= x < 1, "must be in [0, 1)"),
        "ns_steps": (lambda k, _: is_count(k), "must be at least 1"),
        "adjust_lr_fn": (
            lambda f, _: f in ("original", "match_rms_adamw"),
            "must be 'original' or 'match_rms_adamw'",
        ),
    }

    def is_muon(self, part: Part, group: Group) -> bool:
        return group["muon"] and part.tensor.ndim == 2

    def init(self, part: Part, group: Group, capturable: bool) -> None:
        if not self.is_muon(part, group):
            ADAMW.init(part, group, capturable)

    def step(self, parts: list[Part], group: Group, capturable: bool) -> None:
        if others := [part for part in parts if not self.is_muon(part, group)]:
            ADAMW.step(others, group, capturable)
        for part in parts:
            if self.is_muon(part, group):
                self._step_matrix(part, group)

    def _step_matrix(self, part: Part, group: Group) -> None:
        key, momentum = part.prefix + "momentum_buffer", group["momentum"]
        grad = -part.grad if group["maximize"] else part.grad
        if key not in part.state:
            part.state[key] = torch.zeros_like(part.tensor)
        buffer = part.state[key].lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum)  # Nesterov's
        tall = update.shape[0] > update.shape[1]
        O = msign(update.T if tall else update, group["ns_steps"])
        lr, (rows, columns) = group["lr"], part.tensor.shape
        matched = group["adjust_lr_fn"] == "match_rms_adamw"
        ratio = 0.2 * max(rows, columns) ** 0.5 if matched else max(1.0, rows / columns) ** 0.5
        part.tensor.mul_(1 - lr * group["weight_decay"]).sub_((O.T if tall else O) * (lr * ratio))


class SpectralRule(BlockRule):
    """Steps of equal length in every direction, retracted."""

    def new_state(self, X: Tensor) -> State:
        return {"M": torch.zeros_like(X, memory_format=torch.contiguous_format)}

    def move(self, X, G, state, lr, group, norm, scratch) -> None:
        M = state["M"].mul_(group["momentum"]).add_(G)
        D = M - torch.bmm(sym(torch.bmm(M, X.mT)), X)
        # rounding alone, which msign would make as long as any step
        D = D * (frobenius(D) > 16 * torch.finfo(D.dtype).eps * frobenius(M))
        length = lr.clamp(max=LONGEST) if isinstance(lr, Tensor) else min(lr, LONGEST)
        Y, host = X - msign(D, group["ns_steps"]) * length, norm is not None
        retract(X, Y, *deviation(Y), host)
        # msign(D) is not quite tangent, so Y Yᵀ may be below I, where the first retraction is coarse
        Y = X.clone()
        retract(X, Y, *deviation(Y), host)


class StiefelMuon(StiefelOptimizer):
    """Muon on the Stiefel manifold for constrained blocks, Muon for free matrices, AdamW for the rest.

    Embeddings and the classifier's head are usually left to AdamW: put them into a group with `"muon": False`.

    Args:
        momentum: of blocks (as SGD's) and of free matrices (as Muon's, with Nesterov's correction).
        betas, eps: of AdamW.
        stiefel_lr: the angle, in radians, by which a step turns a block; None: `lr`.  At most 0.25.
        muon: whether free matrices move by Muon.
        ns_steps: Newton–Schulz iterations of msign.
        adjust_lr_fn: how `lr` follows the shape of a free matrix, as in `torch.optim.Muon`; "match_rms_adamw" makes one
            rate serve AdamW's parameters too.
        The others: as in `StiefelSGD`.
    """

    free_rule = MuonRule()
    block_rule = SpectralRule()

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        stiefel_lr: float | None = None,
        muon: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
        foreach: bool | None = None,
        capturable: bool | None = None,
        shard_stiefel: bool | int = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, locals())
