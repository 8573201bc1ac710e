"""StiefelSGD follows the path of version 0.1: fifty steps, recorded with it in float32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ortho_vit import StiefelParameter
from ortho_vit.optim import StiefelSGD

TRACE = load_file(Path(__file__).parents[1] / "fixtures/v0_1/stiefel_sgd_trace.safetensors")
AGREEMENT = {"": 1e-6, "square_": 4e-6}  # the square steps of version 0.1 end 3e-6 from float64, these 2e-6


@pytest.mark.parametrize("metric", ["canonical", "euclidean"])
@pytest.mark.parametrize("kind", AGREEMENT)
def test_fifty_steps_of_stiefel_sgd_are_those_of_version_0_1(kind, metric):
    X = StiefelParameter(TRACE[f"{kind}start"].clone())
    optimizer = StiefelSGD([X], lr=0.03, momentum=0.9, metric=metric)
    for G, recorded in zip(TRACE[f"{kind}gradients"], TRACE[f"{metric}_{kind}trace"], strict=True):
        X.grad = G
        optimizer.step()
        torch.testing.assert_close(X.detach(), recorded, rtol=0, atol=AGREEMENT[kind])
