"""The description of a model that a classifier, a card, a run checkpoint and the command line share.

To add an option of the model, add a field here and use it in `orthogonalize`; the signatures of `create_model`
and `Classifier` list it too, and so does `Card`, where earlier files have a default.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ortho_vit.models.orthogonalize import Constraint, Projections, check_constraint

__all__ = ["Choice", "ModelSpec"]

Choice = Constraint | Literal["none", "default"]  # `timm.create_model` drops keywords that are None
ATTENTION = ("constraint", "projections", "preserve", "scale")  # how attention is constrained
# Also accepted among the arguments, where version 0.1 wrote them:
EARLIER = ("projections", "preserve", "scale", "num_classes")
NOT_ARGUMENTS = {
    "constraint", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "checkpoints", "cache_dir",
}  # fmt: skip


@dataclass(frozen=True)
class ModelSpec:
    """Everything needed to build a model, and nothing about how it is trained.

    Args:
        name: the architecture, of the zoo or of timm; with a tag, the weights to start from.
        constraint: see `orthogonalize`, as for `projections`, `preserve` and `scale`.
        num_classes: None for the architecture's default.
        arguments: further arguments of the architecture, such as depth or drop_path_rate.
    """

    name: str
    constraint: Constraint = None
    projections: Projections = "qk"
    preserve: bool = False
    scale: bool = False
    num_classes: int | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.arguments, dict):
            raise ValueError("the name of a model must be a string, and its arguments a dictionary")
        check_constraint(self.constraint, self.projections, self.name)
        if reserved := NOT_ARGUMENTS & set(self.arguments):
            raise ValueError(f"arguments must be the architecture's own, got {', '.join(sorted(reserved))}")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "ModelSpec":
        """The model described by a classifier's options or a run's hyper-parameters; training options are ignored.

        `model_kwargs` has the arguments.  As in version 0.1, it may also have `projections`, `preserve` and `scale`.
        """
        own = {f.name: options[f.name] for f in dataclasses.fields(cls) if f.name in options}
        arguments = dict(options.get("model_kwargs") or own.pop("arguments", None) or {})
        for name in [name for name in EARLIER if name in arguments]:
            value, default = arguments.pop(name), getattr(cls, name)
            if own.get(name, default) not in (default, value):
                raise ValueError(f"{name} is {own[name]!r}, but {value!r} in model_kwargs; give it once")
            own[name] = value
        return cls(**{**own, "arguments": arguments})

    def options(self) -> dict[str, Any]:
        """The model's part of a classifier's options; `from_options` reads them."""
        return {
            "name": self.name,
            **self.attention,
            "num_classes": self.num_classes,
            "model_kwargs": dict(self.arguments) or None,
        }

    @property
    def architecture(self) -> str:
        return self.name.partition(".")[0]

    @property
    def attention(self) -> dict[str, Any]:
        """The arguments of `orthogonalize`."""
        return {name: getattr(self, name) for name in ATTENTION}

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments of the architecture, with the number of classes."""
        return self.arguments | ({} if self.num_classes is None else {"num_classes": self.num_classes})

    def replace(self, **changes: Any) -> "ModelSpec":
        return dataclasses.replace(self, **changes)

    def choose(self, constraint: Choice = "default", **others: Any) -> "ModelSpec":
        """The description with other options of the attention; "default", and None for the others, keep an option."""
        if constraint == "default":
            constraint = self.constraint
        others = {name: value for name, value in others.items() if value is not None}
        return self.replace(constraint=None if constraint == "none" else constraint, **others)
