"""The model compiled by `torch.compile`, in place: its names, its hooks and its checkpoints stay what they are."""

import warnings

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn


def compile_model(model: nn.Module, device: torch.device) -> None:
    """Compile the model for batches of a few fixed sizes; where nothing can be compiled, warn and leave it.

    On a CPU the attention is written out first: for the few tokens of a small picture the fused kernel costs more than
    its matrix products.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of torch, about itself
            torch.compile(torch.neg)(torch.zeros(1, device=device))  # needs a compiler and Python's headers
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        rank_zero_warn(f"the model is not compiled, which costs time only: {reason}")
        return
    if device.type == "cpu":
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False  # type: ignore[assignment]
    model.compile(dynamic=False)
