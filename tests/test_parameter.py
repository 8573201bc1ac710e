"""What a constrained parameter has to survive."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ortho_vit import StiefelParameter, audit, constrain, orthogonality_error, project_, stiefel_parameters
from ortho_vit.optim import StiefelSGD
from ortho_vit.stiefel import random_stiefel


@pytest.fixture
def linear() -> nn.Linear:
    """24 rows of which the first 16 are two blocks."""
    return constrain(nn.Linear(12, 24), blocks=2, rows=16)


def same_kind(p, q) -> bool:
    return isinstance(q, StiefelParameter) and (q.blocks, q.rows) == (p.blocks, p.rows)


def test_blocks_are_writable_views_and_the_rest_is_free(linear):
    weight = linear.weight
    assert weight.matrices().shape == (2, 8, 12)
    assert weight.free().shape == (8, 12)
    with torch.no_grad():
        weight.matrices()[1] = 7.0
        weight.free().fill_(3.0)
    assert (weight[8:16] == 7).all()
    assert (weight[16:] == 3).all()
    assert (weight[:8] != 7).all()


def test_a_wholly_constrained_parameter_has_no_free_rows():
    assert StiefelParameter(random_stiefel(3, 5)).free() is None


def test_leading_dimensions_are_a_batch():
    p = StiefelParameter(random_stiefel(2, 3, 8, 5), blocks=2)
    assert p.matrices().shape == (12, 4, 5)
    assert p.matrices().data_ptr() == p.data_ptr()


@given(
    batch=st.integers(1, 3),
    blocks=st.integers(1, 4),
    r=st.integers(1, 5),
    c=st.integers(1, 6),
    free=st.integers(0, 3),
    transposed=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_any_cut_covers_every_row_once(batch, blocks, r, c, free, transposed):
    if batch > 1 and blocks > 1:
        free = 0
    rows, shape = blocks * r, (batch, blocks * r + free, c)
    data = torch.randn(batch, c, rows + free).mT if transposed else torch.randn(shape)
    p = StiefelParameter(data, blocks=blocks, rows=rows)
    X = p.matrices()
    assert X.shape == (batch * blocks, r, c)
    torch.testing.assert_close(X.reshape(batch, rows, c), data[:, :rows], rtol=0, atol=0)
    assert (p.free() is None) == (free == 0)
    with torch.no_grad():
        X.zero_()
    assert (p[:, :rows] == 0).all()


@pytest.mark.parametrize("init", ["polar", "random"])
@pytest.mark.parametrize(("blocks", "rows"), [(1, None), (4, 16), (1, 10), (24, None)])
def test_constrain_puts_blocks_on_the_manifold(init, blocks, rows):
    layer = constrain(nn.Linear(12, 24), blocks=blocks, rows=rows, init=init)
    assert orthogonality_error(layer.weight) < 5e-7
    assert orthogonality_error(layer) == orthogonality_error(layer.weight)


def test_polar_init_is_the_nearest_and_leaves_free_rows():
    layer = nn.Linear(12, 24)
    before = layer.weight.detach().clone()
    constrain(layer, blocks=2, rows=16)
    P, _, Qh = torch.linalg.svd(before[:16].view(2, 8, 12), full_matrices=False)
    torch.testing.assert_close(layer.weight.matrices(), P @ Qh, rtol=0, atol=1e-6)
    assert torch.equal(layer.weight.free(), before[16:])


def test_keep_leaves_the_values():
    layer = nn.Linear(4, 4)
    before = layer.weight.detach().clone()
    assert torch.equal(constrain(layer, init="keep").weight, before)


def test_constrain_keeps_the_object_so_ties_and_hooks_stay():
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    constrain(first)
    assert first.weight is second.weight
    assert isinstance(second.weight, StiefelParameter)


def test_stiefel_parameters_are_found_by_name():
    model = nn.Sequential(nn.Linear(4, 4), constrain(nn.Linear(4, 4)))
    assert [name for name, _ in stiefel_parameters(model)] == ["1.weight"]
    assert orthogonality_error(nn.Linear(3, 3)) == 0.0


def test_it_survives_copies_pickle_and_moves(linear):
    weight = linear.weight
    copies = [
        copy.deepcopy(linear).weight,
        copy.copy(weight),
        pickle.loads(pickle.dumps(linear)).weight,
        copy.deepcopy(linear).to(torch.float64).weight,
        copy.deepcopy(linear).half().float().weight,
        AveragedModel(linear, multi_avg_fn=get_ema_multi_avg_fn(0.9)).module.weight,
    ]
    for q in copies:
        assert same_kind(weight, q)
        assert q is not weight
        assert q.requires_grad
        torch.testing.assert_close(q.float(), weight.data, rtol=1e-2, atol=1e-3)


def test_to_wrap_one_again_is_refused_and_its_detached_values_make_a_free_one(linear):
    with pytest.raises(RuntimeError, match="from an instance of type StiefelParameter"):
        nn.Parameter(linear.weight)
    free = nn.Parameter(linear.weight.detach())
    assert type(free) is nn.Parameter
    assert free.data_ptr() == linear.weight.data_ptr()


def test_a_deepcopy_keeps_ties_and_frozen_parameters(linear):
    linear.weight.requires_grad_(False)
    pair = nn.ModuleList([linear, linear])
    twin = copy.deepcopy(pair)
    assert twin[0].weight is twin[1].weight
    assert not twin[0].weight.requires_grad


def test_in_a_state_dict_it_is_a_plain_tensor_and_loads_back(linear):
    state = linear.state_dict()
    assert type(state["weight"]) is torch.Tensor
    other = constrain(nn.Linear(12, 24), blocks=2, rows=16)
    other.load_state_dict(state)
    assert same_kind(linear.weight, other.weight)
    assert torch.equal(other.weight, linear.weight)


def test_a_saved_parameter_loads_without_unpickling_code(linear):
    buffer = io.BytesIO()
    torch.save(linear.weight, buffer)
    buffer.seek(0)
    assert same_kind(linear.weight, torch.load(buffer, weights_only=True))


def test_where_torch_drops_the_type_keep_restores_it(linear):
    state = {k: v.clone() for k, v in linear.state_dict().items()}
    linear.load_state_dict(state, assign=True)
    assert not isinstance(linear.weight, StiefelParameter)
    constrain(linear, blocks=2, rows=16, init="keep")
    assert isinstance(linear.weight, StiefelParameter)
    assert torch.equal(linear.weight, state["weight"])


def test_gradients_reach_it_compiled_and_exported(linear):
    x = torch.randn(3, 12)
    expected = nn.functional.linear(x, linear.weight.data, linear.bias)
    exported = torch.export.export(linear, (x,))
    torch.testing.assert_close(exported.module()(x), expected)
    compiled = torch.compile(linear, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    compiled(x).sum().backward()
    assert linear.weight.grad is not None
    assert isinstance(linear.weight, StiefelParameter)


def _report(queue, layer):
    queue.put((type(layer.weight).__name__, layer.weight.blocks, layer.weight.rows))
    with torch.no_grad():
        layer.weight.fill_(7.0)


def test_a_spawned_process_gets_the_same_kind_and_shares_memory(linear):
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_report, args=(queue, linear))
    process.start()
    assert queue.get() == ("StiefelParameter", 2, 16)
    process.join()
    assert (linear.weight == 7).all()


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # with a single process
@pytest.mark.parametrize(
    "shard",
    [
        lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))),
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
    ],
    ids=["fully_shard", "FSDP", "FSDP with original parameters"],
)
def test_sharding_refuses_it_and_nothing_else(shard, linear, process_group):
    with pytest.raises(
        TypeError, match=r"of shape \(24, 12\) cannot be sharded: .* use DistributedDataParallel"
    ):
        shard(nn.Sequential(nn.Linear(4, 12), linear))
    shard(nn.Sequential(nn.Linear(4, 12)))


def test_an_optimizer_refuses_tensors_that_are_distributed(process_group):
    layer = distribute_module(nn.Linear(4, 12), init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match="StiefelSGD: parameters are sharded"):
        StiefelSGD(layer.parameters())


def test_its_repr_says_what_it_is(linear):
    assert repr(linear.weight).startswith("StiefelParameter(blocks=2, rows=16)")


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (torch.zeros(4), {}, "at least two dimensions"),
        (torch.zeros(0, 4), {}, "none of them empty"),
        (torch.zeros(4, 4, dtype=torch.long), {}, "floating-point dtype"),
        (torch.zeros(4, 4, dtype=torch.complex64), {}, "floating-point dtype"),
        (torch.zeros(4, 4), {"rows": 5}, r"rows must be in \[1, 4\], got 5"),
        (torch.zeros(4, 4), {"rows": 0}, r"rows must be in \[1, 4\], got 0"),
        (torch.zeros(4, 4), {"blocks": 3}, "blocks must divide the 4 constrained rows, got 3"),
        (torch.zeros(4, 4), {"blocks": 0}, "blocks must divide"),
        (torch.zeros(2, 4, 4), {"blocks": 2, "rows": 2}, "cannot have both"),
    ],
)
def test_impossible_cuts_are_refused(data, options, message):
    with pytest.raises(ValueError, match=message):
        StiefelParameter(data, **options)


def test_constrain_says_what_is_wrong_and_changes_nothing():
    layer = nn.Linear(4, 4, bias=False)
    with pytest.raises(ValueError, match="no parameter 'wieght'; it has: weight"):
        constrain(layer, "wieght")
    with pytest.raises(ValueError, match="init must be"):
        constrain(layer, init="zeros")
    with pytest.raises(ValueError, match="blocks must divide"):
        constrain(layer, blocks=3)
    with pytest.raises(ValueError, match="meta device"):
        constrain(nn.Linear(4, 4, device="meta"))
    with torch.no_grad():
        layer.weight.zero_()
    with pytest.raises(ValueError, match="rank-deficient"):
        constrain(layer)
    assert type(layer.weight) is nn.Parameter


@pytest.mark.parametrize("layer", [nn.Conv2d(64, 16, 1), nn.Conv1d(8, 4, 3), nn.ConvTranspose2d(4, 8, 3)])
def test_convolutions_are_refused_with_the_reason(layer):
    with pytest.raises(ValueError, match=r"convolutions cannot be constrained"):
        constrain(layer)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda model: list(stiefel_parameters(model)),
        orthogonality_error,
        project_,
        lambda model: audit(model, StiefelSGD(model.parameters())),
    ],
)
def test_a_parametrized_or_pruned_weight_is_not_taken_for_constrained(change, use):
    model = nn.Sequential(constrain(nn.Linear(8, 4)))
    use(model)
    change(model[0])
    with pytest.raises(ValueError, match=r"parametrize or prune computes another weight from it"):
        use(model)


def test_counts_may_be_integers_of_numpy():
    p = StiefelParameter(torch.randn(4, 6), blocks=np.int64(2), rows=np.int64(4))
    assert (p.blocks, p.rows) == (2, 4)
    assert type(p.blocks) is type(p.rows) is int
