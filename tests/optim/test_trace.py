"""StiefelSGD goes on where version 0.1 went: fifty steps, recorded with it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ortho_vit import StiefelParameter
from ortho_vit.optim import StiefelSGD

ROUNDING = 2e-6  # two ways to round fifty float32 steps; measured: 1.1e-6 at the end

TRACE = load_file(Path(__file__).parents[1] / "fixtures/v0_1/stiefel_sgd_trace.safetensors")


@pytest.mark.parametrize("metric", ["canonical", "euclidean"])
def test_fifty_steps_of_stiefel_sgd_are_those_of_version_0_1(metric):
    X, Y = StiefelParameter(TRACE["start"].clone()), StiefelParameter(TRACE["square_start"].clone())
    optimizer = StiefelSGD([X, Y], lr=0.03, momentum=0.9, metric=metric)
    for i in range(50):
        X.grad, Y.grad = TRACE["gradients"][i], TRACE["square_gradients"][i]
        optimizer.step()
        torch.testing.assert_close(X.detach(), TRACE[f"{metric}_trace"][i], rtol=0, atol=ROUNDING)
        torch.testing.assert_close(Y.detach(), TRACE[f"{metric}_square_trace"][i], rtol=0, atol=ROUNDING)
