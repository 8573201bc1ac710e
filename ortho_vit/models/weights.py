"""Checkpoints: `<architecture>.<tag>.safetensors`, each with its card `<architecture>.<tag>.json`.

They live in the repository's `checkpoints/`, or wherever the environment variable ORTHO_VIT_CHECKPOINTS or an argument
says: a folder, or the address (https://...) of one, from which files are fetched into torch.hub's cache.

Nothing is unpickled.  Weights are used if their sha256 is the card's, if they fit the architecture the card names, and
if they are finite and on the manifold.  Otherwise one line says what is wrong, as a `CheckpointError`.
"""

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.models import model_entrypoint
from torch import Tensor, nn

from ortho_vit.errors import CheckpointError
from ortho_vit.models.card import NAME, Card
from ortho_vit.models.core import CoredLinear
from ortho_vit.models.orthogonalize import Choice, Init, Projections, orthogonalize, resolve
from ortho_vit.parameter import stiefel_parameters
from ortho_vit.resources import checkpoints_folder
from ortho_vit.stiefel import orthogonality_error

__all__ = ["Checkpoint", "available", "find_checkpoint", "load_checkpoint"]

FOLDER = checkpoints_folder()
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}  # max |X Xᵀ − I|; narrower types round by more
ROUNDED_TOLERANCE = 5e-2


# ----------------------------------------------------------------------------------------------------------- finding


@dataclass(frozen=True)
class Checkpoint:
    card: Card
    weights: Path

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Checkpoint":
        """The checkpoint at `path`, its weights or its card; the other lies beside it."""
        path = Path(path)
        if path.suffix not in (".safetensors", ".json"):
            raise CheckpointError(
                f"{path}: a checkpoint is a .safetensors file with its .json card beside it"
            )
        weights, card = path.with_suffix(".safetensors"), path.with_suffix(".json")
        for file in (weights, card):
            if not file.is_file():
                raise CheckpointError(f"{file}: no such file")
        return cls(Card.from_json(card.read_bytes(), str(card)), weights)


def available(source: str | os.PathLike[str] | None = None) -> list[str]:
    """The names of the checkpoints in a folder, by default the repository's or ORTHO_VIT_CHECKPOINTS."""
    where = _source(source)
    if _is_url(where):
        return []  # an address cannot be listed
    files = sorted(Path(where).glob("*.safetensors"))
    return [file.stem for file in files if NAME.fullmatch(file.stem) and file.with_suffix(".json").is_file()]


def path_of(name: str) -> str:
    """Where the weights called `name` lie in the default folder."""
    return os.path.join(_source(None), f"{name}.safetensors")


def find_checkpoint(name: str, source: str | os.PathLike[str] | None = None) -> Checkpoint:
    """The checkpoint called `architecture.tag`, from a folder or an address; see the top of this file."""
    where = _source(source)
    if _is_url(where):
        checkpoint = _fetch(name, where)
    elif name in (names := available(where)):
        checkpoint = Checkpoint.open(Path(where) / f"{name}.json")
    else:
        have = (
            f"it has {', '.join(names)}" if names else "it has none; set ORTHO_VIT_CHECKPOINTS to the folder"
        )
        raise CheckpointError(f"no checkpoint {name!r} in {where}; {have}")
    if checkpoint.card.name != name:
        raise CheckpointError(f"{name}: its card is that of {checkpoint.card.name!r}")
    return checkpoint


def _source(source: str | os.PathLike[str] | None) -> str:
    return os.fspath(source or os.environ.get("ORTHO_VIT_CHECKPOINTS") or FOLDER)


def _is_url(source: str) -> bool:
    return "://" in source


def _fetch(name: str, url: str) -> Checkpoint:
    """Download card and weights to the cache.  The card is fetched every time, the weights when its hash is new."""
    card = Card.from_json(_download(f"{url.rstrip('/')}/{name}.json"), f"{url}/{name}.json")
    folder = Path(torch.hub.get_dir()) / "ortho_vit" / card.sha256[:16]
    weights = folder / f"{card.name}.safetensors"
    if not (weights.is_file() and hashlib.sha256(weights.read_bytes()).hexdigest() == card.sha256):
        data = _download(f"{url.rstrip('/')}/{name}.safetensors")
        _check_hash(data, card, f"{url}/{name}.safetensors")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(weights, data)
    return Checkpoint(card, weights)


def _download(url: str) -> bytes:
    if not url.startswith(("https://", "http://", "file://")):
        raise CheckpointError(f"{url}: only https, http and file addresses are fetched")
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.read()
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        raise CheckpointError(f"{url}: cannot be fetched ({error})") from error


# ----------------------------------------------------------------------------------------------------------- loading


def load_checkpoint(
    checkpoint: Checkpoint,
    *,
    weights: bool = True,
    constraint: Choice = "default",
    projections: Projections | None = None,
    preserve: bool | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Build the card's model and load its weights (unless `weights` is False).

    The model is constrained as its card says.  Another `constraint`, `projections` or `preserve` (see `orthogonalize`)
    replaces that after the weights are loaded; `constraint=None` makes every parameter free.  Other keywords go to
    timm and win over the card's: `num_classes` gives a new head, `img_size` resamples the position embedding, `in_chans`
    spreads the first convolution over other channels.
    """
    card = checkpoint.card
    if not timm.is_model(card.architecture):
        raise CheckpointError(f"{card.name}: there is no architecture {card.architecture!r}")
    model = _build(card, kwargs)
    init: Init = "keep" if weights else "polar"
    orthogonalize(model, card.constraint, projections=card.projections, init=init, preserve=card.preserve)
    if weights:
        _load(model, _adapt(_read(checkpoint), model), card.name)
        check_weights(model, card.name)
    wanted = resolve(constraint, card.constraint)
    projections = card.projections if projections is None else projections
    preserve = card.preserve if preserve is None else preserve
    if (wanted, projections, preserve) == (card.constraint, card.projections, card.preserve):
        return model
    return orthogonalize(_release(model), wanted, projections=projections, preserve=preserve)


def _release(model: nn.Module) -> nn.Module:
    """Make every constrained parameter a free one, its values as they are, and multiply cores into their weights."""
    for module in model.modules():
        if isinstance(module, CoredLinear):
            module.fold()
    for _, parameter in list(stiefel_parameters(model)):
        del parameter.blocks, parameter.rows
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    model.__dict__.pop("orthogonal", None)
    return model


def _build(card: Card, kwargs: Mapping[str, Any]) -> nn.Module:
    """The architecture as timm builds it, nothing constrained yet."""
    overlay = {
        "tag": card.tag,
        "mean": tuple(card.mean),
        "std": tuple(card.std),
        "num_classes": len(card.classes),
        "label_names": tuple(card.classes),
        "input_size": tuple(card.golden.shape[1:]),
        "license": card.licence,
    }
    arguments = {**card.arguments, **kwargs}
    if model_entrypoint(card.architecture).__module__.startswith("ortho_vit."):
        arguments["constraint"] = "none"
    try:
        return timm.create_model(card.architecture, pretrained_cfg_overlay=overlay, **arguments)
    except (TypeError, AssertionError) as error:
        raise CheckpointError(
            f"{card.name}: {card.architecture} cannot be built with {arguments} ({error})"
        ) from error


def _read(checkpoint: Checkpoint) -> dict[str, Tensor]:
    data = checkpoint.weights.read_bytes()
    _check_hash(data, checkpoint.card, str(checkpoint.weights))
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{checkpoint.weights}: not a safetensors file ({error})") from error


def _check_hash(data: bytes, card: Card, source: str) -> None:
    digest = hashlib.sha256(data).hexdigest()
    if digest != card.sha256:
        raise CheckpointError(
            f"{source}: sha256 is {digest}, but its card says {card.sha256}: truncated or changed"
        )


def _adapt(tensors: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Fit head, position embedding and first convolution to a model of other classes, image size or channels."""
    cfg, own = model.pretrained_cfg, model.state_dict()
    head = tuple(f"{cfg['classifier']}.{name}" for name in ("weight", "bias"))
    if model.num_classes != cfg["num_classes"]:
        tensors = {key: x for key, x in tensors.items() if key not in head}
        tensors |= {key: own[key] for key in head if key in own}
        model.new_head = True  # untrained
    conv, position = f"{cfg['first_conv']}.weight", "pos_embed"
    if conv in tensors and conv in own and tensors[conv].ndim == own[conv].ndim == 4:
        tensors = {**tensors, conv: _spread_channels(tensors[conv], own[conv].shape[1])}
    if position in tensors and position in own and tensors[position].shape[1] != own[position].shape[1]:
        prefix = 0 if getattr(model, "no_embed_class", False) else model.num_prefix_tokens
        size = list(model.patch_embed.grid_size)
        tensors = {
            **tensors,
            position: resample_abs_pos_embed(tensors[position], size, num_prefix_tokens=prefix),
        }
    return tensors


def _spread_channels(weight: Tensor, channels: int) -> Tensor:
    """A convolution over `channels` inputs that answers as before to an input that is equal in every channel."""
    before = weight.shape[1]
    if channels <= before:
        return torch.stack([weight[:, i::channels].sum(1) for i in range(channels)], 1)
    copies = [len(range(i, channels, before)) for i in range(before)]
    return torch.stack([weight[:, i % before] / copies[i % before] for i in range(channels)], 1)


def _load(model: nn.Module, tensors: dict[str, Tensor], name: str) -> None:
    own = model.state_dict()
    missing, unexpected = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or unexpected:
        what = [f"no {key}" for key in missing[:1]] + [f"an unknown {key}" for key in unexpected[:1]]
        more = f", and {count} more" if (count := len(missing) + len(unexpected) - len(what)) else ""
        raise CheckpointError(f"{name}: the weights are of another architecture: {' and '.join(what)}{more}")
    for key, x in own.items():
        if tensors[key].shape != x.shape:
            raise CheckpointError(
                f"{name}: the weights are of another architecture: {key} is {tuple(tensors[key].shape)}, "
                f"not {tuple(x.shape)}"
            )
    model.load_state_dict(tensors)


def check_weights(model: nn.Module, name: str) -> None:
    """Raise for weights that are not finite, or not on the manifold where they are constrained."""
    for key, x in model.state_dict().items():
        if not x.isfinite().all():
            raise CheckpointError(f"{name}: {key} has entries that are not finite")
    for key, parameter in stiefel_parameters(model):
        error, limit = orthogonality_error(parameter), TOLERANCE.get(parameter.dtype, ROUNDED_TOLERANCE)
        if not error <= limit:
            raise CheckpointError(
                f"{name}: {key} is off the Stiefel manifold: max |X Xᵀ − I| = {error:.2g}, more than {limit:.0e}"
            )


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    trial = path.with_name(f".{path.name}.{os.getpid()}")
    trial.write_bytes(data)
    trial.replace(path)
