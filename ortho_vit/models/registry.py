"""Models by name: the zoo's, and any of timm's."""

import difflib
import fnmatch
from typing import Any

import timm
from torch import nn

from ortho_vit.models import zoo
from ortho_vit.models.orthogonalize import Projections, orthogonalize

__all__ = ["create_model", "list_models"]


def create_model(
    name: str,
    pretrained: bool = False,
    *,
    constraint: zoo.ZooConstraint = "default",
    projections: Projections = "qk",
    preserve: bool = False,
    **kwargs: Any,
) -> nn.Module:
    """Build a model of the zoo, or any of timm's with its attention constrained.

    Args:
        name: of an architecture in `list_models()` or `timm.list_models()`.
        pretrained: load its weights.
        constraint: "within", "across" or None; see `orthogonalize`.  By default "within" for the zoo's models and None
            for timm's.
        projections: which of W^Q, W^K, W^V are constrained.
        preserve: keep the function of timm's model when its attention is constrained; see `orthogonalize`.
        kwargs: timm's: num_classes, img_size, in_chans, drop_path_rate, ...
    """
    architecture = name.partition(".")[0]
    if architecture in zoo.__all__:
        return timm.create_model(
            name, pretrained, constraint=constraint or "none", projections=projections, **kwargs
        )
    if ":" not in name and not timm.is_model(architecture):
        raise ValueError(unknown(name, [*zoo.__all__, *timm.list_models()]))
    model = timm.create_model(name, pretrained, **kwargs)
    return orthogonalize(model, zoo.resolve(constraint, None), projections=projections, preserve=preserve)


def list_models(filter: str = "*", pretrained: bool = False) -> list[str]:
    """The names of the zoo's models that match `filter`, a pattern such as "*patch16*"."""
    return [name for name in zoo.__all__ if fnmatch.fnmatch(name, filter)]


def unknown(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown model {name!r}; {hint}list_models() has them all"
