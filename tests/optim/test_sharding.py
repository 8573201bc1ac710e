"""Ranks that step a share of the blocks each end where one process would, to the bit."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ortho_vit import StiefelParameter, optim, orthogonality_error
from ortho_vit.optim.sharding import partition
from ortho_vit.stiefel import random_stiefel

SHARDED = [
    "StiefelSGD",
    "StiefelAdam",
    "ProjectedStiefelSGD",
    "ProjectedStiefelAdam",
    "MomentumlessStiefelSGD",
]
SHAPES = ((6, 8, 48, 48), (6, 8, 48, 48), (6, 8, 48, 48), (1, 24, 8, 0), (2, 20, 20, 20))


def make_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Blocks of several shapes, fused with free rows or not, wide, tall and square; and a free parameter."""
    torch.manual_seed(0)
    made: list[nn.Parameter] = []
    for blocks, r, c, free in SHAPES:
        data = torch.cat([random_stiefel(blocks, r, c).flatten(0, 1), torch.randn(free, c)]).to(dtype)
        made.append(StiefelParameter(data, blocks=blocks, rows=blocks * r))
    return [*made, nn.Parameter(torch.randn(7).to(dtype))]


def step(optimizer, parameters, steps) -> None:
    for i in steps:
        for j, p in enumerate(parameters):
            p.grad = torch.sin(3 * p.detach() + i + j)
        if i % 5 == 2:
            parameters[1].grad = None
        optimizer.step()


def train(name, steps=20, dtype=torch.float32, **options):
    parameters = make_parameters(dtype)
    optimizer = getattr(optim, name)(parameters, lr=0.05, weight_decay=0.01, **options)
    step(optimizer, parameters, range(steps))
    optimizer.consolidate_state_dict()
    return parameters, optimizer


def tensors(value) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [x for v in value.values() for x in tensors(v)]
    return [value] if isinstance(value, torch.Tensor) else []


def assert_same(one, two, what) -> None:
    one, two = list(one), list(two)
    assert len(one) == len(two), what
    assert all(map(torch.equal, one, two)), what


def check_bits(ranks: int) -> None:
    for name in SHARDED:
        for foreach, dtype in ((False, torch.float32), (True, torch.float32), (False, torch.bfloat16)):
            options = {"foreach": foreach, "dtype": dtype}
            whole, one = train(name, **options)
            parts, many = train(name, shard_stiefel=2 if name == "StiefelAdam" else True, **options)
            assert_same(whole, parts, f"{name} {options}: weights")
            assert_same(
                tensors(one.state_dict()["state"]), tensors(many.state_dict()["state"]), f"{name}: state"
            )


def check_resume(ranks: int) -> None:
    """A sharded run continues from a whole state, and an unsharded one from a sharded run's state."""
    for first, then in ((True, False), (False, True), (True, True)):
        whole, one = train("StiefelSGD", steps=20)
        step(one, whole, range(20, 25))
        parts, many = train("StiefelSGD", steps=20, shard_stiefel=first)
        later = [copy.deepcopy(p) for p in parts]
        resumed = optim.StiefelSGD(later, lr=0.05, weight_decay=0.01, shard_stiefel=then)
        resumed.load_state_dict(many.state_dict())
        step(resumed, later, range(20, 25))
        assert_same(whole, later, (first, then))


def check_refusals(ranks: int) -> None:
    parameters = make_parameters()
    optimizer = optim.StiefelSGD(parameters, lr=0.05, shard_stiefel=True)
    step(optimizer, parameters, range(1))
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        optimizer.state_dict()
    optimizer.consolidate_state_dict()
    optimizer.state_dict()
    for p in parameters:
        p.grad = torch.zeros_like(p)
    parameters[0].grad[:8] = 1e14  # one block, so one rank's
    optimizer.param_groups[0]["integrator"] = "paper"
    optimizer.param_groups[0]["lr"] = 1e30
    with pytest.raises(RuntimeError, match="overflowed"):
        optimizer.step()
    with pytest.raises(ValueError, match=f"must divide the number of ranks, {ranks}, got 3"):
        train("StiefelSGD", steps=1, shard_stiefel=3)


def check_share(ranks: int) -> None:
    """A rank steps its own blocks only."""
    parameters = make_parameters()
    optimizer = optim.StiefelSGD(parameters, lr=0.05, shard_stiefel=True)
    step(optimizer, parameters, range(1))
    stepped = sum(int((optimizer.state[p]["Z"] != 0).any(-1).any(-1).sum()) for p in parameters[:5])
    total = torch.tensor(stepped)
    dist.all_reduce(total)
    assert 0 < stepped < 15
    assert total == sum(blocks for blocks, *_ in SHAPES)
    assert max(map(orthogonality_error, parameters[:5])) < 2e-6


def on_rank(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for check in (check_bits, check_resume, check_refusals, check_share):
        check(ranks)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sharded_step_is_the_whole_step_to_the_bit(ranks, tmp_path):
    mp.spawn(on_rank, (ranks, str(tmp_path / "store")), nprocs=ranks)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.floats(0.1, 100)), min_size=1, max_size=12), st.integers(1, 64)
)
def test_every_block_is_dealt_to_one_rank_and_costs_are_even(batches, ranks):
    bounds = partition(tuple(batches), ranks)
    assert all(
        b[0] == 0 and b[-1] == count and b == sorted(b) for b, (count, _) in zip(bounds, batches, strict=True)
    )
    loads = [
        sum(cost * (b[r + 1] - b[r]) for b, (_, cost) in zip(bounds, batches, strict=True))
        for r in range(ranks)
    ]
    total, largest = sum(count * cost for count, cost in batches), max(cost for _, cost in batches)
    assert sum(loads) == pytest.approx(total)
    assert max(loads) <= total / ranks + largest * (1 + 1e-9)


def test_in_one_process_sharding_changes_nothing():
    whole, parts = (train("StiefelAdam", shard_stiefel=sharded)[0] for sharded in (False, True))
    assert_same(whole, parts, "weights")
