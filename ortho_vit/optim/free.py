"""How free parameters move: torch's own SGD, Adam and AdamW, called as functions and so equal to torch to the bit.

`capturable` means what it means in torch: the step reads nothing back from the device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

Group = dict[str, Any]
State = dict[str, Any]
# Name of an option, what must hold, the rule in words
Require = Callable[[str, Callable[[Any], bool], str], None]


class Part(NamedTuple):
    """A tensor that moves freely, with its gradient and its state; `prefix` stands before the names in the state."""

    tensor: Tensor
    grad: Tensor
    state: State
    prefix: str = ""


class FreeRule(Protocol):
    def check(self, require: Require, group: Group) -> None:
        """Raise ValueError for a hyper-parameter out of range."""

    def init(self, part: Part, capturable: bool) -> None:
        """Create what the state lacks."""

    def step(self, parts: list[Part], group: Group, capturable: bool) -> None:
        """Move the parts in place."""


class SGDRule:
    """`torch.optim.SGD`."""

    def check(self, require: Require, group: Group) -> None:
        require("momentum", lambda x: 0 <= x < 1, "must be in [0, 1)")
        require("dampening", lambda x: 0 <= x < 1, "must be in [0, 1)")

    def init(self, part: Part, capturable: bool) -> None:
        """Nothing: torch's first step makes the buffer, from the gradient itself."""

    def step(self, parts: list[Part], group: Group, capturable: bool) -> None:
        tensors, grads = [part.tensor for part in parts], [part.grad for part in parts]
        buffers = [part.state.get(part.prefix + "momentum_buffer") for part in parts]
        options = {key: group[key] for key in ("lr", "weight_decay", "momentum", "dampening", "maximize")}
        if capturable and isinstance(group["lr"], Tensor):
            _sgd_by_tensor(tensors, grads, buffers, **options)
        else:
            foreach = group["foreach"]
            sgd(tensors, grads, buffers, has_sparse_grad=False, foreach=foreach, nesterov=False, **options)
        if group["momentum"] != 0:
            for part, buffer in zip(parts, buffers, strict=True):
                part.state[part.prefix + "momentum_buffer"] = buffer


def _sgd_by_tensor(
    tensors: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor | None],
    *,
    lr: Tensor,
    weight_decay: float,
    momentum: float,
    dampening: float,
    maximize: bool,
) -> None:
    """torch's SGD for a learning rate on the device, which torch itself would read back."""
    moves = list(torch._foreach_neg(grads)) if maximize else list(grads)
    if weight_decay != 0:
        moves = list(torch._foreach_add(moves, tensors, alpha=weight_decay))
    if momentum != 0:
        old = [(buffer, move) for buffer, move in zip(buffers, moves, strict=True) if buffer is not None]
        if old:
            torch._foreach_mul_([buffer for buffer, _ in old], momentum)
            torch._foreach_add_([buffer for buffer, _ in old], [move for _, move in old], alpha=1 - dampening)
        for i, buffer in enumerate(buffers):
            buffers[i] = moves[i].detach().clone() if buffer is None else buffer
        moves = [buffer for buffer in buffers if buffer is not None]
    torch._foreach_sub_(tensors, torch._foreach_mul(moves, lr))


@dataclass(frozen=True)
class AdamRule:
    """`torch.optim.Adam`, or with `decoupled` weight decay `torch.optim.AdamW`."""

    decoupled: bool

    def check(self, require: Require, group: Group) -> None:
        require(
            "betas",
            lambda b: len(b) == 2 and all(0 <= x < 1 for x in b),
            "must be two numbers in [0, 1)",
        )
        require("eps", lambda x: 0 < x < math.inf, "must be finite and > 0")
        if group["foreach"] and not group["capturable"]:
            require("lr", lambda lr: not isinstance(lr, Tensor), "must be a number under foreach")

    def init(self, part: Part, capturable: bool) -> None:
        count = part.state.get(part.prefix + "step")
        if count is not None and count.is_cpu == capturable and part.tensor.device.type != "cpu":  # loaded
            part.state[part.prefix + "step"] = count.to(part.tensor.device if capturable else "cpu")
        if part.prefix + "exp_avg" not in part.state:
            part.state[part.prefix + "step"] = new_count(part.tensor, capturable)
            for key in ("exp_avg", "exp_avg_sq"):
                part.state[part.prefix + key] = torch.zeros_like(
                    part.tensor, memory_format=torch.preserve_format
                )

    def step(self, parts: list[Part], group: Group, capturable: bool) -> None:
        def states(key: str) -> list[Tensor]:
            return [part.state[part.prefix + key] for part in parts]

        options = {key: group[key] for key in ("lr", "weight_decay", "eps", "maximize")}
        options |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
        tensors, grads = [part.tensor for part in parts], [part.grad for part in parts]
        moments = states("exp_avg"), states("exp_avg_sq")
        refused = tensors[0].device.type in ("cpu", "meta") and not torch.compiler.is_compiling()
        if capturable and refused:
            _adam_by_tensors(tensors, grads, *moments, states("step"), **options, decoupled=self.decoupled)
            return
        adam(
            tensors,
            grads,
            *moments,
            [],
            states("step"),
            foreach=group["foreach"],
            capturable=capturable,
            amsgrad=False,
            decoupled_weight_decay=self.decoupled,
            **options,
        )


def _adam_by_tensors(
    tensors: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    decoupled: bool,
) -> None:
    """torch's capturable Adam where torch refuses to be `capturable`, on a CPU: there it shows that nothing is read."""
    torch._foreach_add_(steps, 1)
    moves = list(torch._foreach_neg(grads)) if maximize else list(grads)
    if weight_decay != 0 and decoupled:
        torch._foreach_mul_(tensors, 1 - lr * weight_decay)
    elif weight_decay != 0:
        moves = list(torch._foreach_add(moves, tensors, alpha=weight_decay))
    torch._foreach_lerp_(first, moves, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, moves, moves, 1 - beta2)
    c1, c2 = (list(torch._foreach_pow(beta, steps)) for beta in (beta1, beta2))
    torch._foreach_sub_(c1, 1)  # −(1 − β₁ᵗ)
    torch._foreach_div_(c1, lr)
    torch._foreach_sub_(c2, 1)
    torch._foreach_neg_(c2)
    torch._foreach_sqrt_(c2)
    scale = list(torch._foreach_sqrt(second))
    torch._foreach_div_(scale, c2)
    torch._foreach_add_(scale, eps)
    torch._foreach_mul_(scale, c1)
    torch._foreach_addcdiv_(tensors, first, scale)


def new_count(tensor: Tensor, capturable: bool) -> Tensor:
    """A counter of steps, as torch keeps it: on the device if the step is `capturable`, otherwise on the host."""
    device = tensor.device if capturable else "cpu"
    return torch.zeros((), dtype=torch.float32, device=device)


SGD: FreeRule = SGDRule()
ADAM: FreeRule = AdamRule(decoupled=False)
ADAMW: FreeRule = AdamRule(decoupled=True)
