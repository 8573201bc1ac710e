"""Publish a trained model: weights and card for the zoo, or a folder for the Hugging Face hub."""

import copy
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
from ortho_vit.models.card import Card, Golden, crop_pct_of, golden_logits, synthetic_images
from ortho_vit.models.orthogonalize import release
from ortho_vit.models.readme import hub_readme
from ortho_vit.models.spec import ATTENTION, ModelSpec
from ortho_vit.models.weights import Checkpoint, check_weights, export_folder, write_checkpoint
from ortho_vit.models.zoo import SIZES, load_checkpoint, verify_checkpoint
from ortho_vit.stiefel import orthogonality_error

__all__ = ["export_for_hub", "save_checkpoint"]


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
    folder = export_folder() if folder is None else Path(folder)
    target = folder / f"{name}.safetensors"
    if {"site-packages", "dist-packages"} & set(folder.resolve().parts):
        rule = "belongs to an installed package; choose another folder for new weights"
        raise CheckpointError(f"{folder} {rule}")
    check_weights(model, name)
    tensors = {key: x.detach().cpu().contiguous().clone() for key, x in model.state_dict().items()}
    weights = safetensors.torch.save(tensors, metadata={"format": "pt", "name": name})
    if pixels is None:
        pixels, labels = synthetic_images([8, *_input_size(model)]), ()
    narrow = any(p.dtype.itemsize < 4 for p in model.parameters())
    as_loaded = copy.deepcopy(model).float() if narrow else model
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
        golden=Golden.of(pixels, labels, golden_logits(as_loaded, pixels, mean, std)),
    )
    write_checkpoint(target, weights, card, overwrite, check=verify_checkpoint)
    return target


def _input_size(model: Any) -> list[int]:
    """Channels, height and width of the images that a model takes."""
    channels, *size = model.pretrained_cfg["input_size"]
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or size
    return [getattr(model, "in_chans", channels), *size]


def export_for_hub(checkpoint: Checkpoint, folder: str | os.PathLike[str]) -> Path:
    """Write config.json, model.safetensors and README.md in the Hugging Face hub's layout, and return the folder.

    `hf upload USER/NAME FOLDER` on the command line of `huggingface_hub` uploads it.
    `timm.create_model("local-dir:FOLDER", pretrained=True)` loads it, and so does `"hf-hub:USER/NAME"` once uploaded.
    Neither needs `ortho_vit`: the weights are plain tensors, with cores and scales multiplied in, and the architecture is
    timm's.  Only `ortho_vit_compact`, whose stem timm does not have, needs `ortho_vit.models` to be imported.
    """
    card, model = checkpoint.card, release(load_checkpoint(checkpoint))
    architecture, arguments = card.architecture, card.spec.arguments
    if architecture == "ortho_vit_compact":
        arguments = arguments | {"constraint": "none"}
    elif architecture in SIZES:  # timm builds it from any ViT's name and these arguments
        _, channels, *size = card.golden.shape
        arguments = {**SIZES[architecture], "img_size": size, "in_chans": channels} | arguments
        architecture = "vit_tiny_patch16_224"
    config: Any = model.pretrained_cfg
    config["architecture"] = architecture
    if card.golden.shape[1] not in (1, 3):
        config["first_conv"] = None  # timm would adapt it from 3 channels, which these weights do not have
    labels = {"label_names": card.classes}
    save_for_hf(model, os.fspath(folder), model_config=labels, model_args=arguments, safe_serialization=True)
    (Path(folder) / "README.md").write_text(hub_readme(card), encoding="utf-8")
    return Path(folder)
