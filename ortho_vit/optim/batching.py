"""Parameters that are alike, stepped as one batch of blocks; alone, a parameter is stepped where it lies.

The states of a stack are kept joined: each tensor in a member's state is a view of one batch, so that nothing is gathered
or scattered from step to step.  Weights and gradients belong to the model and are copied in, and weights out again: free
rows first, then the blocks, with the gradient's copy as the memory to work in.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ortho_vit.parameter import StiefelParameter, cut_blocks

State = dict[str, Any]


@dataclass
class Part:
    """Something a step updates in place: a tensor, its gradient, and its state."""

    tensor: Tensor
    grad: Tensor
    state: State


def wide(X: Tensor) -> Tensor:
    """Blocks as rows: those stored as columns, transposed.  Square ones are read as columns, as the paper does."""
    return X if X.shape[-2] < X.shape[-1] else X.mT


def blocks_of(p: StiefelParameter, x: Tensor) -> Tensor:
    """The blocks (B, r, c) of a tensor laid out like p: a view, if x is p's own or a master of it."""
    return cut_blocks(x, p.blocks, p.rows).flatten(0, -3)


class Stack:
    """One parameter, or several of one shape.  For each step: `hold`, `free_parts`, `open`, `close`."""

    def __init__(self, parameters: list[StiefelParameter], parts: list[Part]) -> None:
        self.parameters, self.parts = parameters, parts
        self.alone = len(parts) == 1
        p = parameters[0]
        self.blocks = [blocks_of(p, part.tensor.detach()) for part in parts]
        self.free_rows = (
            [free_rows(p, part.tensor.detach()) for part in parts] if p.rows < p.shape[-2] else []
        )
        self.layout = self._layout(parts)
        states = [part.state for part in parts]
        members = len(parts)  # and not `parts` in the lambda, which would keep the gradients
        self.state = Joined(states, torch.cat, lambda x: x.chunk(members))
        self.free_state = Joined([s["free"] for s in states], torch.stack, torch.unbind)
        self.grads: Tensor | None = None

    def hold(self, parts: list[Part]) -> bool:
        """Take the gradients of another step; False if tensors, blocks or states are no longer those that were stacked."""
        self.parts = parts
        return (
            self.layout == self._layout(parts)
            and self.state.is_bound_to([part.state for part in parts])
            and self.free_state.is_bound_to([part.state["free"] for part in parts])
        )

    def _layout(self, parts: list[Part]) -> list[tuple[int, int, int]]:
        """Where the parameters lie, and how they are cut."""
        return [
            (part.tensor.data_ptr(), p.blocks, p.rows) for p, part in zip(self.parameters, parts, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.blocks) * len(self.blocks[0])

    # ------------------------------------------------------------------------------------------------ free rows

    def free_parts(self) -> list[Part]:
        """The free rows as one part, if there are any."""
        grads = [part.grad for part in self.parts]
        dtype = self.parts[0].tensor.dtype
        self.grads = (grads[0] if self.alone else torch.stack(grads)).to(dtype)
        self.parts = []  # `zero_grad` is to free the gradients
        if not self.free_rows:
            return []
        tensor = self.free_rows[0] if self.alone else torch.stack(self.free_rows)
        return [Part(tensor, free_rows(self.parameters[0], self.grads), self.free_state.values)]

    def put_free(self, part: Part) -> None:
        """Copy free rows that were stacked to where they came from."""
        if not self.alone:
            torch._foreach_copy_(self.free_rows, part.tensor.unbind())
        self.free_state.spread()

    # --------------------------------------------------------------------------------------------------- blocks

    def open(self, start: int, stop: int) -> tuple[Tensor, Tensor, State]:
        """Blocks from start to stop as (X, G, state): X to be moved in place; G is a copy unless the stack is `alone`."""
        each = len(self.blocks[0])
        self.first, self.last = start // each, -(-stop // each)
        G = self._gradient()  # first, so that what was stacked is gone when X comes
        self.X = self.blocks[0] if self.alone else torch.cat(self.blocks[self.first : self.last])
        if stop - start == len(self):
            return wide(self.X), wide(G), self.state.values
        mine = slice(start - self.first * each, stop - self.first * each)
        state = {k: v[start:stop] if isinstance(v, Tensor) else v for k, v in self.state.values.items()}
        return wide(self.X[mine]), wide(G[mine]), state

    def _gradient(self) -> Tensor:
        """Of the members from `first` to `last`, as blocks."""
        p, grads, self.grads = self.parameters[0], self.grads, None
        assert grads is not None
        grads = grads if self.alone else grads[self.first : self.last]
        return cut_blocks(grads, p.blocks, p.rows).reshape(-1, *self.blocks[0].shape[1:])

    def close(self) -> None:
        """Copy blocks that were stacked to where they came from."""
        if not self.alone:
            blocks = self.blocks[self.first : self.last]
            torch._foreach_copy_(blocks, self.X.chunk(len(blocks)))
        self.state.spread()
        del self.X


class Joined:
    """The states of several members as one, `values`; their tensors become views of its tensors.

    Tensors without dimensions, which count steps, stay each member's own and are copied.
    """

    def __init__(
        self,
        states: list[State],
        join: Callable[[list[Tensor]], Tensor],
        cut: Callable[[Tensor], Iterable[Tensor]],
    ) -> None:
        self.states, self.cut = states, cut
        self.views: list[State] = [{} for _ in states]
        if len(states) == 1:
            self.values = states[0]
            return
        self.values = {}
        for key, value in states[0].items():
            if isinstance(value, Tensor) and key != "master":
                self.values[key] = join([s[key] for s in states]) if value.ndim else value.clone()
            elif key not in ("free", "master"):
                self.values[key] = value
        self.spread(overwrite=True)

    def is_bound_to(self, states: list[State]) -> bool:
        """Whether the members' states are still the views that were made; if so, counters are taken over."""
        if len(states) == 1:
            return states[0] is self.values
        if not all(
            s.get(key) is view
            for s, views in zip(states, self.views, strict=True)
            for key, view in views.items()
        ):
            return False
        self.values.update({k: v for k, v in states[0].items() if isinstance(v, int)})
        return True

    def spread(self, overwrite: bool = False) -> None:
        """Give the members their views of what a step has added, and the values of what has no dimension."""
        if len(self.states) == 1:
            return
        for key, value in self.values.items():
            if not isinstance(value, Tensor):
                continue
            if value.ndim == 0:
                for s in self.states:
                    s[key] = s[key] if key in s else torch.empty_like(value)
                torch._foreach_copy_([s[key] for s in self.states], [value] * len(self.states))
            elif overwrite or key not in self.views[0]:
                for s, views, piece in zip(self.states, self.views, self.cut(value), strict=True):
                    s[key] = views[key] = piece


def free_rows(p: StiefelParameter, x: Tensor) -> Tensor:
    return x.narrow(-2, p.rows, x.shape[-2] - p.rows)
