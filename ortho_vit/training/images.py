"""Pictures for TensorBoard: where the class token looks, and how orthogonal the attention weights are."""

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from ortho_vit.parameter import stiefel_parameters


class AttentionImages(Callback):
    """Draws attention maps and Gram matrices every few epochs.

    `attention/maps` has one row for each of a few validation pictures: the picture, then the attention of the class
    token in every block, averaged over heads.  `gram/<parameter>` is |W Wᵀ| of the constrained rows: the identity on
    the diagonal blocks that are orthonormal, and elsewhere how much heads overlap.

    Args:
        every_n_epochs: how often; 0 for never.
        pictures: how many pictures to draw maps of.
    """

    def __init__(self, every_n_epochs: int = 10, pictures: int = 4) -> None:
        if every_n_epochs < 0 or pictures < 1:
            raise ValueError(
                "AttentionImages: every_n_epochs must be at least 0 and pictures at least 1, "
                f"got {every_n_epochs} and {pictures}"
            )
        self.every_n_epochs, self.pictures = every_n_epochs, pictures
        self._images: Tensor | None = None

    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx == 0:
            self._images = batch[0][: self.pictures]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logger = trainer.logger
        if (
            not self.every_n_epochs
            or trainer.current_epoch % self.every_n_epochs
            or not isinstance(logger, TensorBoardLogger)
        ):
            return
        for name, parameter in stiefel_parameters(pl_module):
            logger.experiment.add_image(f"gram/{name}", gram_image(parameter), trainer.global_step)
        if self._images is not None:
            maps = attention_images(pl_module.model, self._images)  # type: ignore[arg-type]
            if maps is not None:
                logger.experiment.add_image("attention/maps", maps, trainer.global_step)


def gram_image(parameter: Tensor) -> Tensor:
    """|W Wᵀ| of the constrained rows as a grey image (1, rows, rows), white for 1."""
    W = parameter.detach().flatten(0, -3) if parameter.ndim > 2 else parameter.detach()[None]
    W = W[0, : parameter.rows].float()  # type: ignore[attr-defined]
    W = W.mT if W.shape[0] // parameter.blocks > W.shape[1] else W  # type: ignore[attr-defined]
    return (W @ W.mT).abs().clamp(max=1)[None].cpu()


@torch.no_grad()
def attention_images(model: nn.Module, images: Tensor) -> Tensor | None:
    """One row a picture: the picture, then the class token's attention in each block; None without a class token."""
    if not getattr(model, "num_prefix_tokens", 0):
        return None
    training = model.training
    with recorded_attention(model) as record:
        model.eval()(images)
    model.train(training)
    height, width = images.shape[-2:]
    rows = (images - images.amin((-3, -2, -1), keepdim=True)).float()
    rows = rows / rows.amax((-3, -2, -1), keepdim=True).clamp_min(1e-12)
    tiles = [rows.expand(-1, 3, -1, -1)]
    for attention in record:  # (B, heads, N, N)
        looks = attention[:, :, 0, model.num_prefix_tokens :].mean(1).float()
        side = int(looks.shape[-1] ** 0.5)
        if side * side != looks.shape[-1]:
            return None
        looks = (looks / looks.amax(-1, keepdim=True)).view(-1, 1, side, side)
        tiles.append(F.interpolate(looks, (height, width)).expand(-1, 3, -1, -1))
    if len(tiles) == 1:
        return None
    return torch.cat(
        [F.pad(torch.cat(tiles, -1), (0, 0, 0, 2), value=1.0)[i] for i in range(len(images))], -2
    ).cpu()


@contextlib.contextmanager
def recorded_attention(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the attention probabilities of timm's blocks, which the fused kernel would not give out."""
    record: list[Tensor] = []
    fused, hooks = [], []
    for module in model.modules():
        if isinstance(getattr(module, "attn_drop", None), nn.Module) and hasattr(module, "fused_attn"):
            fused.append((module, module.fused_attn))
            module.fused_attn = False  # type: ignore[assignment]
            drop: nn.Module = module.attn_drop  # type: ignore[assignment]
            hooks.append(drop.register_forward_pre_hook(lambda _, inputs: record.append(inputs[0])))
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code would pass over the hooks
            yield record
    finally:
        for module, was in fused:
            module.fused_attn = was
        for hook in hooks:
            hook.remove()
