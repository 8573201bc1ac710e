"""Each process of a data-parallel run steps its share of the constrained blocks, and all exchange what they computed.

Gradients are equal on all ranks, so any rank can step any block.  A rank steps a contiguous share of all blocks, cut so
that every rank has the same cost up to one block; one all-gather then copies every block to all ranks.  A block is stepped
by the same operations as without sharding, so the result is the same to the bit, and replicas stay equal.
"""

from bisect import bisect_left
from functools import cache
from itertools import accumulate, chain, repeat
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ortho_vit.parameter import StiefelParameter, cut_blocks


class Team(NamedTuple):
    """The ranks that share their blocks, and which of them this process is."""

    rank: int = 0
    ranks: int = 1
    group: Any = None  # None: all ranks of the run


def team_of(size: bool | int) -> Team:
    """All ranks (True), or groups of `size` consecutive ones.  A collective call."""
    if not (size and dist.is_available() and dist.is_initialized()):
        return Team()
    if size is True:
        return Team(dist.get_rank(), dist.get_world_size())
    if dist.get_world_size() % size:
        raise ValueError(
            f"shard_stiefel must divide the number of ranks, {dist.get_world_size()}, got {size}"
        )
    return Team(dist.get_rank() % size, size, dist.new_subgroups(size)[0])


@cache
def partition(batches: tuple[tuple[int, float], ...], ranks: int) -> list[list[int]]:
    """For each batch (number of blocks, cost of one): where each rank's share of it starts, and where the last one ends.

    The blocks of all batches are lined up by cost, the line is cut into equal pieces, one per rank, and a block belongs to
    the rank in whose piece its middle lies: no rank then has more than its piece and one block.
    """
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

    Returns what was exchanged, one row per rank.
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


class Sharding:
    """Which constrained blocks of an optimizer are stepped by this rank, and their exchange.

    Without `shard_stiefel` in a parameter group, or in a single process, this rank steps all of them.
    """

    def __init__(self) -> None:
        self.bounds: dict[StiefelParameter, list[int]] = {}  # where each rank's share of the blocks starts
        self.stale = False  # whether other ranks have state that this one lacks
        self.team: Team | None = None

    def assign(self, groups: list[dict[str, Any]], states: Any) -> None:
        """Decide which blocks are stepped here, from the parameters alone, so that state stays with the rank that has it."""
        groups = [group for group in groups if group.get("shard_stiefel")]
        sharded = [p for group in groups for p in group["params"] if isinstance(p, StiefelParameter)]
        bounds: dict[StiefelParameter, list[int]] = {}
        if sharded and self.team is None:
            self.team = team_of(groups[0]["shard_stiefel"])
        if sharded and self.team is not None and self.team.ranks > 1:
            shapes = [p.matrices().shape for p in sharded]
            batches = tuple((B, float(min(r, c) ** 2 * max(r, c))) for B, r, c in shapes)
            bounds = dict(zip(sharded, partition(batches, self.team.ranks), strict=True))
        if self.stale and bounds != self.bounds:  # blocks change hands: cut differently, added or removed
            self.consolidate(states)
        self.bounds = bounds

    def share(self, parameters: list[StiefelParameter], total: int) -> tuple[int, int]:
        """The blocks of a batch that are stepped here, from one index to another, of `total`."""
        if self.team is None or parameters[0] not in self.bounds:
            return 0, total
        rank, each = self.team.rank, total // len(parameters)
        own = [self.bounds[p][rank : rank + 2] for p in parameters]
        ranges = [(i * each + start, i * each + stop) for i, (start, stop) in enumerate(own) if start < stop]
        return (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)

    def exchange(self) -> StiefelParameter | None:
        """Exchange the blocks that each rank has stepped.  Returns a parameter that is not finite, or None."""
        alike: dict[Any, list[StiefelParameter]] = {}
        for p in self.bounds:
            if p.grad is not None:
                alike.setdefault((p.dtype, p.device), []).append(p)
        for parameters in alike.values():
            assert self.team is not None
            self.stale = True
            rows = exchange(
                [p.matrices() for p in parameters], [self.bounds[p] for p in parameters], self.team
            )
            if not rows.isfinite().all():
                return next(p for p in parameters if not p.isfinite().all())
        return None

    @torch.no_grad()
    def consolidate(self, states: Any) -> None:
        """Exchange the state of shared blocks, so that every rank has all of it."""
        alike: dict[Any, list[tuple[Tensor, list[int]]]] = {}
        for p, bounds in self.bounds.items():
            for key, x in states[p].items():
                if isinstance(x, Tensor) and x.ndim and not key.startswith("free_"):
                    x = cut_blocks(x, p.blocks, p.rows) if key == "master" else x
                    if len(x) == bounds[-1]:  # otherwise it was cut differently since
                        alike.setdefault((key, x.dtype, x.device), []).append((x, bounds))
        for pairs in alike.values():
            assert self.team is not None
            exchange([x for x, _ in pairs], [bounds for _, bounds in pairs], self.team)
        self.stale = False
