"""Images for TensorBoard: what the class token attends to, and how orthogonal the attention weights are."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from ortho_vit.parameter import StiefelParameter, stiefel_parameters
from ortho_vit.training.same_data import class_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELL = 1.4  # inches, of an image or an attention map
MOST_BLOCKS = 12  # for which there is a column
WIDEST = 4  # Gram matrices in a row
NO_TICKS: dict[str, Any] = {"xticks": [], "yticks": []}


class AttentionImages(Callback):
    """Draws attention maps and Gram matrices every few epochs.

    `attention/maps` has one row for each of a few validation images: the image, then the attention of the class token in
    every block, averaged over heads.  `attention/gram` has |W Wᵀ| of the constrained rows of each parameter: the identity
    on the diagonal blocks that are orthonormal, and elsewhere how much heads overlap.

    Args:
        every_n_epochs: the number of epochs between two drawings; 0: never.
        pictures: the number of images to draw attention maps of.
    """

    def __init__(self, every_n_epochs: int = 10, pictures: int = 4) -> None:
        if every_n_epochs < 0 or pictures < 1:
            raise ValueError(
                "AttentionImages: every_n_epochs must be at least 0 and pictures at least 1, "
                f"got {every_n_epochs} and {pictures}"
            )
        self.every_n_epochs, self.pictures = every_n_epochs, pictures
        self._images: Tensor | None = None
        self._labels: list[str] = []

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if batch_idx == 0:
            names = class_names(getattr(trainer, "datamodule", None))
            labels = batch[1][: self.pictures].tolist()
            self._images = batch[0][: self.pictures]
            self._labels = [names[label] if names else str(label) for label in labels]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logger, due = trainer.logger, self.every_n_epochs and trainer.current_epoch % self.every_n_epochs == 0
        if not due or not isinstance(logger, TensorBoardLogger):
            return
        grams = {name: gram_matrix(parameter) for name, parameter in stiefel_parameters(pl_module)}
        if grams:
            logger.experiment.add_figure("attention/gram", draw_grams(grams), trainer.global_step)
        model: nn.Module = pl_module.model  # type: ignore[assignment]
        if self._images is not None and (maps := attention_maps(model, self._images)) is not None:
            figure = draw_maps(self._images, maps, self._labels)
            logger.experiment.add_figure("attention/maps", figure, trainer.global_step)


def gram_matrix(parameter: StiefelParameter) -> Tensor:
    """|W Wᵀ| of the constrained rows, (rows, rows), at most 1; of a batch of matrices, those of the first."""
    W = parameter.detach().view(-1, *parameter.shape[-2:])[0, : parameter.rows].float()
    W = W.mT if W.shape[0] // parameter.blocks > W.shape[1] else W
    return (W @ W.mT).abs().clamp(max=1).cpu()


@torch.no_grad()
def attention_maps(model: nn.Module, images: Tensor) -> Tensor | None:
    """The class token's attention (images, blocks, side, side), mean over heads; None where there is no such map."""
    if not getattr(model, "num_prefix_tokens", 0):
        return None
    training = model.training
    with recorded_attention(model) as record:
        model.eval()(images)
    model.train(training)
    maps = [attention[:, :, 0, model.num_prefix_tokens :].mean(1).float() for attention in record]
    side = math.isqrt(maps[0].shape[-1]) if maps else 0
    if not maps or any(each.shape[-1] != side * side for each in maps):
        return None
    return torch.stack(maps, 1).unflatten(-1, (side, side)).cpu()


def draw_maps(images: Tensor, maps: Tensor, labels: Sequence[str]) -> "Figure":
    """One row per image: itself, then its maps, each from black for no attention to white for the most."""
    from matplotlib.figure import Figure

    depth = maps.shape[1]
    blocks = torch.linspace(0, depth - 1, min(MOST_BLOCKS, depth)).round().int().tolist()
    size = (CELL * (len(blocks) + 1), CELL * len(images) + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(images), len(blocks) + 1, squeeze=False, subplot_kw=NO_TICKS)
    for row, image, attention, label in zip(axes, images.float().cpu(), maps, labels, strict=True):
        pixels = image if len(image) in (1, 3) else image[:1]
        pixels = pixels - pixels.amin()
        pixels = (pixels / pixels.amax().clamp_min(1e-12)).expand(3, -1, -1)
        row[0].imshow(pixels.permute(1, 2, 0).numpy())
        row[0].set_ylabel(label, fontsize=9)
        for axis, block in zip(row[1:], blocks, strict=True):
            axis.imshow(attention[block].numpy(), cmap="gray", vmin=0)
    for axis, title in zip(axes[0], ["image", *(f"block {block + 1}" for block in blocks)], strict=True):
        axis.set_title(title, fontsize=9)
    return figure


def draw_grams(grams: Mapping[str, Tensor]) -> "Figure":
    """|W Wᵀ| of each parameter under its name, on one scale from 0 to 1."""
    from matplotlib.figure import Figure

    columns = min(WIDEST, len(grams))
    rows = math.ceil(len(grams) / columns)
    figure = Figure(figsize=(2.6 * columns + 0.6, 2.8 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, subplot_kw=NO_TICKS)
    for axis in axes.flat[len(grams) :]:
        axis.set_axis_off()
    for axis, (name, gram) in zip(axes.flat, grams.items(), strict=False):
        shown = axis.imshow(gram.numpy(), cmap="gray", vmin=0, vmax=1)
        axis.set_title(name.removeprefix("model."), fontsize=8)
    figure.colorbar(shown, ax=axes, label="|W Wᵀ|", shrink=0.6)
    return figure


@contextlib.contextmanager
def recorded_attention(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the attention probabilities of timm's blocks, which the fused kernel does not return."""
    record: list[Tensor] = []
    with contextlib.ExitStack() as restored:
        for module in model.modules():
            drop = getattr(module, "attn_drop", None)
            if isinstance(drop, nn.Module) and hasattr(module, "fused_attn"):
                restored.callback(setattr, module, "fused_attn", module.fused_attn)
                module.fused_attn = False  # type: ignore[assignment]
                restored.enter_context(
                    drop.register_forward_pre_hook(lambda _, inputs: record.append(inputs[0]))
                )
        # Compiled code would not call the hooks
        restored.enter_context(torch.compiler.set_stance("force_eager"))
        yield record
