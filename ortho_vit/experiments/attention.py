"""What a trained network attends to, and how orthogonal its heads are: two figures from weights of the zoo.

    python -m ortho_vit.experiments.attention [--weights NAME] [--free NAME] [--image CLASS|FILE] [--output DIR]

attention.png shows the attention of the class token, or of all patches on average where there is none, in the last block,
head by head, and over all blocks (rollout, Abnar & Zuidema 2020).  gram.png shows W Wᵀ of the queries of one block, for
weights trained without a constraint and for weights trained orthonormal.  The image comes from a file or from the card of
the weights: nothing is downloaded.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ortho_vit.data.decode import SUFFIXES, as_tensor, central_square, decode
from ortho_vit.experiments.figure import new_figure, save_figure
from ortho_vit.experiments.result import Result, run_command
from ortho_vit.models import Card, create_model, find_checkpoint, load_checkpoint
from ortho_vit.models.attention import find_attention
from ortho_vit.models.weights import free_counterpart
from ortho_vit.pixels import normalize
from ortho_vit.training.images import recorded_attention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WEIGHTS = "ortho_vit_nano.cifar10_within_stiefel_sgd"


# ---- an image and where the network looks ----------------------------------------------------------------------


def image_of(card: Card, which: str | None) -> Tensor:
    """Pixels (channels, height, width) of a file, of the card's image of a class, or of its first image."""
    if which is not None and Path(which).suffix.lower() in SUFFIXES:
        image = central_square(decode(Path(which)), card.golden.shape[-1], card.crop_pct)
        return as_tensor(image, card.golden.shape[1])
    names = [card.classes[label] for label in card.golden.labels]
    if not names:
        raise ValueError(f"the card of {card.name} has synthetic images only; give the file of an image")
    if which is not None and which not in names:
        raise ValueError(
            f"no image of {which!r} on the card of {card.name}; give a file or one of {', '.join(names)}"
        )
    return card.golden.images()[names.index(which) if which else 0]


@torch.no_grad()
def attend(model: nn.Module, image: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Class probabilities of one image, and the attention (heads, tokens, tokens) of every block."""
    with recorded_attention(model) as record:
        logits = model.eval()(image)
    return logits[0].softmax(-1), [attention[0] for attention in record]


def rollout(attention: Sequence[Tensor]) -> Tensor:
    """How much each token contributes to each after all blocks (tokens, tokens): Π ½ (A + I), heads averaged."""
    total = torch.eye(attention[0].shape[-1])
    for A in attention:
        total = (A.mean(0) + torch.eye(len(total))) / 2 @ total
    return total


def plot_attention(card: Card, model: Any, pixels: Tensor) -> "Figure":
    probabilities, attention = attend(model, normalize(pixels[None], card.mean, card.std))
    side, prefix = model.patch_embed.grid_size[0], model.num_prefix_tokens
    queries = slice(1) if prefix else slice(None)  # the class token, or all patches
    maps = {f"head {i + 1}": A[queries].mean(0) for i, A in enumerate(attention[-1])}
    maps["all blocks"] = rollout(attention)[queries].mean(0)
    figure, axes = new_figure(1, len(maps) + 1, 1.4)
    axes[0].imshow(pixels.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray")
    best = int(probabilities.argmax())
    axes[0].set_title(f"{card.classes[best]}, {probabilities[best]:.0%}", fontsize=10)
    for axis, (title, tokens) in zip(axes[1:], maps.items(), strict=True):
        axis.imshow(tokens[prefix:].view(side, -1).numpy(), cmap="magma", vmin=0)
        axis.set_title(title, fontsize=10)
    for axis in axes:
        axis.set_axis_off()
    return figure


# ---- Gram matrices -----------------------------------------------------------------------------------------------------


def heads_of(model: nn.Module, block: int, part: str) -> Tensor:
    """W^Q or W^K of a block, (heads, d_k, d)."""
    projections = find_attention(model)[block].projections
    return next(p for p in projections if part in p.parts).heads_of(part).detach()


def measure(label: str, model: nn.Module) -> list[dict[str, Any]]:
    """For each block, the condition number of its worst head's W^Q and W^K; 1 if rows are orthonormal."""
    rows = []
    for block in range(len(find_attention(model))):
        row: dict[str, Any] = {"weights": label, "block": block + 1}
        for part in "qk":
            conditions = torch.linalg.cond(heads_of(model, block, part).double())  # one per head
            row[f"condition of W^{part.upper()}, worst head"] = conditions.max().item()
        rows.append(row)
    return rows


def plot_gram(models: dict[str, nn.Module], block: int) -> "Figure":
    figure, axes = new_figure(1, len(models), 2.8)
    for axis, (title, model) in zip(axes, models.items(), strict=True):
        W = heads_of(model, block, "q").flatten(0, 1)
        gram = W @ W.mT
        shown = axis.imshow((gram / gram.diagonal().mean()).abs().numpy(), cmap="magma", vmin=0, vmax=1)
        axis.set_title(title.replace(", ", ",\n"), fontsize=9)
        axis.grid(False)
    figure.colorbar(shown, ax=axes, shrink=0.8, label="|W Wᵀ|,\nmean diagonal 1")
    return figure


# ---- the command -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ortho_vit.experiments.attention", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--weights", default=WEIGHTS, help=f"trained orthonormal (default {WEIGHTS})")
    add(
        "--free",
        help="same architecture, trained without a constraint (default: those of the zoo, if it has any)",
    )
    add("--image", "--picture", metavar="CLASS|FILE", help="a class on the card, or the file of an image")
    add("--block", type=int, default=1, help="the block in gram.png, from 1 (default 1)")
    add("--output", type=Path, default=Path("results"), help="folder (default results/)")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)  # a bad path fails before the models are loaded
    ours = find_checkpoint(options.weights)
    free = options.free or free_counterpart(ours.card)
    torch.manual_seed(0)
    models = {"free, untrained": create_model(ours.card.architecture, constraint=None, **ours.card.arguments)}
    if free:
        models[f"free, {free.partition('.')[2]}"] = load_checkpoint(find_checkpoint(free))
    models[f"orthonormal, {ours.card.tag}"] = model = load_checkpoint(ours)
    depth = len(find_attention(model))
    if not 1 <= options.block <= depth:
        raise ValueError(f"block must be in [1, {depth}], got {options.block}")
    pixels = image_of(ours.card, options.image)
    save_figure(plot_attention(ours.card, model, pixels), options.output / "attention.png")
    save_figure(plot_gram(models, options.block - 1), options.output / "gram.png")
    table = [row for label, each in models.items() for row in measure(label, each)]
    result = Result("gram", {"weights": ours.card.name, "free": free, "block": options.block}, table=table)
    result.save(options.output)
    result.print_table()


if __name__ == "__main__":
    sys.exit(run_command(main))
