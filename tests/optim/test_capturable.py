"""With `capturable` a step reads nothing back from the device, changes no bit, and can be compiled."""

import copy
import math
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ortho_vit import StiefelParameter, constrain, optim, orthogonality_error, project_
from ortho_vit.optim.momentum import sgd_step
from ortho_vit.stiefel import polar, random_stiefel
from tests.helpers.dispatch import NoHostReads

ALL = optim.__all__
CUTS = {"within": (6, 8), "across": (1, 48)}  # blocks and their rows
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def options_of(name):
    return {"qr_every": None} if "Projected" in name else {}


def make(constraint, depth=2, device="cpu", free=True):
    blocks, m = CUTS[constraint]
    torch.manual_seed(0)
    parameters: list[nn.Parameter] = []
    for _ in range(depth):
        data = torch.cat([random_stiefel(blocks, m, 48).flatten(0, 1), torch.randn(16 if free else 0, 48)])
        parameters.append(StiefelParameter(data.to(device), blocks=blocks, rows=blocks * m))
    return parameters + [nn.Parameter(torch.randn(5, device=device)) for _ in range(depth if free else 0)]


def wobble(parameters, i, scale=1.0):
    for j, p in enumerate(parameters):
        p.grad = scale * torch.sin(3 * p.detach() + i + j)


def step_watched(optimizer, parameters, steps=5):
    """The kernels of each step but the first two, which make and lay out the state; none may read the device."""
    seen = []
    for i in range(steps):
        wobble(parameters, i, scale=10.0 ** (i - 2))
        with NoHostReads() as mode:
            optimizer.step()
        seen.append(mode.kernels)
    return seen[2:]


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("constraint", CUTS)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("device", DEVICES)
def test_a_capturable_step_reads_nothing_and_launches_the_same_kernels_each_time(
    name, constraint, foreach, tensor_lr, device
):
    parameters = make(constraint, device=device)
    lr = torch.tensor(1e-2, device=device) if tensor_lr else 1e-2
    optimizer = getattr(optim, name)(parameters, lr=lr, foreach=foreach, capturable=True, **options_of(name))
    kernels = step_watched(optimizer, parameters)
    assert kernels[0] == kernels[1] == kernels[2]
    assert all(optimizer.state[p]["step"].device.type == device for p in parameters[:2])


@pytest.mark.parametrize("constraint", CUTS)
@pytest.mark.parametrize("name", ALL)
def test_the_step_runs_on_the_meta_device(name, constraint):
    """Where a tensor made elsewhere, or a look at a value, is an error here and not on a user's machine."""
    parameters = make(constraint, device="meta")
    optimizer = getattr(optim, name)(parameters, lr=0.1, **options_of(name))
    for _ in range(2):
        for p in parameters:
            p.grad = torch.empty_like(p)
        optimizer.step()


@pytest.mark.parametrize(("name", "most"), [("StiefelSGD", 110), ("StiefelAdam", 145)])
def test_the_number_of_kernels_does_not_depend_on_the_depth(name, most):
    """Measured: 106 and 144, of which torch's own step of the free rows takes 4 and 19."""
    counts = []
    for depth in (2, 7):
        parameters = make("within", depth)
        optimizer = getattr(optim, name)(parameters, lr=1e-3, foreach=True, capturable=True)
        counts.append(len(step_watched(optimizer, parameters)[-1]))
    assert counts[0] == counts[1] <= most


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0, 1e20])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("constraint", CUTS)
@pytest.mark.parametrize("name", ["StiefelSGD", "StiefelAdam", "MomentumlessStiefelSGD"])
def test_what_the_host_knows_changes_no_bit(name, constraint, foreach, scale):
    ends = []
    scale = min(scale, 100.0) if name.startswith("Momentumless") else scale
    for capturable in (False, True):
        parameters = make(constraint, free=False)
        optimizer = getattr(optim, name)(parameters, lr=0.1, foreach=foreach, capturable=capturable)
        for i in range(6):
            wobble(parameters, i, scale)
            optimizer.step()
        ends.append([*parameters, *(x for p in parameters for x in optimizer.state[p].values())])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("name", ["StiefelSGD", "StiefelAdam"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_its_blocks_and_their_state_as_they_were(name, bad):
    p = StiefelParameter(random_stiefel(3, 8, 48))
    twin = StiefelParameter(p.detach().clone())
    optimizers = [getattr(optim, name)([x], lr=0.1, capturable=True) for x in (p, twin)]
    for i in range(3):
        wobble([p], i)
        twin.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    before = copy.deepcopy({**optimizers[0].state[p], "X": p.detach()})
    wobble([p], 3)
    twin.grad = p.grad.clone()
    p.grad[1, 2, 3] = bad
    for optimizer in optimizers:
        optimizer.step()
    after, expected = ({**o.state[x], "X": x.detach()} for o, x in zip(optimizers, (p, twin), strict=True))
    for key in before.keys() - {"step"}:
        assert torch.equal(after[key][1], before[key][1])
        assert torch.equal(after[key][[0, 2]], expected[key][[0, 2]])


@pytest.mark.parametrize("name", optim.__all__)
def test_a_first_gradient_that_is_not_finite_is_forgotten(name):
    torch.manual_seed(0)
    p = StiefelParameter(random_stiefel(4, 9))
    options = {"qr_every": None} if name.startswith("Projected") else {}
    optimizer = getattr(optim, name)([p], lr=0.01, capturable=True, **options)
    for value in (math.nan, 1.0):
        p.grad = torch.full_like(p, value)
        optimizer.step()
    assert p.isfinite().all()


def test_parameters_on_several_devices_may_share_a_group():
    parameters = [
        StiefelParameter(random_stiefel(4, 9)),
        constrain(nn.Linear(9, 4, device="meta"), init="keep").weight,
    ]
    optimizer = optim.StiefelSGD(parameters, lr=0.1)
    for p in parameters:
        p.grad = torch.ones_like(p)
    before = parameters[0].detach().clone()
    optimizer.step()
    assert not torch.equal(parameters[0], before)


@pytest.mark.parametrize("backend", ["cuda", "mkldnn"])
def test_the_newer_options_of_torch_for_precision_change_nothing(backend):
    """In a process of its own: torch then refuses its older function."""
    code = f"""
import torch
from ortho_vit import StiefelParameter, orthogonality_error
from ortho_vit.optim import StiefelSGD
from ortho_vit.stiefel import random_stiefel
torch.backends.{backend}.matmul.fp32_precision = "tf32"
p = StiefelParameter(random_stiefel(4, 64, 128))
optimizer = StiefelSGD([p], lr=0.1)
for _ in range(3):
    p.grad = torch.randn_like(p)
    optimizer.step()
assert orthogonality_error(p) < 2e-6
assert torch.backends.{backend}.matmul.fp32_precision == "tf32"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_cannot_be_captured_says_why():
    X = [StiefelParameter(random_stiefel(4, 8))]
    for options in ({"integrator": "paper"}, {"expm": "exact"}):
        with pytest.raises(ValueError, match="StiefelSGD: capturable is not possible with"):
            optim.StiefelSGD(X, capturable=True, **options)
    with pytest.raises(ValueError, match="set qr_every=None"):
        optim.ProjectedStiefelSGD(X, capturable=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler, about itself
@pytest.mark.parametrize("capturable", [None, True])
@pytest.mark.parametrize("name", ["StiefelSGD", "StiefelAdam"])
def test_a_compiled_step_gives_the_same_numbers(name, capturable):
    """Whole, without a break, with a learning rate that a scheduler changes, and never as a step on plain parameters."""
    ends = []
    for compiled in (False, True):
        torch.compiler.reset()
        parameters = make("within", depth=2)
        optimizer = getattr(optim, name)(
            parameters, lr=torch.tensor(0.05), foreach=False, capturable=capturable
        )
        step = torch.compile(optimizer.step, fullgraph=True) if compiled else optimizer.step
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # which wraps the optimizer's step
        for i in range(4):
            wobble(parameters, i)
            step()
            with warnings.catch_warnings(action="ignore"):
                schedule.step()
        ends.append([p.detach().clone() for p in parameters])
        assert max(map(orthogonality_error, parameters[:2])) <= 1e-6
        assert "momentum_buffer" not in optimizer.state[parameters[0]]
    for eager, traced in zip(*ends, strict=True):
        torch.testing.assert_close(eager, traced, rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler, about itself
def test_a_compiled_train_step_breaks_only_where_torch_breaks_its_own():
    """Model, loss, backward and step in one compiled function: the same numbers, and the breaks of `torch.optim.SGD`."""
    x, y = torch.randn(8, 12), torch.randint(4, (8,))

    def train(kind, compiled):
        torch.manual_seed(0)
        torch.compiler.reset()
        counters.clear()
        model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
        if kind is optim.StiefelSGD:
            constrain(model[0], blocks=2)
        optimizer = kind(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)

        def step():
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step = torch.compile(step, backend="aot_eager") if compiled else step
        for _ in range(4):
            step()
        return list(model.parameters()), set(counters["graph_break"])

    eager, _ = train(optim.StiefelSGD, compiled=False)
    ours, breaks = train(optim.StiefelSGD, compiled=True)
    _, expected = train(torch.optim.SGD, compiled=True)
    assert breaks <= expected
    assert orthogonality_error(ours[0]) <= 1e-6
    for a, b in zip(eager, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler, about itself
def test_a_step_is_not_compiled_with_products_of_low_precision():
    X = StiefelParameter(random_stiefel(4, 8))
    optimizer = optim.StiefelSGD([X], lr=0.1)
    wobble([X], 0)
    torch.compiler.reset()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(Exception, match=r"StiefelSGD: a compiled step cannot change .*'highest'"):
            torch.compile(optimizer.step, backend="aot_eager")()
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("name", ["StiefelSGD", "StiefelAdam", "ProjectedStiefelAdam", "RegularizedSGD"])
def test_autocast_matmul_precision_and_default_dtype_change_nothing(name, precision):
    def end(disturbed):
        parameters = make("within")
        optimizer = getattr(optim, name)(parameters, lr=0.05)
        for i in range(3):
            wobble(parameters, i)
            if not disturbed:
                optimizer.step()
                continue
            torch.set_float32_matmul_precision(precision)
            torch.set_default_dtype(torch.float64)
            try:
                with torch.autocast("cpu", torch.bfloat16):
                    optimizer.step()
                    measured = orthogonality_error(parameters[0])
                    nearest = polar(parameters[0].matrices())
            finally:
                torch.set_float32_matmul_precision("highest")
                torch.set_default_dtype(torch.float32)
            assert measured == orthogonality_error(parameters[0])
            assert torch.equal(nearest, polar(parameters[0].matrices()))
        return parameters

    for plain, disturbed in zip(end(False), end(True), strict=True):
        assert torch.equal(plain, disturbed)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_an_average_is_the_same_under_autocast_and_low_precision(precision):
    def average():
        torch.manual_seed(0)
        model = constrain(nn.Linear(24, 8))
        mean = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        for _ in range(3):
            with torch.no_grad():
                model.weight.copy_(polar(model.weight + 0.3 * torch.sin(model.weight)))
            mean.update_parameters(model)
        return project_(mean).module.weight.detach()

    plain = average()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(average(), plain)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert orthogonality_error(plain) <= 1e-6


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["StiefelSGD", "StiefelAdam"])
def test_free_parameters_move_alike_with_a_rate_on_the_device(name, foreach):
    ends = []
    for capturable in (False, True):
        parameters = make("within")
        lr = torch.tensor(0.05) if capturable else 0.05
        optimizer = getattr(optim, name)(parameters, lr=lr, foreach=foreach, capturable=capturable)
        for i in range(6):
            if i == 3 and name == "StiefelSGD":  # the buffers of earlier steps must not be used any more
                optimizer.param_groups[0]["momentum"] = 0.0
            wobble(parameters, i)
            optimizer.step()
        ends.append([p.detach() for p in parameters])
    torch.testing.assert_close(*ends, rtol=0, atol=2e-6)


@pytest.mark.parametrize("capturable", [None, False, True])
def test_a_state_of_version_0_1_keeps_the_choice_made_here(capturable):
    X = StiefelParameter(random_stiefel(4, 8))
    optimizer = optim.StiefelSGD([X], lr=0.1, capturable=capturable)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["capturable"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["capturable"] is capturable


def test_a_counter_is_loaded_from_either_form():
    for capturable in (False, True):
        X = StiefelParameter(random_stiefel(4, 8))
        optimizer = optim.StiefelAdam([X], lr=0.1, capturable=capturable)
        wobble([X], 0)
        optimizer.step()
        saved = optimizer.state_dict()
        saved["state"][0]["step"] = 7  # as version 0.1 stored it
        optimizer.load_state_dict(saved)
        optimizer.step()
        assert optimizer.state[X]["step"].item() == 8


def test_the_carry_conserves_the_momentum():
    """U Uᵀ of the projected momentum is that of V: with μ = 1 and no gradient its singular values stay."""
    X = random_stiefel(4, 6, 20, dtype=torch.float64)
    U = torch.randn_like(X)
    U -= U @ X.mT @ X
    before = torch.linalg.svdvals(U)
    state = {"Z": torch.zeros(4, 6, 6, dtype=torch.float64), "U": U}
    options = {"momentum": 1.0, "dampening": 0.0, "a": 0.5, "expm": "euler"}
    for _ in range(5):
        sgd_step(X, torch.zeros_like(X), state, 0.05, **options, norm=0.0)
    U = state["U"] - state["U"] @ X.mT @ X
    torch.testing.assert_close(torch.linalg.svdvals(U), before, rtol=1e-11, atol=1e-11)
