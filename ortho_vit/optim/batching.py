"""Parameters of one shape as one batch of blocks: gather, step, scatter.

A parameter that is stepped alone is not copied: its blocks are a view of it.  Several are gathered into one batch
X (B, m, n), so that a step takes the same number of kernels whatever their number, and scattered afterwards.  Their states
are not copied from step to step: the tensors in them are made consecutive pieces of one tensor, once, and are
recognised as such from then on.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ortho_vit.optim.free import Part, State
from ortho_vit.parameter import StiefelParameter, cut_blocks, cut_free

Move = Callable[[Tensor, Tensor, State, Tensor | None], None]  # X, G, state, memory to work in


compiling = torch.compiler.is_compiling


def as_rows(X: Tensor) -> Tensor:
    """Blocks as rows: those stored as columns, transposed.  Square ones are read as columns, as the paper does."""
    return X if X.shape[-2] < X.shape[-1] else X.mT


def block_keys(state: State) -> list[str]:
    """The names of the tensors with one entry per block."""
    return [k for k in state if k not in ("step", "master") and not k.startswith("free_")]


@dataclass
class Batch:
    """One parameter, or several of one shape and layout.

    `blocks` and `free` are views of the parameters (or of their float32 masters): (b, r, c), and the free rows if there
    are any.  `grads` is the gradient of the one parameter, or those of all, stacked.
    """

    parameters: list[StiefelParameter]
    layout: tuple[int, int]  # blocks and constrained rows of each
    blocks: list[Tensor]
    free: list[Tensor]
    grads: Tensor
    states: list[State]

    @property
    def alone(self) -> bool:
        return len(self.parameters) == 1

    def free_parts(self) -> list[Part]:
        """The free rows of each parameter."""
        rows = cut_free(self.grads, self.layout[1])
        if rows is None:
            return []
        grads = [rows] if self.alone else rows.unbind()
        return [Part(t, g, s, "free_") for t, g, s in zip(self.free, grads, self.states, strict=True)]

    def step(self, move: Move, start: int, stop: int) -> None:
        """Move the blocks from start to stop, all of them or a rank's share; releases the gradients."""
        G = cut_blocks(self.grads, *self.layout)
        del self.grads
        X = self.blocks[0] if self.alone else torch.cat(self.blocks)
        state = self.states[0] if self.alone else self._joined_state()
        if stop - start < len(X):
            cut = {k: v[start:stop] if isinstance(v, Tensor) and v.ndim else v for k, v in state.items()}
            move(as_rows(X[start:stop]), as_rows(G[start:stop]), cut, None)
        else:
            move(as_rows(X), as_rows(G), state, None if self.alone else as_rows(G))
        if not self.alone:
            torch._foreach_copy_(self.blocks, X.chunk(len(self.blocks)))
            self._scatter_state(state)

    def _joined_state(self) -> State:
        """The states as one; a counter for each block, as those of the parameters may differ."""
        steps = torch.stack([state["step"] for state in self.states]).to(self.blocks[0].device)
        state = {"step": steps[:, None].expand(-1, len(self.blocks[0])).reshape(-1, 1, 1)}
        return state | {key: joined(self.states, key) for key in block_keys(self.states[0])}

    def _scatter_state(self, state: State) -> None:
        """Give the parameters what a step has added and, compiled, what it has changed."""
        for key in block_keys(state):
            pieces = state[key].chunk(len(self.states)) if key not in self.states[0] or compiling() else ()
            for own, piece in zip(self.states, pieces, strict=False):
                if key in own:
                    own[key].copy_(piece)
                else:
                    own[key] = piece


def joined(states: list[State], key: str) -> Tensor:
    """The tensors `key` of several states as one, of which they become pieces."""
    pieces = [state[key] for state in states]
    if compiling():
        return torch.cat(pieces)
    whole = pieces[0]._base
    if whole is not None and _are_pieces(pieces, whole):
        return whole
    whole = torch.cat(pieces)
    for state, piece in zip(states, whole.chunk(len(states)), strict=True):
        state[key] = piece
    return whole


def _are_pieces(pieces: list[Tensor], whole: Tensor) -> bool:
    """Whether the pieces, in this order, make up the whole of a contiguous tensor."""
    size = pieces[0].numel()
    return (
        whole.is_contiguous()
        and whole.shape[1:] == pieces[0].shape[1:]
        and whole.numel() == size * len(pieces)
        and all(
            piece._base is whole and piece.stride() == whole.stride() and piece.storage_offset() == i * size
            for i, piece in enumerate(pieces)
        )
    )
