"""`--weights NAME`: the configuration of an entry of the zoo, from its card.

    python train.py test    --weights NAME                     the data set it was trained on
    python train.py predict --weights NAME --pictures FOLDER   pictures of one's own

A card may have been downloaded: of the classes it names only data modules of this package are made.
"""

from typing import Any

import yaml

from ortho_vit.cli.compose import refuse_classes, take_option
from ortho_vit.errors import CheckpointError, UsageError
from ortho_vit.models import Card, Checkpoint, find_checkpoint

UNUSED = {"class_path": "ortho_vit.optim.StiefelSGD", "init_args": {"lr": 0.0}}  # evaluation takes no step


def expand_card(arguments: list[str], subcommand: str) -> list[str]:
    """The arguments with `--weights NAME` and `--pictures FOLDER` replaced by the configuration they stand for."""
    weights, arguments = take_option(arguments, "--weights")
    pictures, arguments = take_option(arguments, "--pictures")
    if weights is None and pictures is None:
        return arguments
    if subcommand == "fit":
        raise UsageError(
            "fit starts from weights with --model.weights; --weights is for validate, test, predict"
        )
    if weights is None:
        raise UsageError("--pictures needs --weights NAME, whose card knows the classes and the size")
    if pictures is not None and subcommand != "predict":
        raise UsageError(f"--pictures is for predict: {subcommand} needs labels, give --data instead")
    try:
        checkpoint = find_checkpoint(weights)
    except CheckpointError as error:
        raise UsageError(f"weights: {error}") from error
    config = {"model": _model(checkpoint), "data": _data(checkpoint.card, pictures)}
    return [arguments[0], "--config", yaml.safe_dump(config, allow_unicode=True), *arguments[1:]]


def _model(checkpoint: Checkpoint) -> dict[str, Any]:
    card = checkpoint.card
    refuse_classes(card.arguments, f"weights: the card of {card.name}")
    return card.spec.options() | {"weights": str(checkpoint.weights), "optimizer": UNUSED}


def _data(card: Card, pictures: str | None) -> dict[str, Any] | None:
    data = card.recipe.get("data")
    kind = str(data.get("class_path")) if isinstance(data, dict) else ""
    if pictures is not None:
        arguments = {
            "folder": pictures,
            "classes": card.classes,
            "image_size": card.golden.shape[-1],
            "mean": card.mean,
            "std": card.std,
            "crop_pct": card.crop_pct,
        }
        return {"class_path": "ortho_vit.data.UnlabelledImages", "init_args": arguments}
    return data if kind.startswith("ortho_vit.data.") else None
