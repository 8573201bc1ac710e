"""A parameter may be cut differently, written, cast or loaded between two steps; the optimizer follows it."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from ortho_vit import StiefelParameter, constrain, optim, orthogonality_error
from ortho_vit.models import release
from ortho_vit.stiefel import random_stiefel

EXACT = ("StiefelSGD", "StiefelAdam", "MomentumlessStiefelSGD")
ALL = (*EXACT, "ProjectedStiefelSGD", "ProjectedStiefelAdam", "RegularizedSGD", "RegularizedAdam")


def train(layers, optimizer, steps):
    for _ in range(steps):
        for p in (p for layer in layers for p in layer.parameters()):
            p.grad = torch.randn_like(p)
        optimizer.step()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_blocks_that_are_cut_differently_are_stepped_as_they_are_cut(name, foreach):
    torch.manual_seed(0)
    layers = [constrain(nn.Linear(16, 8), blocks=4) for _ in range(2)]
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = getattr(optim, name)(parameters, lr=0.05, foreach=foreach)
    train(layers, optimizer, 3)
    constrain(layers[0], blocks=1)
    train(layers, optimizer, 20)
    assert max(orthogonality_error(layer) for layer in layers) < 2e-6
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(layers, optimizer, 3)
    assert max(orthogonality_error(layer) for layer in layers) < 2e-6


@pytest.mark.parametrize("name", ALL)
def test_a_weight_is_constrained_after_free_steps(name):
    torch.manual_seed(0)
    layer = nn.Linear(16, 8)
    optimizer = getattr(optim, name)(layer.parameters(), lr=0.01)
    train([layer], optimizer, 2)
    constrain(layer)
    train([layer], optimizer, 2)
    assert orthogonality_error(layer) < (0.5 if "Regularized" in name else 1e-3)
    assert optimizer.state[layer.weight]["step"] == 2


@pytest.mark.parametrize("constrained", [False, True])
def test_what_is_written_to_a_narrow_weight_counts(constrained):
    torch.manual_seed(0)
    layer = nn.Linear(16, 8)
    layer = (constrain(layer) if constrained else layer).to(torch.bfloat16)
    optimizer = optim.StiefelSGD(layer.parameters(), lr=0.1)
    train([layer], optimizer, 3)
    other = random_stiefel(8, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(other)
    optimizer.param_groups[0]["lr"] = 0.0
    train([layer], optimizer, 1)
    torch.testing.assert_close(layer.weight.detach(), other, rtol=0.01, atol=0.01)


def test_a_narrow_weight_that_was_written_back_keeps_its_master():
    layer = nn.Linear(16, 8).to(torch.bfloat16)
    optimizer = optim.StiefelSGD(layer.parameters(), lr=0.1)
    train([layer], optimizer, 2)
    master = optimizer.state[layer.weight]["master"].clone()
    with torch.no_grad():
        layer.weight.copy_(layer.weight.clone())
    optimizer.param_groups[0]["lr"] = 0.0
    train([layer], optimizer, 1)
    assert torch.equal(optimizer.state[layer.weight]["master"], master)


@pytest.mark.parametrize("rows", [None, 6])  # all rows constrained, or two of them free
@pytest.mark.parametrize(
    "name", ["StiefelSGD", "StiefelAdam", "ProjectedStiefelAdam", "MomentumlessStiefelSGD"]
)
def test_the_state_follows_a_model_to_another_precision(name, rows):
    layer = constrain(nn.Linear(16, 8), rows=rows)
    optimizer = getattr(optim, name)(layer.parameters(), lr=0.01)
    train([layer], optimizer, 2)
    layer.double()
    layer.bias.requires_grad_(False)  # torch's own Adam does not follow
    optimizer.param_groups[0]["params"] = [layer.weight]
    train([layer], optimizer, 1)
    tensors = [x for key, x in optimizer.state[layer.weight].items() if key not in ("step", "free_step")]
    assert all(x.dtype == torch.float64 for x in tensors)


@pytest.mark.parametrize("name", ["ProjectedStiefelSGD", "ProjectedStiefelAdam"])
def test_a_method_that_drifts_resumes_where_it_was(name):
    torch.manual_seed(0)
    layer = constrain(nn.Linear(16, 8, dtype=torch.float64))
    optimizer = getattr(optim, name)(layer.parameters(), lr=0.2)
    train([layer], optimizer, 10)
    before = layer.weight.detach().clone()
    assert orthogonality_error(layer) > 1e-8
    again = getattr(optim, name)(layer.parameters(), lr=0.2)
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(layer.weight, before)


def test_a_state_of_other_blocks_is_refused_before_anything_is_loaded():
    layer, other = constrain(nn.Linear(16, 8), blocks=2), constrain(nn.Linear(16, 8))
    optimizer, fresh = optim.StiefelSGD(layer.parameters()), optim.StiefelSGD(other.named_parameters())
    train([layer], optimizer, 1)
    with pytest.raises(ValueError, match=r"the state of parameter 'weight' of shape .* is of other blocks"):
        fresh.load_state_dict(optimizer.state_dict())
    assert not fresh.state
    with pytest.raises(ValueError, match="or of another optimizer"):
        optim.MomentumlessStiefelSGD(layer.parameters()).load_state_dict(optimizer.state_dict())


def test_parameters_that_cannot_be_taken_leave_the_others_and_the_groups_as_they_were():
    off, flat = StiefelParameter(1.5 * random_stiefel(4, 8)), StiefelParameter(torch.ones(4, 8))
    before = off.detach().clone()
    with pytest.raises(ValueError, match=r"'b' of shape .* cannot be made orthonormal"):
        optim.StiefelSGD([("a", off), ("b", flat)])
    assert torch.equal(off, before)
    optimizer = optim.StiefelSGD([StiefelParameter(random_stiefel(4, 8))])
    with pytest.raises(ValueError, match="cannot be made orthonormal"):
        optimizer.add_param_group({"params": [flat]})
    assert len(optimizer.param_groups) == 1


def test_a_narrow_block_that_rounding_does_not_explain_is_put_on_the_manifold():
    X = StiefelParameter((1.04 * random_stiefel(4, 8)).to(torch.bfloat16))
    with pytest.warns(UserWarning, match="was off the manifold"):
        optim.StiefelSGD([X])
    assert orthogonality_error(X) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_where_a_method_drifts_its_first_step_takes_out_what_it_finds(dtype):
    X = StiefelParameter((1.04 * random_stiefel(4, 8)).to(dtype))
    optimizer = optim.ProjectedStiefelSGD([X], lr=0.0)
    X.grad = torch.randn_like(X)
    optimizer.step()
    assert orthogonality_error(X) < (0.02 if dtype == torch.bfloat16 else 1e-6)


def test_a_weight_that_was_wide_for_a_while_starts_from_what_it_became():
    layer = constrain(nn.Linear(16, 8)).to(torch.bfloat16)
    optimizer = optim.StiefelSGD(layer.parameters(), lr=0.1)
    train([layer], optimizer, 2)
    layer.float()
    train([layer], optimizer, 2)
    expected = layer.weight.detach().clone()
    layer.bfloat16()
    optimizer.param_groups[0]["lr"] = 0.0
    train([layer], optimizer, 1)
    torch.testing.assert_close(layer.weight.detach().float(), expected, rtol=0.01, atol=0.01)


def test_what_is_written_through_data_counts():
    free = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = optim.StiefelSGD([free], lr=0.1)
    free.grad = torch.ones_like(free)
    optimizer.step()
    free.data.fill_(5.0)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(free, torch.full_like(free, 5.0))


def test_parameters_that_come_and_go_are_stepped_as_each_would_be_alone():
    ends = []
    for foreach in (False, True):
        torch.manual_seed(0)
        parameters = [StiefelParameter(random_stiefel(4, 8)) for _ in range(4)]
        optimizer = optim.StiefelAdam(parameters, lr=0.1, foreach=foreach)
        for skipped in (0, 1, 2, 3, 0, 2):
            for i, p in enumerate(parameters):
                p.grad = None if i == skipped else torch.randn_like(p)
            optimizer.step()
        ends.append(torch.stack([p.detach() for p in parameters]))
        assert [int(optimizer.state[p]["step"]) for p in parameters] == [4, 5, 4, 5]
    torch.testing.assert_close(*ends, rtol=0, atol=2e-6)


@pytest.mark.parametrize("foreach", [False, True])
def test_gradients_are_freed_by_zero_grad(foreach):
    parameters = [StiefelParameter(random_stiefel(4, 8)) for _ in range(2)]
    optimizer = optim.StiefelSGD(parameters, lr=0.1, foreach=foreach)
    for p in parameters:
        p.grad = torch.randn_like(p)
    gradients = [weakref.ref(p.grad) for p in parameters]
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert [gradient() for gradient in gradients] == [None, None]


def test_the_state_of_a_constrained_parameter_is_refused_by_a_free_one():
    layer, free = constrain(nn.Linear(16, 8)), nn.Linear(16, 8)
    optimizer = optim.StiefelSGD(layer.parameters())
    train([layer], optimizer, 1)
    with pytest.raises(ValueError, match="is of other blocks, or of another optimizer"):
        optim.StiefelSGD(free.parameters()).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", ALL)
def test_a_gradient_too_large_to_be_squared_is_limited_or_refused_before_anything_is_written(name):
    X, free = StiefelParameter(random_stiefel(4, 8)), nn.Parameter(torch.ones(3))
    optimizer = getattr(optim, name)([("X", X), ("free", free)], lr=0.1)
    X.grad, free.grad = torch.full_like(X, 1e20).tril_(), torch.ones(3)
    before = X.detach().clone()
    if name in ("StiefelSGD", "StiefelAdam"):
        for _ in range(3):
            optimizer.step()
            assert orthogonality_error(X) < 2e-6
        assert not torch.equal(X, before)
        return
    with pytest.raises(
        RuntimeError, match=r"the gradient of parameter 'X' .* is too large .* nothing was changed"
    ):
        optimizer.step()
    assert torch.equal(X, before)
    assert torch.equal(free, torch.ones(3))
    if name in EXACT:
        X.grad = torch.full_like(X, 1e14)
        for _ in range(3):
            optimizer.step()
        assert orthogonality_error(X) < 2e-6


@pytest.mark.parametrize("lr", [1e8, 1e12])
def test_the_euclidean_metric_holds_at_any_learning_rate_too(lr):
    torch.manual_seed(0)
    X = StiefelParameter(random_stiefel(15, 40))
    optimizer = optim.StiefelSGD([X], lr=lr, metric="euclidean")
    for _ in range(20):
        X.grad = torch.randn(15, 40)
        optimizer.step()
    assert orthogonality_error(X) < 1e-5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("StiefelSGD", {"inner_steps": 1.5}),
        ("StiefelAdam", {"inner_steps": True}),
        ("ProjectedStiefelSGD", {"cayley_steps": 2.5}),
        ("ProjectedStiefelSGD", {"qr_every": 2.5}),
        ("StiefelAdam", {"lr": torch.tensor(0.1), "foreach": True}),
    ],
)
def test_counts_are_whole_numbers(name, options):
    with pytest.raises(ValueError, match=f"{name}: {next(iter(options))} must be"):
        getattr(optim, name)([nn.Parameter(torch.ones(2, 2))], **options)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", optim.__all__)
def test_parameters_with_different_histories_are_stepped_as_if_alone(name, first):
    """As where a layer is unfrozen later: in one batch, each keeps its own momentum and counter."""

    def trained(foreach):
        torch.manual_seed(0)
        parameters = [StiefelParameter(random_stiefel(4, 9)) for _ in range(2)]
        optimizer = getattr(optim, name)(parameters, lr=0.01, foreach=foreach)
        for step in range(6):
            for i, p in enumerate(parameters):
                p.grad = torch.randn_like(p) if step > 1 or i == first else None
            optimizer.step()
        return parameters

    for together, alone in zip(trained(True), trained(False), strict=True):
        assert (together - alone).abs().max() < 1e-6


@pytest.mark.parametrize("name", optim.__all__)
def test_a_batch_of_matrices_is_trained_after_a_change_of_memory_format(name):
    torch.manual_seed(0)
    model = nn.Module()
    model.p = StiefelParameter(random_stiefel(2, 3, 4, 8))
    model.to(memory_format=torch.channels_last)
    optimizer = getattr(optim, name)(model.parameters(), lr=0.1)
    before = model.p.detach().clone()
    model.p.grad = torch.randn_like(model.p)
    optimizer.step()
    assert (model.p - before).abs().max() > 1e-3
    assert model.p.matrices().data_ptr() == model.p.data_ptr()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", optim.__all__)
def test_released_parameters_are_stepped_as_free_ones(name, foreach):
    torch.manual_seed(0)
    layers = [constrain(nn.Linear(8, 4), rows=2) for _ in range(2)]
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = getattr(optim, name)(parameters, lr=0.01, foreach=foreach)
    train(layers, optimizer, 2)
    for layer in layers:
        release(layer)
    train(layers, optimizer, 2)
    fresh = getattr(optim, name)(parameters, lr=0.01, foreach=foreach)
    fresh.load_state_dict(optimizer.state_dict())
    train(layers, fresh, 1)
