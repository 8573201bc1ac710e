"""The card of trained weights: all that is needed to build the model, to verify it and to train it again."""

import base64
import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_origin

import torch
from torch import Tensor, nn

from ortho_vit.errors import CheckpointError
from ortho_vit.models.orthogonalize import Constraint, Projections
from ortho_vit.models.spec import ATTENTION, ModelSpec
from ortho_vit.pixels import normalize

__all__ = ["Card", "CheckpointError", "Golden", "synthetic_images"]

NAME = re.compile(r"[A-Za-z0-9_]+\.[A-Za-z0-9_.-]+")  # architecture.tag; no path can hide in it
GOLDEN_TOLERANCE = 1e-3  # between machines; float32 kernels differ by about 1e-5
SYNTHETIC = "synthetic"


def synthetic_images(shape: Sequence[int]) -> Tensor:
    """Images (n, channels, height, width) of uint8 noise in squares of 1, 2 or 4 pixels: the same on every machine."""
    i, c, y, x = torch.meshgrid(*(torch.arange(k) for k in shape), indexing="ij")
    size = 2 ** (i % 3)
    value = ((i * shape[1] + c) * 4096 + y // size) * 4096 + x // size + 1
    for _ in range(3):  # an integer hash: multiply, then fold the high bits into the low ones
        value = (value * 73244475) % 2**32
        value = value ^ (value >> 16)
    return (value % 256).to(torch.uint8)


KINDS: dict[Any, str] = {
    dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a whole number", float: "a number",
}  # fmt: skip


@dataclass(frozen=True)
class Golden:
    """Images, their labels, and the logits that the model must compute for them."""

    shape: list[int]  # n, channels, height, width
    pixels: str  # base64 of uint8, or "synthetic"
    labels: list[int]  # empty for synthetic images
    logits: list[list[float]]

    @classmethod
    def of(cls, pixels: Tensor, labels: Sequence[int], logits: Tensor) -> "Golden":
        if pixels.dtype != torch.uint8 or pixels.ndim != 4:
            rule = "pixels must be uint8 (n, channels, height, width)"
            raise CheckpointError(f"{rule}, got {pixels.dtype} {tuple(pixels.shape)}")
        synthetic = not labels and torch.equal(pixels, synthetic_images(pixels.shape))
        data = SYNTHETIC if synthetic else base64.b64encode(pixels.contiguous().numpy().tobytes()).decode()
        rounded = [[round(x, 6) for x in row] for row in logits.tolist()]
        return cls(list(pixels.shape), data, list(labels), rounded)

    def images(self) -> Tensor:
        if self.pixels == SYNTHETIC:
            if len(self.shape) != 4 or not all(isinstance(n, int) and 0 < n <= 4096 for n in self.shape):
                raise ValueError(f"shape must be (n, channels, height, width), got {self.shape}")
            return synthetic_images(self.shape)
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
    scale: bool = False
    crop_pct: float = 1.0  # share of the shorter side that evaluation keeps

    @property
    def architecture(self) -> str:
        return self.name.partition(".")[0]

    @property
    def tag(self) -> str:
        return self.name.partition(".")[2]

    @property
    def optimizer_name(self) -> str:
        """The name of the optimizer's class, "" if the card does not have it."""
        return str(self.optimizer.get("class_path", "")).rpartition(".")[2]

    @property
    def spec(self) -> ModelSpec:
        """The description of the model; its name is the architecture, without the tag."""
        options = {key: getattr(self, key) for key in (*ATTENTION, "arguments")}
        return ModelSpec.from_options(options | {"name": self.architecture, "num_classes": len(self.classes)})

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str) -> "Card":
        """Read a card.  Unknown keys are ignored, as later versions may add some."""
        try:
            stored = json.loads(text)
            earlier = {"scale": False, "crop_pct": crop_pct_of(stored["recipe"])}  # not in version 0.1
            values = {f.name: (earlier | stored)[f.name] for f in dataclasses.fields(cls)}
            card = cls(**values | {"golden": Golden(**stored["golden"])})
            card.golden.images()
            card._check_kinds()
            card._check_values()
        except KeyError as error:
            raise CheckpointError(f"{source}: the card lacks {error.args[0]!r}") from error
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{source}: not a checkpoint's card ({reason})") from error
        return card

    def _check_kinds(self) -> None:
        for field in dataclasses.fields(self):
            kind: Any = get_origin(field.type) or field.type
            value = getattr(self, field.name)
            if kind in KINDS and not isinstance(value, (int, float) if kind is float else kind):
                raise ValueError(f"{field.name} must be {KINDS[kind]}, got {value!r:.80}")
        if not all(isinstance(name, str) for name in self.classes):
            raise ValueError(f"classes must be names, got {self.classes!r:.80}")
        channels = self.golden.shape[1]
        for name, values in (("mean", self.mean), ("std", self.std)):
            numbers = all(isinstance(x, int | float) and math.isfinite(x) for x in values)
            if not numbers or len(values) != channels or (name == "std" and min(values) <= 0):
                what = f"{name} must have a number for each of {channels} channels"
                raise ValueError(f"{what}, got {values!r:.80}")

    def _check_values(self) -> None:
        golden, count = self.golden, len(self.classes)
        if not NAME.fullmatch(self.name):
            rule = "architecture.tag, of letters, digits, '_', '-' and '.'"
            raise ValueError(f"name must be {rule}, got {self.name!r}")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct must be in (0, 1], got {self.crop_pct}")
        if any(len(row) != count for row in golden.logits):
            raise ValueError(f"{count} classes, but {len(golden.logits[0])} logits")
        unlabelled = golden.pixels == SYNTHETIC and not golden.labels
        per_image = unlabelled or len(golden.labels) == golden.shape[0]
        if not per_image or any(label not in range(count) for label in golden.labels or ()):
            raise ValueError(f"labels must be one of the {count} classes per image, got {golden.labels}")
        self.spec  # noqa: B018  (checks constraint, projections and arguments)
        if not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ValueError(f"sha256 must be 64 hexadecimal digits, got {self.sha256!r}")

    def golden_error(self, model: nn.Module) -> float:
        """The largest difference between the card's logits and the model's."""
        logits = golden_logits(model, self.golden.images(), self.mean, self.std)
        return (logits - torch.tensor(self.golden.logits)).abs().max().item()

    def check_golden(self, model: nn.Module) -> float:
        """The same; raises CheckpointError if it is above `GOLDEN_TOLERANCE`."""
        error = self.golden_error(model)
        if not error <= GOLDEN_TOLERANCE:
            by = f"{error:.2g}, more than {GOLDEN_TOLERANCE:.0e}"
            raise CheckpointError(f"{self.name}: logits differ from the card's by {by}")
        return error


def golden_logits(model: nn.Module, pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """The logits of uint8 images (n, channels, height, width), in evaluation mode."""
    parameter = next(model.parameters())
    images = normalize(pixels, mean, std)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return model(images.to(parameter.device, parameter.dtype)).float().cpu()
    finally:
        model.train(was_training)


def crop_pct_of(recipe: Any) -> float:
    """The share of the shorter side that a recipe's data module keeps in evaluation: by default 7/8 for ImageFolder."""
    data = recipe.get("data") if isinstance(recipe, dict) else None
    if not isinstance(data, dict):
        return 1.0
    default = 0.875 if str(data.get("class_path")).endswith(".ImageFolder") else 1.0
    return (data.get("init_args") or {}).get("crop_pct", default)
