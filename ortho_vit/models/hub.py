"""Turn a trained model into a zoo entry: weights and card, or a folder as the Hugging Face hub wants it."""

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

from ortho_vit.errors import CheckpointError
from ortho_vit.models.card import Card, Golden, golden_logits
from ortho_vit.models.weights import Checkpoint, check_weights, load_checkpoint, write_whole
from ortho_vit.resources import output_folder
from ortho_vit.stiefel import orthogonality_error

__all__ = ["export_for_hub", "save_checkpoint"]

FREE = {"constraint": None, "projections": "qk", "preserve": False}


def save_checkpoint(
    model: nn.Module,
    name: str,
    *,
    pixels: Tensor,
    labels: Sequence[int],
    classes: Sequence[str],
    data: str,
    mean: Sequence[float],
    std: Sequence[float],
    accuracy: Mapping[str, float],
    command: str,
    optimizer: Mapping[str, Any],
    recipe: Mapping[str, Any],
    arguments: Mapping[str, Any] | None = None,
    licence: str = "MIT",
    folder: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model's weights and card, and return the path of the weights.

    Args:
        name: architecture.tag; the architecture is one of the zoo's or of timm's.
        pixels: uint8 pictures (n, channels, height, width), eight by custom, whose logits go on the card; `labels` say
            what they show.
        classes: the labels of the data set, in order; `mean` and `std` are what its pixels were normalised by.
        accuracy: as measured by `command`, such as {"test/top1": 0.83}.
        optimizer: class and arguments; together with `recipe`, what it takes to train it again.
        arguments: of the architecture, where they are not its defaults.
        folder: by default the repository's checkpoints/, or ./checkpoints where the package is installed.

    Before anything is kept, the weights must be finite and on the manifold, and what was written must load again and
    give the same logits.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    target = Path(folder or output_folder()) / f"{name}.safetensors"
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists already; overwrite=True replaces it")
    check_weights(model, name)
    weights = _serialize(model, name)
    card = Card(
        name=name,
        arguments=dict(arguments or {}),
        **getattr(model, "orthogonal", FREE),
        optimizer=dict(optimizer),
        recipe=dict(recipe),
        data=data,
        classes=list(classes),
        mean=list(mean),
        std=list(std),
        accuracy=dict(accuracy),
        command=command,
        orthogonality_error=orthogonality_error(model),
        parameters=sum(p.numel() for p in model.parameters()),
        sha256=hashlib.sha256(weights).hexdigest(),
        versions={"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__},
        licence=licence,
        golden=Golden.of(pixels, labels, golden_logits(model, pixels, mean, std)),
    )
    _write_checked(target, weights, card)
    return target


def _serialize(model: nn.Module, name: str) -> bytes:
    tensors = {key: x.detach().cpu().contiguous().clone() for key, x in model.state_dict().items()}
    return safetensors.torch.save(tensors, metadata={"format": "pt", "name": name})


def _write_checked(target: Path, weights: bytes, card: Card) -> None:
    """Write both files, once what they hold has been read back and gives the card's logits."""
    text = card.to_json()
    card = Card.from_json(text, f"{card.name}.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    trial = target.with_name(f".{target.name}.{os.getpid()}")
    trial.write_bytes(weights)
    try:
        card.check_golden(load_checkpoint(Checkpoint(card, trial)))
        trial.replace(target)
    finally:
        trial.unlink(missing_ok=True)
    write_whole(target.with_suffix(".json"), text.encode())


def export_for_hub(checkpoint: Checkpoint, folder: str | os.PathLike[str]) -> Path:
    """Write config.json and model.safetensors as the Hugging Face hub keeps them, and return the folder.

    `timm.create_model("local-dir:<folder>", pretrained=True)` loads it, and so does "hf-hub:<user>/<name>" once uploaded,
    where `ortho_vit` has been imported.
    """
    card = checkpoint.card
    if card.preserve:
        raise CheckpointError(
            f"{card.name} has cores after its projections, which timm cannot rebuild from a config"
        )
    model = load_checkpoint(checkpoint)
    arguments = {**card.arguments, "constraint": card.constraint or "none", "projections": card.projections}
    save_for_hf(
        model,
        os.fspath(folder),
        model_config={"label_names": card.classes},
        model_args=arguments,
        safe_serialization=True,
    )
    return Path(folder)
