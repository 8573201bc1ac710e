"""What moves by which rule, and what does not move at all."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ortho_vit import audit, constrain, optim, orthogonality_error, project_
from ortho_vit.transport.projection import RGAS


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 6))
    constrain(model[0], blocks=2)
    return model


def test_every_parameter_has_a_row_with_its_rule_rate_and_error():
    model = network()
    table = audit(model, optim.StiefelSGD(model.parameters(), lr=0.1, stiefel_lr=0.3))
    rows = {row.name: row for row in table.rows}
    assert list(rows) == [name for name, _ in model.named_parameters()]
    assert (rows["0.weight"].constrained, rows["0.weight"].blocks) == (True, "2 of 2×8")
    assert (rows["0.weight"].rule, rows["0.weight"].lr) == ("StiefelSGD", 0.3)
    assert (rows["1.weight"].rule, rows["1.weight"].lr) == ("StiefelSGD (free)", 0.1)
    assert rows["0.weight"].error < 1e-6
    assert rows["1.weight"].error is None
    assert not table.problems
    assert "4 parameters, 1 of them constrained: 1 by StiefelSGD, 3 by StiefelSGD (free)" in str(table)


def test_what_is_stepped_by_nobody_by_two_or_by_a_stranger_is_said():
    model = network()
    assert audit(model, optim.StiefelSGD(model[0].parameters())).problems == [
        "1.weight: no optimizer steps it",
        "1.bias: no optimizer steps it",
    ]
    foreign = audit(model, torch.optim.SGD(model.parameters()))
    assert foreign.problems == ["0.weight: SGD ignores the constraint: use an optimizer of ortho_vit.optim"]
    both = audit(model, [optim.StiefelSGD(model.parameters()), torch.optim.SGD(model[1].parameters())])
    assert both.problems == [f"1.{part}: 2 parameter groups step it" for part in ("weight", "bias")]


def test_an_average_is_projected_onto_the_manifold():
    model = network()
    optimizer = optim.StiefelSGD(model.parameters(), lr=0.5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(5):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        average.update_parameters(model)
    assert orthogonality_error(average) > 1e-3
    free = average.module[1].weight.clone()
    assert project_(average) is average
    assert orthogonality_error(average) < 1e-6
    assert torch.equal(average.module[1].weight, free)


def test_the_rate_of_blocks_follows_the_schedule():
    model = network()
    optimizer = optim.StiefelSGD(model.parameters(), lr=0.1, stiefel_lr=0.4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    optimizer.step()
    scheduler.step()
    rates = {row.name: row.lr for row in audit(model, optimizer).rows}
    assert rates["0.weight"] == pytest.approx(0.04)
    assert rates["1.weight"] == pytest.approx(0.01)


def test_an_optimizer_of_the_transport_problem_keeps_the_constraint():
    model = constrain(nn.Linear(4, 8, bias=False))
    assert not audit(model, RGAS(model.parameters(), lr=0.1)).problems
