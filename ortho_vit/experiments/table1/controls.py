"""Callbacks for rows without a constraint that separate the effect of the size of W^Q and W^K from orthogonality.

Orthonormal rows are larger than timm's initial ones: a head's block in ℝ^(d_k × d_model) with orthonormal rows has the
Frobenius norm √d_k, so entries of size 1/√d_model, where timm draws entries of standard deviation 0.02.  Both callbacks
rescale timm's Gaussian blocks to that norm.  This draws no random numbers, so runs of one seed share all other weights.
"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from ortho_vit.models.attention import find_attention


class LargeStart(Callback):
    """Rescales each head's initial W^Q and W^K to the Frobenius norm of an orthonormal block; training may change it."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":  # a run that resumes loads its weights after this
            rescale(query_key_blocks(pl_module))


class HeldNorm(LargeStart):
    """Rescales each head's W^Q and W^K to the Frobenius norm of an orthonormal block, at the start and after every step."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        rescale(query_key_blocks(pl_module))


def query_key_blocks(model: nn.Module) -> list[Tensor]:
    """W^Q and W^K of every attention: views (heads, d_k, d_model) of the weights."""
    projections = [projection for a in find_attention(model) for projection in a.projections]
    return [p.heads_of(part) for p in projections for part in "qk" if part in p.parts]


@torch.no_grad()
def rescale(blocks: list[Tensor]) -> None:
    """Give every matrix (…, d_k, d_model) the Frobenius norm √d_k, in place."""
    for X in blocks:
        X *= X.shape[-2] ** 0.5 / torch.linalg.matrix_norm(X, keepdim=True)
