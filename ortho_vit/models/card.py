"""The card beside a checkpoint: all that is needed to build the model, to trust it and to make it again."""

import base64
import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ortho_vit.errors import CheckpointError
from ortho_vit.models.orthogonalize import Constraint, Projections

__all__ = ["Card", "CheckpointError", "Golden"]

NAME = re.compile(r"[A-Za-z0-9_]+\.[A-Za-z0-9_.-]+")  # architecture.tag; no path can hide in it
RESERVED = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
GOLDEN_TOLERANCE = 1e-3  # between machines; float32 kernels differ by about 1e-5


@dataclass(frozen=True)
class Golden:
    """Pictures, what they show, and the logits they must give."""

    shape: list[int]  # n, channels, height, width
    pixels: str  # base64 of uint8
    labels: list[int]
    logits: list[list[float]]

    @classmethod
    def of(cls, pixels: Tensor, labels: Sequence[int], logits: Tensor) -> "Golden":
        if pixels.dtype != torch.uint8 or pixels.ndim != 4:
            raise CheckpointError(
                f"pixels must be uint8 (n, channels, height, width), got {pixels.dtype} {tuple(pixels.shape)}"
            )
        data = base64.b64encode(pixels.contiguous().numpy().tobytes()).decode()
        rounded = [[round(x, 6) for x in row] for row in logits.tolist()]
        return cls(list(pixels.shape), data, list(labels), rounded)

    def images(self) -> Tensor:
        data = bytearray(base64.b64decode(self.pixels))
        return torch.frombuffer(data, dtype=torch.uint8).view(self.shape)


@dataclass(frozen=True)
class Card:
    name: str  # architecture.tag
    arguments: dict[str, Any]  # of the architecture's constructor, beyond its defaults
    constraint: Constraint
    projections: Projections
    preserve: bool
    optimizer: dict[str, Any]
    recipe: dict[str, Any]
    data: str
    classes: list[str]
    mean: list[float]
    std: list[float]
    accuracy: dict[str, float]
    command: str  # that measured the accuracy
    orthogonality_error: float
    parameters: int
    sha256: str  # of the weights
    versions: dict[str, str]
    licence: str
    golden: Golden

    @property
    def architecture(self) -> str:
        return self.name.partition(".")[0]

    @property
    def tag(self) -> str:
        return self.name.partition(".")[2]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str) -> "Card":
        """Read a card.  Keys it does not know are left for later versions to use."""
        try:
            fields = json.loads(text)
            golden = Golden(**fields["golden"])
            known = {f.name: fields[f.name] for f in dataclasses.fields(cls)}
            card = cls(**{**known, "golden": golden})
            card.golden.images()
            card._check()
        except KeyError as error:
            raise CheckpointError(f"{source}: the card lacks {error.args[0]!r}") from error
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"{source}: not a checkpoint's card ({_one_line(error)})") from error
        return card

    def _check(self) -> None:
        if not isinstance(self.arguments, dict) or not isinstance(self.classes, list):
            raise ValueError("arguments must be an object and classes a list")
        if not NAME.fullmatch(self.name):
            raise ValueError(
                f"name must be architecture.tag, of letters, digits, '_', '-' and '.', got {self.name!r}"
            )
        if self.constraint not in ("within", "across", None) or self.projections not in get_args(Projections):
            raise ValueError(f"no such constraint: {self.constraint!r} of {self.projections!r}")
        if any(len(row) != len(self.classes) for row in self.golden.logits):
            raise ValueError(f"{len(self.classes)} classes, but {len(self.golden.logits[0])} logits")
        labels = self.golden.labels
        if len(labels) != self.golden.shape[0] or any(x not in range(len(self.classes)) for x in labels):
            raise ValueError(f"labels must be one of the {len(self.classes)} classes a picture, got {labels}")
        if reserved := RESERVED & set(self.arguments):
            raise ValueError(f"arguments must be the architecture's own, got {', '.join(sorted(reserved))}")
        if not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ValueError(f"sha256 must be 64 hexadecimal digits, got {self.sha256!r}")

    def golden_error(self, model: nn.Module) -> float:
        """The largest difference between the card's logits and the model's."""
        logits = golden_logits(model, self.golden.images(), self.mean, self.std)
        return (logits - torch.tensor(self.golden.logits)).abs().max().item()

    def check_golden(self, model: nn.Module) -> None:
        error = self.golden_error(model)
        if not error <= GOLDEN_TOLERANCE:
            raise CheckpointError(
                f"{self.name}: logits differ from the card's by {error:.2g}, more than {GOLDEN_TOLERANCE:.0e}"
            )


def golden_logits(model: nn.Module, pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """The logits of uint8 pictures (n, channels, height, width), in evaluation mode."""
    parameter = next(model.parameters())
    shift, scale = (torch.tensor(x).view(-1, 1, 1) for x in (mean, std))
    images = (pixels.float() / 255 - shift) / scale
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return model(images.to(parameter.device, parameter.dtype)).float().cpu()
    finally:
        model.train(was_training)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
