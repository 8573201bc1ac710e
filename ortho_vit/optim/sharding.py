"""Each process of a data-parallel run steps its share of the constrained blocks, and all exchange what they have computed.

Gradients are equal on all ranks, so any of them can step any block.  A rank steps a contiguous share of all blocks, cut so
that every rank has the same cost up to one block; one all-gather then gives everyone everything.  A block is stepped by
the operations that would have stepped it otherwise, so the result is the same to the bit, and replicas stay equal.
"""

from bisect import bisect_left
from functools import cache
from itertools import accumulate, chain, repeat
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ortho_vit.optim.batching import Stack, blocks_of
from ortho_vit.parameter import StiefelParameter


class Team(NamedTuple):
    """The ranks that share their blocks, and which of them this process is."""

    rank: int
    ranks: int
    group: Any = None  # None: all of the run


def team_of(size: bool | int) -> Team:
    """All ranks (True), or groups of so many consecutive ones.  A collective call."""
    if not (size and dist.is_available() and dist.is_initialized()):
        return Team(0, 1)
    if size is True:
        return Team(dist.get_rank(), dist.get_world_size())
    if dist.get_world_size() % size:
        raise ValueError(
            f"shard_stiefel must divide the number of ranks, {dist.get_world_size()}, got {size}"
        )
    return Team(dist.get_rank() % size, size, dist.new_subgroups(size)[0])


@cache
def deal(batches: tuple[tuple[int, float], ...], ranks: int) -> list[list[int]]:
    """For each batch (number of blocks, cost of one) where each rank's share of it starts, and where the last one's ends."""
    costs = list(chain.from_iterable(repeat(cost, count) for count, cost in batches))
    ends = list(accumulate(costs))
    owners = [
        min(int(ranks * (end - cost / 2) / ends[-1]), ranks - 1)
        for end, cost in zip(ends, costs, strict=True)
    ]
    bounds, first = [], 0
    for count, _ in batches:
        own = owners[first : first + count]
        bounds.append([bisect_left(own, rank) for rank in range(ranks + 1)])
        first += count
    return bounds


def exchange(tensors: list[Tensor], bounds: list[list[int]], team: Team) -> Tensor:
    """Give every rank the blocks of all: tensors (B, ...) of one kind, of which a rank's own blocks lie within its bounds.

    Returns what was exchanged, a row a rank.
    """
    rank, ranks, group = team
    shares = [
        [(t, b[r], b[r + 1]) for t, b in zip(tensors, bounds, strict=True) if b[r] < b[r + 1]]
        for r in range(ranks)
    ]
    sizes = [sum((stop - start) * t[0].numel() for t, start, stop in share) for share in shares]
    rows = tensors[0].new_zeros(ranks, max(sizes))
    if sizes[rank]:
        rows[rank, : sizes[rank]] = torch.cat([t[start:stop].reshape(-1) for t, start, stop in shares[rank]])
    dist.all_gather(list(rows.unbind()), rows[rank].clone(), group)
    for r, share in enumerate(shares):
        if share and r != rank:
            pieces = rows[r, : sizes[r]].split([(stop - start) * t[0].numel() for t, start, stop in share])
            for (t, start, stop), piece in zip(share, pieces, strict=True):
                t[start:stop] = piece.view(t[start:stop].shape)
    return rows


class Sharded(Optimizer):
    """What an optimizer needs to share its blocks among ranks, in parameter groups with `shard_stiefel`."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_stale": self._stale}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._bounds: dict[StiefelParameter, list[int]] = {}  # where each rank's share of the blocks starts
        self._stale = False  # whether other ranks have state that this one has not
        self._team: Team | None = None
        if state:
            super().__setstate__(state)

    def deal_blocks(self) -> None:
        """Decide which blocks are stepped here; without `shard_stiefel`, or in a single process, that is all of them.

        The deal depends on the parameters alone, so that state stays with the rank that has it.
        """
        groups = [group for group in self.param_groups if group.get("shard_stiefel")]
        sharded = [p for group in groups for p in group["params"] if isinstance(p, StiefelParameter)]
        bounds: dict[StiefelParameter, list[int]] = {}
        if sharded and self._team is None:
            self._team = team_of(groups[0]["shard_stiefel"])
        if sharded and self.team.ranks > 1:
            shapes = [p.matrices().shape for p in sharded]
            batches = tuple((B, float(min(r, c) ** 2 * max(r, c))) for B, r, c in shapes)
            bounds = dict(zip(sharded, deal(batches, self.team.ranks), strict=True))
        if self._stale and bounds != self._bounds:  # cut anew, added or removed: blocks change hands
            self.consolidate_state_dict()
        self._bounds = bounds

    @property
    def team(self) -> Team:
        return self._team or Team(0, 1)

    def is_shared(self, stack: Stack) -> bool:
        return stack.parameters[0] in self._bounds

    def share_of(self, stack: Stack) -> tuple[int, int]:
        """The blocks of a stack that are stepped here, from one index to another."""
        if not self.is_shared(stack):
            return 0, len(stack)
        rank, each = self.team.rank, len(stack) // len(stack.parameters)
        own = [self._bounds[p][rank : rank + 2] for p in stack.parameters]
        ranges = [(i * each + start, i * each + stop) for i, (start, stop) in enumerate(own) if start < stop]
        return (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)

    def own_blocks(self, p: StiefelParameter) -> slice:
        """Those of a parameter's blocks whose state is here."""
        return (
            slice(*self._bounds[p][self.team.rank : self.team.rank + 2]) if p in self._bounds else slice(None)
        )

    def exchange_blocks(self) -> StiefelParameter | None:
        """Blocks stepped here to the other ranks, and theirs to here.  Returns a parameter some rank has spoilt."""
        alike: dict[Any, list[StiefelParameter]] = {}
        for p in self._bounds:
            if p.grad is not None:
                alike.setdefault((p.dtype, p.device), []).append(p)
        for parameters in alike.values():
            self._stale = True
            rows = exchange(
                [p.matrices() for p in parameters], [self._bounds[p] for p in parameters], self.team
            )
            if not rows.isfinite().all():
                return next(p for p in parameters if not p.isfinite().all())
        return None

    @torch.no_grad()
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Exchange the state of shared blocks, on every rank, so that `state_dict` is whole.  Lightning calls this."""
        alike: dict[Any, list[tuple[Tensor, list[int]]]] = {}
        for p, bounds in self._bounds.items():
            for key, x in self.state[p].items():
                if isinstance(x, Tensor):
                    x = blocks_of(p, x) if key == "master" else x
                    if len(x) != bounds[-1]:  # cut anew since
                        continue
                    alike.setdefault((key, x.dtype, x.device), []).append((x, bounds))
        for pairs in alike.values():
            exchange([x for x, _ in pairs], [bounds for _, bounds in pairs], self.team)
        self._stale = False

    def state_dict(self) -> dict[str, Any]:
        """As torch's.  Under `shard_stiefel` every rank calls `consolidate_state_dict` first."""
        if self._stale:
            raise RuntimeError(
                f"{type(self).__name__}: each rank has the state of its own share only; call "
                "consolidate_state_dict() on every rank before state_dict()"
            )
        return super().state_dict()
