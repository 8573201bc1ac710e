"""Models by name: the zoo's, with or without trained weights, and any of timm's."""

import difflib
import fnmatch
import os
from typing import Any

import timm
from torch import nn

from ortho_vit.errors import CheckpointError
from ortho_vit.models import zoo
from ortho_vit.models.orthogonalize import Choice, Projections, orthogonalize, resolve
from ortho_vit.models.weights import available, find_checkpoint, load_checkpoint

__all__ = ["create_model", "list_models"]


def create_model(
    name: str,
    pretrained: bool = False,
    *,
    constraint: Choice = "default",
    projections: Projections | None = None,
    preserve: bool | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Build a model of the zoo, or any of timm's with its attention constrained.

    Args:
        name: an architecture of `list_models()` or `timm.list_models()`, or architecture.tag to say which weights.
        pretrained: load the weights: a checkpoint of ours by that name if there is one, otherwise timm's.
        constraint: "within", "across" or None; see `orthogonalize`.  By default what the checkpoint was trained with;
            without one, "within" for the zoo's models and None for timm's.
        projections: which of W^Q, W^K, W^V are constrained, and with "qk+mlp" the MLPs; see `orthogonalize`.  By
            default the checkpoint's, or "qk".
        preserve: constrain without changing the function that the weights compute; see `orthogonalize`.  By default the
            checkpoint's, or False.
        checkpoints: folder or https address of the checkpoints, by default ORTHO_VIT_CHECKPOINTS or the repository's.
        kwargs: timm's: num_classes, img_size, in_chans, drop_path_rate, ...
    """
    architecture, _, tag = name.partition(".")
    ours = architecture in zoo.__all__
    if ":" not in name and not timm.is_model(architecture):
        raise ValueError(_unknown(name, [*zoo.__all__, *timm.list_models()]))
    if (tag or pretrained) and (ours or checkpoints is not None or name in available()):
        full_name = name if tag else _only_tag(architecture, checkpoints)
        return load_checkpoint(
            find_checkpoint(full_name, checkpoints),
            weights=pretrained,
            constraint=constraint,
            projections=projections,
            preserve=preserve,
            **kwargs,
        )
    if ours:
        kwargs["constraint"] = "none"  # until orthogonalize
    try:
        model = timm.create_model(name, pretrained, **kwargs)
    except (TypeError, AssertionError, ZeroDivisionError, RuntimeError) as error:
        given = {key: value for key, value in kwargs.items() if key != "constraint"}
        raise ValueError(f"{name} cannot be built with {given}: {' '.join(str(error).split())}") from error
    wanted = resolve(constraint, "within" if ours else None)
    return orthogonalize(
        model, wanted, projections="qk" if projections is None else projections, preserve=bool(preserve)
    )


def list_models(filter: str = "*", pretrained: bool = False) -> list[str]:
    """The zoo's architectures that match a pattern such as "*patch16*"; with `pretrained`, the names of its weights."""
    return fnmatch.filter(available() if pretrained else sorted(zoo.__all__), filter)


def _only_tag(architecture: str, checkpoints: str | os.PathLike[str] | None) -> str:
    names = [name for name in available(checkpoints) if name.startswith(f"{architecture}.")]
    if len(names) != 1:
        have = f"name one: {', '.join(names)}" if names else "list_models(pretrained=True) has them all"
        raise CheckpointError(f"{architecture} has {len(names) or 'no'} trained weights; {have}")
    return names[0]


def _unknown(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown model {name!r}; {hint}list_models() has them all"
