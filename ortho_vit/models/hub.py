"""Publish a trained model: weights and card for the zoo, or a folder for the Hugging Face hub."""

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
from ortho_vit.files import write_whole
from ortho_vit.models.card import Card, Golden, crop_pct_of, golden_logits, synthetic_images
from ortho_vit.models.orthogonalize import release
from ortho_vit.models.readme import hub_readme
from ortho_vit.models.spec import ATTENTION, ModelSpec
from ortho_vit.models.weights import (
    Checkpoint,
    check_weights,
    export_folder,
    finish_exports,
    only_writer,
    publish,
    staged,
)
from ortho_vit.models.zoo import SIZES, load_checkpoint
from ortho_vit.stiefel import orthogonality_error

__all__ = ["export_for_hub", "save_checkpoint"]

GOLDEN_COUNT = 8


# ------------------------------------------------------------------------------------------ weights and card


def save_checkpoint(
    model: nn.Module,
    name: str,
    *,
    classes: Sequence[str],
    data: str,
    mean: Sequence[float],
    std: Sequence[float],
    accuracy: Mapping[str, float],
    command: str,
    optimizer: Mapping[str, Any],
    recipe: Mapping[str, Any],
    crop_pct: float | None = None,
    arguments: Mapping[str, Any] | None = None,
    pixels: Tensor | None = None,
    labels: Sequence[int] = (),
    licence: str = "unknown",
    folder: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model's weights and card, and return the path of the weights.

    Args:
        name: architecture.tag; the architecture is one of the zoo's or of timm's.
        classes: names of the classes, in the order of the labels; `mean` and `std` are those by which pixels were
            normalised, and `crop_pct` is the share of the shorter side that evaluation keeps, by default that of the
            recipe's data module.
        accuracy: as measured by `command`, such as {"test/top1": 0.83}.
        optimizer: class and arguments; with `recipe`, all that is needed to train the model again.
        arguments: of the architecture, where they are not its defaults.
        pixels: uint8 images (n, channels, height, width) to publish on the card with their `labels` and logits; by
            default synthetic images.
        licence: of the weights, such as "MIT" or "CC-BY-4.0".
        folder: by default ORTHO_VIT_CHECKPOINTS, the repository's checkpoints/, or outside of it ./checkpoints.

    The weights must be finite and on the manifold, and the written file must load again and give the same logits before
    it replaces anything.  If the process is killed, weights and card are both old or both new.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    target = _target(name, export_folder() if folder is None else Path(folder), overwrite)
    check_weights(model, name)
    weights = _serialize(model, name)
    if pixels is None:
        pixels, labels = synthetic_images([GOLDEN_COUNT, *_input_size(model)]), ()
    noted: dict[str, Any] = getattr(model, "orthogonal", ModelSpec(name).attention)
    card = Card(
        name=name,
        arguments=dict(arguments or {}),
        **{key: noted[key] for key in ATTENTION},
        optimizer=dict(optimizer),
        recipe=dict(recipe),
        data=data,
        classes=list(classes),
        mean=list(mean),
        std=list(std),
        crop_pct=crop_pct_of(recipe) if crop_pct is None else crop_pct,
        accuracy=dict(accuracy),
        command=command,
        orthogonality_error=orthogonality_error(model),
        parameters=sum(p.numel() for p in model.parameters()),
        sha256=hashlib.sha256(weights).hexdigest(),
        versions={"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__},
        licence=licence,
        golden=Golden.of(pixels, labels, golden_logits(model, pixels, mean, std)),
    )
    _write_checked(target, weights, card, overwrite)
    return target


def _target(name: str, folder: Path, overwrite: bool) -> Path:
    if {"site-packages", "dist-packages"} & set(folder.resolve().parts):
        raise CheckpointError(
            f"{folder} belongs to an installed package; choose another folder for new weights"
        )
    target = folder / f"{name}.safetensors"
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists already; overwrite=True replaces it")
    return target


def _input_size(model: nn.Module) -> list[int]:
    """Channels, height and width of the images that a model takes."""
    config: Mapping[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or config["input_size"][1:]
    return [getattr(model, "in_chans", config["input_size"][0]), *size]


def _serialize(model: nn.Module, name: str) -> bytes:
    tensors = {key: x.detach().cpu().contiguous().clone() for key, x in model.state_dict().items()}
    return safetensors.torch.save(tensors, metadata={"format": "pt", "name": name})


def _write_checked(target: Path, weights: bytes, card: Card, overwrite: bool) -> None:
    """Write both files, after the weights were read back and gave the card's logits."""
    text = card.to_json()
    card = Card.from_json(text, f"{card.name}.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    finish_exports(target.parent)
    with only_writer(target):
        if target.exists() and not overwrite:
            raise CheckpointError(f"{target} was written by another process; overwrite=True replaces it")
        try:
            write_whole(staged(target), weights)
            card.check_golden(load_checkpoint(Checkpoint(card, staged(target))))
            write_whole(staged(target.with_suffix(".json")), text.encode())
        except BaseException:
            staged(target).unlink(missing_ok=True)
            raise
        publish(target)  # if this is interrupted, the next `finish_exports` completes it


# ----------------------------------------------------------------------------------------------------- the hub


def export_for_hub(checkpoint: Checkpoint, folder: str | os.PathLike[str]) -> Path:
    """Write config.json, model.safetensors and README.md in the Hugging Face hub's layout, and return the folder.

    `hf upload USER/NAME FOLDER` on the command line of `huggingface_hub` uploads it.
    `timm.create_model("local-dir:FOLDER", pretrained=True)` loads it, and so does `"hf-hub:USER/NAME"` once uploaded.
    Neither needs `ortho_vit`: the weights are plain tensors, with cores and scales multiplied in, and the architecture is
    timm's.  Only `ortho_vit_compact`, whose stem timm does not have, needs `ortho_vit.models` to be imported.
    """
    card = checkpoint.card
    model = release(load_checkpoint(checkpoint))
    architecture, arguments = _timm_architecture(card)
    config: Any = model.pretrained_cfg
    config["architecture"] = architecture
    save_for_hf(
        model,
        os.fspath(folder),
        model_config={"label_names": card.classes},
        model_args=arguments,
        safe_serialization=True,
    )
    (Path(folder) / "README.md").write_text(hub_readme(card), encoding="utf-8")
    return Path(folder)


def _timm_architecture(card: Card) -> tuple[str, dict[str, Any]]:
    """The name and the arguments with which timm builds a card's model."""
    if card.architecture == "ortho_vit_compact":
        return card.architecture, card.spec.arguments | {"constraint": "none"}
    if card.architecture not in SIZES:
        return card.architecture, card.spec.arguments
    _, channels, *size = card.golden.shape
    arguments = {**SIZES[card.architecture], "img_size": size, "in_chans": channels}
    return "vit_tiny_patch16_224", arguments | card.spec.arguments
