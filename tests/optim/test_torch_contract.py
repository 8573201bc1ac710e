"""Each is a real `torch.optim.Optimizer`: what torch and its users rely on."""

import copy
import inspect
import io
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from ortho_vit import StiefelParameter, constrain, optim, orthogonality_error
from ortho_vit.errors import DivergedError
from ortho_vit.stiefel import random_stiefel

ALL = optim.__all__
SGD_LIKE = [name for name in ALL if name.endswith("SGD")]


def network() -> nn.Sequential:
    """A partly constrained layer, a tall and a free one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4), nn.Linear(4, 8))
    constrain(model[0], blocks=2, rows=8)
    constrain(model[3])
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    x = torch.linspace(-1, 1, 30).view(5, 6)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def train(model, optimizer, steps=5):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def twin_of_torch(name, parameters, **options):
    twin = (
        torch.optim.SGD
        if name in SGD_LIKE
        else torch.optim.AdamW
        if name.endswith(("W", "Muon"))
        else torch.optim.Adam
    )
    return twin(parameters, **options)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_free_parts_follow_torch_to_the_bit(name, maximize, foreach):
    """Free parameters, and the free rows of constrained ones, against torch's optimizer on copies of them."""
    options = {"lr": 0.03, "weight_decay": 0.1, "maximize": maximize, "foreach": foreach}
    extra = {"momentum": 0.8, "dampening": 0.2} if name in SGD_LIKE else {"betas": (0.7, 0.9), "eps": 1e-5}
    own = {"muon": False} if name == "StiefelMuon" else {}  # and so AdamW
    mixed = StiefelParameter(torch.cat([random_stiefel(4, 6), torch.randn(3, 6)]), rows=4)
    mixed_2 = StiefelParameter(torch.cat([random_stiefel(4, 6), torch.randn(3, 6)]), rows=4)
    plain = nn.Parameter(torch.randn(5, 2))
    copies = [nn.Parameter(x.detach().clone()) for x in (mixed.free(), mixed_2.free(), plain)]
    ours = getattr(optim, name)([mixed, mixed_2, plain], **options, **extra, **own)
    theirs = twin_of_torch(name, copies, **options, **extra)
    for _ in range(7):
        for p in (mixed, mixed_2, plain):
            p.grad = torch.randn_like(p)
        for p, g in zip(copies, (mixed.grad[4:], mixed_2.grad[4:], plain.grad), strict=True):
            p.grad = g.clone()
        ours.step()
        theirs.step()
        for x, y in zip((mixed.free(), mixed_2.free(), plain), copies, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("name", ALL)
def test_every_option_is_in_the_signature(name):
    """So that editors, the documentation and the hints of the command line know it."""
    parameters = inspect.signature(getattr(optim, name)).parameters.values()
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)


@pytest.mark.parametrize("name", ALL)
def test_weight_decay_never_touches_constrained_rows(name):
    ends = []
    for weight_decay in (0.0, 0.5):
        torch.manual_seed(0)
        p = StiefelParameter(torch.cat([random_stiefel(4, 6), torch.ones(1, 6)]), rows=4)
        optimizer = getattr(optim, name)([p], lr=0.1, weight_decay=weight_decay)
        for _ in range(3):
            p.grad = torch.randn_like(p)
            optimizer.step()
        ends.append(p.detach().clone())
    assert torch.equal(ends[0][:4], ends[1][:4])
    assert not torch.equal(ends[0][4:], ends[1][4:])


@pytest.mark.parametrize("name", ALL)
def test_training_lowers_the_loss(name):
    model = network()
    optimizer = getattr(optim, name)(model.parameters(), lr=0.1 if name == "StiefelMuon" else 0.02)
    losses = train(model, optimizer, 60)
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("name", ALL)
def test_a_closure_is_called_with_gradients_enabled_and_its_loss_returned(name):
    model = network()
    optimizer = getattr(optim, name)(model.parameters(), lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(loss_of(network()).item())


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_resuming_from_a_state_dict_is_exact(name, foreach):
    """Saved, loaded without unpickling code into a new optimizer, and continued: the same bits as without a stop."""
    model = network()
    optimizer = getattr(optim, name)(model.parameters(), lr=0.05, weight_decay=0.01, foreach=foreach)
    train(model, optimizer, 18)  # past one refresh
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    train(model, optimizer, 20)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    model_2 = network()
    model_2.load_state_dict(saved["model"])
    optimizer_2 = getattr(optim, name)(model_2.parameters(), lr=1.0)
    optimizer_2.load_state_dict(saved["optimizer"])
    train(model_2, optimizer_2, 20)
    for p, q in zip(model.parameters(), model_2.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", ALL)
def test_a_state_is_loaded_more_than_once(name):
    """As Accelerate, and so Hugging Face's Trainer, does."""
    model = network()
    first, second = (getattr(optim, name)(model.parameters(), lr=0.05) for _ in range(2))
    train(model, first, 2)
    for _ in range(2):
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    copy.deepcopy(second).load_state_dict(first.state_dict())
    train(model, second, 1)


@pytest.mark.parametrize("name", ["StiefelSGD", "StiefelAdam"])
def test_resuming_low_precision_keeps_the_float32_state(name):
    model = network().bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = getattr(optim, name)(model.parameters(), lr=0.01)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    p = model[0].weight
    assert optimizer.state[p]["master"].dtype == torch.float32
    assert torch.equal(optimizer.state[p]["master"], state["state"][0]["master"])
    assert torch.equal(optimizer.state[p]["Z"], state["state"][0]["Z"])


SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=12),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum="momentum" in o.defaults),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # SequentialLR's own
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", ["StiefelSGD", "StiefelAdam", "ProjectedStiefelSGD", "RegularizedAdam"])
def test_every_scheduler_works(name, scheduler):
    model = network()
    optimizer = getattr(optim, name)(model.parameters(), lr=0.05)
    schedule = SCHEDULERS[scheduler](optimizer)
    for _ in range(8):
        loss = train(model, optimizer, 1)[0]
        schedule.step(loss) if scheduler == "plateau" else schedule.step()
    assert all(p.isfinite().all() for p in model.parameters())


def one_step(p_start, gradient, **options):
    p = StiefelParameter(p_start.clone())
    optimizer = optim.StiefelSGD([p], **options)
    p.grad = gradient
    optimizer.step()
    return p.detach(), optimizer


def test_stiefel_lr_is_the_rate_of_constrained_blocks_and_follows_the_schedule():
    start, gradient = random_stiefel(3, 6), torch.randn(3, 6)
    with_own, optimizer = one_step(start, gradient, lr=0.1, stiefel_lr=0.5)
    assert torch.equal(with_own, one_step(start, gradient, lr=0.5)[0])
    p = StiefelParameter(start.clone())
    optimizer = optim.StiefelSGD([p], lr=0.1, stiefel_lr=0.5)
    lr_scheduler.LambdaLR(optimizer, lambda i: 0.5)  # halves from the first step on
    p.grad = gradient
    optimizer.step()
    torch.testing.assert_close(p.detach(), one_step(start, gradient, lr=0.25)[0])


def test_a_tensor_is_taken_as_learning_rate():
    start, gradient = random_stiefel(3, 6), torch.randn(3, 6)
    expected = one_step(start, gradient, lr=0.1)[0]
    assert torch.equal(
        one_step(start, gradient, lr=torch.tensor(0.1, dtype=torch.float64), foreach=False)[0], expected
    )


@pytest.mark.parametrize("name", ALL)
def test_maximize_is_minimizing_the_negative(name):
    ends = []
    for sign, maximize in ((1, True), (-1, False)):
        torch.manual_seed(0)
        p = StiefelParameter(torch.cat([random_stiefel(3, 6), torch.ones(1, 6)]), rows=3)
        optimizer = getattr(optim, name)([p], lr=0.1, maximize=maximize)
        for _ in range(3):
            p.grad = sign * torch.randn(4, 6)
            optimizer.step()
        ends.append(p.detach().clone())
    torch.testing.assert_close(*ends, rtol=0, atol=1e-7)


def test_groups_override_and_can_be_added():
    model = network()
    optimizer = optim.StiefelSGD([{"params": model[0].parameters(), "lr": 0.5}], lr=0.01)
    optimizer.add_param_group({"params": model[3].parameters(), "momentum": 0.0, "metric": "euclidean"})
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.01]
    train(model, optimizer, 3)
    assert orthogonality_error(model) < 2e-6


def test_parameters_without_gradient_are_left_alone():
    model = network()
    before = model[3].weight.detach().clone()
    optimizer = optim.StiefelAdam(model.parameters(), lr=0.1)
    for p in model[0].parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert torch.equal(model[3].weight, before)
    assert model[3].weight not in optimizer.state


def test_zero_grad_clipping_and_grad_scaler_work():
    model = network()
    optimizer = optim.StiefelSGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    start = loss_of(model)
    for _ in range(10):
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert loss_of(model) < start
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.inf)
    scaler.step(optimizer)  # a scaler finds the overflow itself, and skips the step
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_an_optimizer_can_be_deepcopied_with_its_model(name):
    model = network()
    optimizer = getattr(optim, name)(model.parameters(), lr=0.05)
    train(model, optimizer, 3)
    model_2, optimizer_2 = copy.deepcopy((model, optimizer))
    assert train(model, optimizer, 3) == train(model_2, optimizer_2, 3)


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ALL)
def test_a_gradient_that_is_not_finite_is_refused_before_anything_is_written(name, bad):
    model = network()
    optimizer = getattr(optim, name)(model.named_parameters(), lr=0.1)
    train(model, optimizer, 2)
    before = copy.deepcopy([list(model.parameters()), optimizer.state_dict()["state"]])
    loss_of(model).backward()
    model[3].weight.grad[1, 2] = bad
    with pytest.raises(
        RuntimeError, match=r"the gradient of parameter '3\.weight' of shape \(8, 4\) is not finite"
    ):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before[0], strict=True))
    assert str(optimizer.state_dict()["state"]) == str(before[1])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("StiefelSGD", {"lr": -0.1}, "StiefelSGD: lr must be finite and >= 0, got -0.1"),
        ("StiefelSGD", {"lr": float("nan")}, "lr must be finite"),
        ("StiefelSGD", {"momentum": 1.2}, r"StiefelSGD: momentum must be in \[0, 1\), got 1.2"),
        ("StiefelSGD", {"dampening": -1}, "dampening must be"),
        ("StiefelSGD", {"weight_decay": -1}, "weight_decay must be"),
        ("StiefelSGD", {"stiefel_lr": -1}, "stiefel_lr must be"),
        ("StiefelSGD", {"metric": 1.0}, "metric must be 'canonical', 'euclidean' or a number < 1, got 1.0"),
        ("StiefelSGD", {"metric": "cannonical"}, "got 'cannonical'"),
        ("StiefelSGD", {"expm": "pade"}, "expm must be 'euler', 'cayley' or 'exact', got 'pade'"),
        ("StiefelSGD", {"integrator": "leapfrog"}, "integrator must be"),
        ("StiefelSGD", {"inner_steps": 0}, "inner_steps must be"),
        ("StiefelAdam", {"betas": (0.9, 1.0)}, "betas must be"),
        ("StiefelAdam", {"eps": 0.0}, "eps must be"),
        ("ProjectedStiefelSGD", {"cayley_steps": 0}, "cayley_steps must be"),
        ("ProjectedStiefelAdam", {"qr_every": 0}, "qr_every must be"),
        ("RegularizedSGD", {"penalty": -1}, "penalty must be"),
    ],
)
def test_bad_hyper_parameters_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(optim, name)([StiefelParameter(random_stiefel(2, 3))], **options)


def test_a_bad_group_is_refused_and_not_added():
    optimizer = optim.StiefelSGD([StiefelParameter(random_stiefel(2, 3))])
    with pytest.raises(ValueError, match="momentum must be"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "momentum": 3})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", [n for n in ALL if not n.startswith("Regularized")])
def test_blocks_off_the_manifold_are_put_on_it_with_a_warning_that_names_them(name):
    layer = constrain(nn.Linear(6, 4), init="keep")
    P, _, Qh = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
    with pytest.warns(UserWarning, match=r"parameter .weight. of shape .* was off the manifold"):
        getattr(optim, name)(layer.named_parameters())
    torch.testing.assert_close(layer.weight.detach(), P @ Qh, rtol=0, atol=1e-6)


def test_a_rank_deficient_block_is_refused_by_name():
    layer = constrain(nn.Linear(6, 4), init="keep")
    with torch.no_grad():
        layer.weight[1] = layer.weight[0]
        layer.weight[2:] = 0
    with pytest.raises(ValueError, match=r"parameter .weight. of shape .* cannot be made orthonormal"):
        optim.StiefelSGD(layer.named_parameters())


def test_weights_loaded_after_the_optimizer_was_made_are_put_on_the_manifold_by_the_first_step():
    layer = constrain(nn.Linear(6, 4))
    optimizer = optim.StiefelSGD(layer.parameters(), lr=0.01)
    layer.load_state_dict(nn.Linear(6, 4).state_dict())
    layer(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    assert orthogonality_error(layer) < 2e-6


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = optim.StiefelSGD(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradients are not supported"):
        optimizer.step()


class OpCounter(TorchDispatchMode):
    """Counts operators, but not torch's looks at its counters of steps, which lie on the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.count += function.namespace == "aten" and name not in ("_local_scalar_dense", "lift_fresh")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "limit"), [("StiefelSGD", 125), ("StiefelAdam", 145), ("ProjectedStiefelSGD", 260)]
)
def test_a_stacked_step_dispatches_a_fixed_number_of_operators_whatever_the_depth(name, limit):
    counts = []
    for depth in (3, 9):
        parameters = [
            StiefelParameter(
                torch.cat([random_stiefel(6, 8, 48).flatten(0, 1), torch.randn(48, 48)]), blocks=6, rows=48
            )
            for _ in range(depth)
        ]
        optimizer = getattr(optim, name)(parameters, lr=1e-3, foreach=True)
        for _ in range(2):
            for p in parameters:
                p.grad = 0.1 * torch.randn_like(p)
            with OpCounter() as counter:
                optimizer.step()
        counts.append(counter.count)
    assert counts[0] == counts[1] <= limit


# ------------------------------------------------------------------------------------------------ what others do to it


def test_distributed_checkpointing_primes_an_optimizer_without_moving_a_weight():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    for name in ALL:
        model = network()
        before = copy.deepcopy(model.state_dict())
        optimizer = getattr(optim, name)(model.parameters(), lr=0.1)
        with warnings.catch_warnings(action="ignore"):
            state = get_optimizer_state_dict(model, optimizer)
        assert "0.weight" in state["state"]
        if not name.startswith("Regularized"):  # its penalty moves them
            assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items()), name
        assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_state_is_loaded_by_keyword_and_options_come_with_it():
    model = network()
    optimizer = optim.StiefelSGD(
        model.parameters(), lr=0.3, metric="euclidean", stiefel_lr=0.1, expm="cayley"
    )
    train(model, optimizer, 2)
    fresh = optim.StiefelSGD(model.parameters())
    fresh.load_state_dict(state_dict=optimizer.state_dict())
    for key in ("lr", "metric", "stiefel_lr", "expm", "reference_lr", "capturable"):
        assert fresh.param_groups[0][key] == optimizer.param_groups[0][key]


def test_weights_are_changed_in_place():
    model = network()
    optimizer = optim.StiefelAdam(model.parameters(), lr=0.1, foreach=True)
    places = [p.data_ptr() for p in model.parameters()]
    view = model[0].weight.data[:2]
    train(model, optimizer, 2)
    assert [p.data_ptr() for p in model.parameters()] == places
    assert torch.equal(view, model[0].weight.data[:2])


def test_a_parameter_of_other_strides_at_the_same_address_is_noticed():
    storage = random_stiefel(8, 8).contiguous()
    p = StiefelParameter(storage)
    optimizer = optim.StiefelSGD([p], lr=0.1)
    p.grad = torch.randn(8, 8)
    optimizer.step()
    p.data = p.data.t()
    p.grad = torch.randn(8, 8)
    optimizer.step()
    assert orthogonality_error(p) < 2e-6


def test_complex_parameters_are_refused():
    with pytest.raises(ValueError, match="is complex; only real parameters are supported"):
        optim.StiefelSGD([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])


def test_a_foreign_optimizer_on_a_constrained_parameter_warns_once_by_name():
    model = network()
    loss_of(model).backward()
    foreign = torch.optim.SGD(model.named_parameters(), lr=0.1)
    with pytest.warns(
        UserWarning, match=r"SGD steps the constrained parameter 0\.weight \(2 such\) as a free one"
    ):
        foreign.step()
    with warnings.catch_warnings(action="error"):
        foreign.step()
        ours = optim.StiefelSGD(network().parameters(), lr=0.1)
        ours.step()


def test_a_learning_rate_of_another_version_resumes():
    """A state of version 0.1: integers count steps, and free rows have a dictionary of their own."""
    model = network()
    optimizer = optim.StiefelAdam(model.parameters(), lr=0.05)
    train(model, optimizer, 3)
    old = copy.deepcopy(optimizer.state_dict())
    for state in old["state"].values():
        free = {key.removeprefix("free_"): state.pop(key) for key in list(state) if key.startswith("free_")}
        if "Z" in state:
            state |= {"free": free, "step": int(state["step"])}
    for group in old["param_groups"]:
        del group["capturable"]
    twin = copy.deepcopy(model)
    resumed = optim.StiefelAdam(twin.parameters(), lr=1.0)
    resumed.load_state_dict(old)
    assert train(model, optimizer, 3) == train(twin, resumed, 3)


def test_a_printed_step_that_overflows_is_not_written():
    torch.manual_seed(0)
    p = StiefelParameter(random_stiefel(4, 9))
    optimizer = optim.StiefelSGD([p], lr=10.0, momentum=0.9, integrator="paper", inner_steps=2)

    def run():
        for _ in range(100):
            p.grad = torch.randn_like(p)
            optimizer.step()

    with pytest.raises(DivergedError, match="the step overflowed; lower the learning rate"):
        run()
    assert p.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_half_precision_gradients_whose_norm_half_precision_cannot_hold_are_taken(name):
    p = StiefelParameter(random_stiefel(8, 64).half())
    p.grad = torch.full_like(p, 60000.0)
    getattr(optim, name)([p], lr=1e-6).step()
    assert p.isfinite().all()


def test_another_optimizer_whose_parameters_were_removed_still_steps():
    model = network()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.0)
    del optimizer.param_groups[0]["params"][1:]
    train(model, torch.optim.SGD(model[2].parameters(), lr=0.1), 1)
    with pytest.warns(UserWarning, match="SGD steps the constrained parameter 0.weight"):
        optimizer.step()
