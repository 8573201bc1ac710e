"""`ortho_vit` is imported before anything imports torchvision; every test starts from the same random state."""

import pytest
import torch

import ortho_vit  # noqa: F401

torch.set_num_threads(1)  # the matrices are small, and two workers share two cores


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
