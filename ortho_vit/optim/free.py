"""How free parameters move: torch's own SGD, Adam and AdamW, called as functions and so equal to torch to the bit.

`capturable` means what it means in torch: the step reads nothing back from the device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import adam as torch_adam
from torch.optim.sgd import sgd

Group = dict[str, Any]
State = dict[str, Any]
# For each hyper-parameter: a test of its value within a parameter group, and the rule in words
Checks = dict[str, tuple[Callable[[Any, Group], bool], str]]


class Part(NamedTuple):
    """A tensor that moves freely, with its gradient and its state; `prefix` stands before the names in the state."""

    tensor: Tensor
    grad: Tensor
    state: State
    prefix: str = ""


class FreeRule:
    """How free tensors move."""

    checks: ClassVar[Checks] = {}

    def init(self, part: Part, group: Group, capturable: bool) -> None:
        """Create what the state must have before `step`."""

    def step(self, parts: list[Part], group: Group, capturable: bool) -> None:
        """Move the parts in place."""
        raise NotImplementedError


class SGDRule(FreeRule):
    """`torch.optim.SGD`."""

    checks: ClassVar[Checks] = {
        "momentum": (lambda x, _: 0 <= x < 1, "must be in [0, 1)"),
        "dampening": (lambda x, _: 0 <= x < 1, "must be in [0, 1)"),
    }

    def step(self, parts: list[Part], group: Group, capturable: bool) -> None:
        tensors, grads = [part.tensor for part in parts], [part.grad for part in parts]
        lr, momentum = group["lr"], group["momentum"]
        key = "momentum_buffer"
        buffers: list[Any] = [part.state.get(part.prefix + key) if momentum else None for part in parts]
        options = {name: group[name] for name in ("weight_decay", "dampening", "maximize", "foreach")}
        options |= {"nesterov": False, "has_sparse_grad": False}
        if capturable and isinstance(lr, Tensor):
            # torch would read the rate.  With a rate of 0 it only leaves the direction of the step in the buffers.
            sgd(tensors, grads, buffers, lr=0.0, momentum=momentum or 1.0, **options)
            torch._foreach_sub_(tensors, list(torch._foreach_mul(buffers, lr)))
        else:
            sgd(tensors, grads, buffers, lr=lr, momentum=momentum, **options)
        if momentum != 0:
            for part, buffer in zip(parts, buffers, strict=True):
                part.state[part.prefix + key] = buffer


@dataclass(frozen=True)
class AdamRule(FreeRule):
    """`torch.optim.Adam`, or with `decoupled` weight decay `torch.optim.AdamW`."""

    decoupled: bool

    checks: ClassVar[Checks] = {
        "betas": (
            lambda betas, _: len(betas) == 2 and all(0 <= x < 1 for x in betas),
            "must be two numbers in [0, 1)",
        ),
        "eps": (lambda x, _: 0 < x < math.inf, "must be finite and > 0"),
        "lr": (
            lambda lr, group: (
                0 <= lr < math.inf
                and (group["capturable"] or not (group["foreach"] and isinstance(lr, Tensor)))
            ),
            "must be finite and >= 0, and a number under foreach without capturable",
        ),
    }

    def init(self, part: Part, group: Group, capturable: bool) -> None:
        state, prefix, device = part.state, part.prefix, part.tensor.device
        if prefix + "exp_avg" not in state:
            state[prefix + "step"] = new_count(part.tensor, capturable)
            for key in ("exp_avg", "exp_avg_sq"):
                state[prefix + key] = torch.zeros_like(part.tensor, memory_format=torch.preserve_format)
        elif state[prefix + "step"].is_cpu == capturable:  # it was loaded, and perhaps made for the other way
            state[prefix + "step"] = state[prefix + "step"].to(device if capturable else "cpu")

    def step(self, parts: list[Part], group: Group, capturable: bool) -> None:
        def states(key: str) -> list[Tensor]:
            return [part.state[part.prefix + key] for part in parts]

        # Where torch cannot capture, as on a CPU, it reads its counters and the learning rate.
        capturable = capturable and (
            torch.compiler.is_compiling()
            or parts[0].tensor.device.type in torch_adam._get_capturable_supported_devices()
        )
        counters = states("step")
        if counters[0].is_meta and not capturable:  # there is nothing to read, and nothing is computed
            counters = [torch.zeros(()) for _ in counters]
        torch_adam.adam(
            [part.tensor for part in parts],
            [part.grad for part in parts],
            states("exp_avg"),
            states("exp_avg_sq"),
            [],
            counters,
            foreach=group["foreach"] if capturable or not isinstance(group["lr"], Tensor) else False,
            capturable=capturable,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            amsgrad=False,
            decoupled_weight_decay=self.decoupled,
            **{key: group[key] for key in ("lr", "weight_decay", "eps", "maximize")},
        )


def new_count(tensor: Tensor, capturable: bool) -> Tensor:
    """A counter of steps, as torch keeps it: on the device if the step is `capturable`, otherwise on the host."""
    return torch.zeros((), dtype=torch.float32, device=tensor.device if capturable else "cpu")


SGD, ADAM, ADAMW = SGDRule(), AdamRule(decoupled=False), AdamRule(decoupled=True)
