"""Weights: finding, reading and writing them, and fitting them to a model.

Trained weights of the zoo are `<architecture>.<tag>.safetensors`, each with its card `<architecture>.<tag>.json`.  They are
searched for in the folder or at the address in the environment variable ORTHO_VIT_CHECKPOINTS, then among those that come
with the package.  From an address (https://...) they are downloaded into torch.hub's cache.

Run checkpoints (`.ckpt`) and plain state dicts are read with `weights_only=True`; no code in them is executed.  Weights are
loaded only if their sha256 is the card's, names, shapes and types fit the model, every number is finite, and weights
trained on the manifold are on it.  Otherwise a one-line `CheckpointError` says what is wrong.
"""

import contextlib
import hashlib
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from timm.models import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from ortho_vit.errors import CheckpointError, did_you_mean
from ortho_vit.files import download, lock, read_address, write_whole
from ortho_vit.models.card import NAME, Card
from ortho_vit.parameter import cut_blocks, stiefel_parameters
from ortho_vit.resources import checkpoints_folder, output_folder
from ortho_vit.stiefel import orthogonality_error, polar

__all__ = ["Checkpoint", "available", "find_checkpoint", "load_weights", "read_checkpoint", "read_weights"]

Source = str | os.PathLike[str]
Tensors = Mapping[str, Tensor]
ENDINGS = (".safetensors", ".json")  # of weights and of their card
PICKLED = (".ckpt", ".pt", ".pth", ".bin")
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}  # max |X Xᵀ − I|; narrower types round by more
ROUNDED_TOLERANCE = 5e-2
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# ----------------------------------------------------------------------------------------------------------- finding


def export_folder() -> Path:
    """The default folder for new weights: ORTHO_VIT_CHECKPOINTS, the repository's checkpoints/, or ./checkpoints."""
    place = os.environ.get("ORTHO_VIT_CHECKPOINTS")
    return Path(place) if place and not _is_address(place) else output_folder()


def _is_address(source: str) -> bool:
    return "://" in source


def is_place(source: str) -> bool:
    """Whether `source` is a file, a folder or an address, and not the name of a model."""
    is_path = "/" in source or os.sep in source or source.endswith((*ENDINGS, *PICKLED))
    return is_path or Path(source).is_file()


def _places(source: Source | None) -> list[str]:
    """Where names are looked up.  Addresses come last: what they hold cannot be listed, so they are asked for any name."""
    if source is not None:
        return [os.fspath(source)]
    places = [os.environ.get("ORTHO_VIT_CHECKPOINTS"), str(checkpoints_folder())]
    return sorted(filter(None, places), key=lambda place: _is_address(place) and not place.endswith(ENDINGS))


@dataclass(frozen=True)
class Checkpoint:
    """Trained weights of the zoo and their card."""

    card: Card
    weights: Path

    @classmethod
    def open(cls, path: Source) -> "Checkpoint":
        """The checkpoint at `path`: its weights, its card, their address, or a folder with one checkpoint in it."""
        if _is_address(os.fspath(path)):
            return _download(os.fspath(path))
        path = Path(path)
        if path.is_dir():
            names = _names_in(path)
            if len(names) != 1:
                have = f"name one: {', '.join(names)}" if names else "a .safetensors file with its .json card"
                raise CheckpointError(f"{path} has {len(names) or 'no'} checkpoints; {have}")
            path = path / f"{names[0]}.json"
        if path.suffix not in ENDINGS:
            raise CheckpointError(
                f"{path}: a checkpoint is a .safetensors file with its .json card beside it; "
                "`train.py export` makes one from a run"
            )
        finish_exports(path.parent)
        weights, card = path.with_suffix(".safetensors"), path.with_suffix(".json")
        for file in (weights, card):
            if not file.is_file():
                raise CheckpointError(f"{file}: no such file")
        return cls(Card.from_json(card.read_bytes(), str(card)), weights)

    def read(self) -> dict[str, Tensor]:
        """The weights; raises CheckpointError if they are not those of the card."""
        data = self.weights.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        if digest != self.card.sha256:
            raise CheckpointError(
                f"{self.weights}: sha256 is {digest}, but its card says {self.card.sha256}: truncated or changed"
            )
        try:
            return safetensors.torch.load(data)
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{self.weights}: not a safetensors file ({error})") from error


def available(source: Source | None = None) -> list[str]:
    """The names of the checkpoints in a folder; by default in ORTHO_VIT_CHECKPOINTS and in the package."""
    return sorted({name for place in _places(source) for name in _names_in(place)})


def _names_in(place: Source) -> list[str]:
    if _is_address(os.fspath(place)):
        return []
    folder = Path(place)
    finish_exports(folder)
    files = sorted(folder.glob("*.safetensors"))
    return [file.stem for file in files if NAME.fullmatch(file.stem) and file.with_suffix(".json").is_file()]


def find_checkpoint(name: Source, source: Source | None = None) -> Checkpoint:
    """The checkpoint named architecture.tag, or the one in a file, in a folder or at an address.

    A name is searched for in `source`, a folder, file or address; the top of this file describes the default.
    """
    name = os.fspath(name)
    if source is None and name not in available() and (is_place(name) or Path(name).is_dir()):
        return Checkpoint.open(name)
    places = _places(source)
    for place in places:
        is_file = place.endswith(ENDINGS)
        if is_file or _is_address(place) or name in _names_in(place):
            found = Checkpoint.open(place if is_file else f"{place.rstrip('/')}/{name}.json")
            if found.card.name != name:
                raise CheckpointError(f"{name}: its card is that of {found.card.name!r}")
            return found
    hint = did_you_mean(name, [other for place in places for other in _names_in(place)])
    hint = hint or "; list_models(pretrained=True) has the names, ORTHO_VIT_CHECKPOINTS adds a folder"
    raise CheckpointError(f"no checkpoint {name!r} in {' or '.join(places)}{hint}")


def free_counterpart(card: Card) -> str | None:
    """The weights of the same architecture on the same data without a constraint, if there are any."""
    cards = (find_checkpoint(name).card for name in available())
    wanted = (card.architecture, card.data, None)
    return next((c.name for c in cards if (c.architecture, c.data, c.constraint) == wanted), None)


def _download(address: str) -> Checkpoint:
    """Download card and weights to the cache.  The card is downloaded every time, the weights when its hash is new."""
    stem, _, ending = address.rpartition(".")
    if f".{ending}" not in ENDINGS:
        raise CheckpointError(
            f"{address} is not the address of a .safetensors file; for a name in a folder at an address, give the name, and "
            "the address as ORTHO_VIT_CHECKPOINTS"
        )
    try:
        card = Card.from_json(b"".join(read_address(f"{stem}.json")), f"{stem}.json")
        weights = Path(torch.hub.get_dir()) / "ortho_vit" / card.sha256[:16] / f"{card.name}.safetensors"
        if not (weights.is_file() and hashlib.sha256(weights.read_bytes()).hexdigest() == card.sha256):
            download(f"{stem}.safetensors", weights, "sha256", card.sha256)
    except (ConnectionError, ValueError) as error:
        raise CheckpointError(str(error)) from error
    return Checkpoint(card, weights)


# ----------------------------------------------------------------------------------------------------------- writing


def write_checkpoint(
    weights: Path, data: bytes, card: Card, overwrite: bool, check: Callable[[Checkpoint], Any]
) -> None:
    """Write weights and card, after `check` has read the weights back.

    Both are staged under temporary names first.  If the process is killed before both are complete, the old ones stay;
    after that, whoever looks into the folder next completes the export.
    """
    text = card.to_json()
    card = Card.from_json(text, f"{card.name}.json")
    weights.parent.mkdir(parents=True, exist_ok=True)
    finish_exports(weights.parent)
    with only_writer(weights):
        if weights.exists() and not overwrite:
            raise CheckpointError(f"{weights} exists already; overwrite=True replaces it")
        try:
            write_whole(_staged(weights), data)
            check(Checkpoint(card, _staged(weights)))
            write_whole(_staged(weights.with_suffix(".json")), text.encode())
        except BaseException:
            _staged(weights).unlink(missing_ok=True)
            raise
        _publish(weights)


def finish_exports(folder: Path) -> None:
    """Complete exports that were killed: where a card is staged, its weights are complete too."""
    for card in folder.glob(".*.json.new"):
        weights = folder / f"{card.name.removeprefix('.').removesuffix('.json.new')}.safetensors"
        try:
            with contextlib.suppress(CheckpointError), only_writer(weights):  # unless the export still runs
                if card.exists():
                    _publish(weights)
        except OSError as error:
            message = f"{folder}: an export was interrupted and cannot be completed ({error})"
            raise CheckpointError(message) from error


def _staged(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _publish(weights: Path) -> None:
    """Replace weights and card by their staged versions.  The old card goes first: it never describes new weights."""
    card = weights.with_suffix(".json")
    if _staged(weights).exists():
        card.unlink(missing_ok=True)
        _staged(weights).replace(weights)
    _staged(card).replace(card)


@contextlib.contextmanager
def only_writer(weights: Path) -> Iterator[None]:
    """A context in which no other process writes weights of this name; raises CheckpointError if one does already."""
    path = weights.with_name(f".{weights.stem}.lock")
    while True:
        try:
            file = lock(path)
        except BlockingIOError as error:
            message = f"{weights} is being written by {error}; wait, or choose another name"
            raise CheckpointError(message) from error
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            break
        file.close()  # its previous owner has just removed it
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


# ----------------------------------------------------------------------------------------------------------- reading


def read_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """A `.ckpt` file, read with `weights_only=True`: tensors and plain values, no code."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no checkpoint {path}" + (": it is a folder" if path.is_dir() else ""))
    try:
        with warnings.catch_warnings(action="ignore"):  # about pickles, which are refused anyway
            _check_records(path)
            content = torch.load(path, map_location=map_location, weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # damaged files raise many types; torch's message suggests weights_only=False
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            reason = f"it holds more than tensors and plain values: it asks for {found[1]}"
            raise CheckpointError(f"{path} is refused: {reason}") from error
        reason = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
        raise CheckpointError(f"{path} is damaged or not a checkpoint{reason}; use another copy") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a checkpoint: it holds a {type(content).__name__}")
    return content


def _check_records(path: Path) -> None:
    """Raise for compressed records and wrong checksums: torch never writes the former and does not check the latter."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        compressed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
        if compressed or sum(record.file_size for record in records) > path.stat().st_size:
            raise CheckpointError(f"{path} is refused: its records are compressed, which torch never does")
        if damaged := archive.testzip():
            raise ValueError(f"{damaged} has another checksum")


def read_weights(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state dict in a safetensors file, a plain state dict or a run checkpoint, and the run's hyper-parameters.

    The hyper-parameters of other files are empty.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        if not path.is_file():
            raise CheckpointError(f"no weights {path}")
        try:
            return safetensors.torch.load_file(path), {}
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged or not a safetensors file ({error})") from error
    content, run = read_checkpoint(path), {}
    if "state_dict" in content:
        run, state = content.get("hyper_parameters", {}), content["state_dict"]
        state = state if isinstance(state, dict) else {}
        content = {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
    if not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path} has no weights of a classifier in it")
    return content, run if isinstance(run, dict) else {}


# ----------------------------------------------------------------------------------------------------------- loading


def is_head(name: str) -> bool:
    """Whether a parameter belongs to the classifier; distilled models have two."""
    return name.partition(".")[0] in ("head", "head_dist", "head_drop")


def load_weights(model: nn.Module, weights: Tensors, source: str, *, orthonormal: bool = False) -> list[str]:
    """Load weights of the same architecture, and return the names of the head's parameters if it stays untrained.

    Position embeddings, patches and channels are resampled to the model's sizes.  A head for another number of classes is
    not loaded.  `orthonormal` states that the weights were trained on the manifold, so weights off it are damaged.
    """
    own = model.state_dict()
    fitted = _fit(dict(weights), model, own, source)
    classifier = _config(model, "classifier")
    heads = {k for k in own.keys() | fitted.keys() if is_head(k) or k.rpartition(".")[0] in classifier}
    head = sorted(k for k in heads & own.keys() if k not in fitted or fitted[k].shape != own[k].shape)
    fitted = {k: v for k, v in fitted.items() if k not in head and (k in own or k not in heads)}
    _check_names_and_shapes(own, fitted, head, source)
    check_types(own, fitted, source)
    check_finite(fitted, source)
    if orthonormal:
        check_manifold(model, fitted, source)
    model.load_state_dict(fitted, strict=False)
    return head


def _config(model: nn.Module, key: str) -> list[str]:
    """An entry of timm's configuration that names one, several or no layers, as a list."""
    value = (getattr(model, "pretrained_cfg", None) or {}).get(key) or ()
    return [value] if isinstance(value, str) else list(value)


def _fit(weights: dict[str, Tensor], model: nn.Module, own: Tensors, source: str) -> dict[str, Tensor]:
    """The weights resampled to the model's channels and, by timm's rules, its patch size and number of positions."""
    for conv in _config(model, "first_conv"):
        key = f"{conv}.weight"
        if key in weights and key in own and weights[key].ndim == own[key].ndim == 4:
            weights[key] = spread_channels(weights[key], own[key].shape[1])
    # timm would read the state dict from under these keys
    nested = {"model", "state_dict", "encoder"} & weights.keys()
    if not isinstance(model, VisionTransformer) or nested:
        return weights
    try:
        return checkpoint_filter_fn(weights, model)
    except (RuntimeError, ValueError, IndexError, KeyError, AttributeError) as error:
        reason = f"it cannot be resampled ({' '.join(str(error).split())})"
        raise CheckpointError(f"{source} is of another architecture: {reason}") from error


def spread_channels(weight: Tensor, channels: int) -> Tensor:
    """The weight for `channels` input channels, with the same output for images whose channels are all equal.

    timm's `adapt_input_conv` changes that output for two channels, and only converts from three.
    """
    before = weight.shape[1]
    if channels <= before:
        return torch.stack([weight[:, i::channels].sum(1) for i in range(channels)], 1)
    copies = [len(range(i, channels, before)) for i in range(before)]
    return torch.stack([weight[:, i % before] / copies[i % before] for i in range(channels)], 1)


def _check_names_and_shapes(own: Tensors, weights: Tensors, head: Sequence[str], source: str) -> None:
    missing, unknown = sorted(own.keys() - weights.keys() - set(head)), sorted(weights.keys() - own.keys())
    other = f"{source} is of another architecture"
    if missing:
        raise CheckpointError(f"{other}: it has no {missing[0]!r} ({len(missing)} such)")
    if unknown:
        raise CheckpointError(f"{other}: it has an unknown {unknown[0]!r} ({len(unknown)} such)")
    different = [key for key in weights if weights[key].shape != own[key].shape]
    for key in different[:1]:
        shapes = f"{tuple(weights[key].shape)}, not {tuple(own[key].shape)}"
        raise CheckpointError(f"{other}: its {key!r} is {shapes} ({len(different)} such)")


def check_types(own: Tensors, weights: Tensors, source: str) -> None:
    """Raise where weights are integers and the model's are not, or the other way round."""
    for key, x in weights.items():
        if key in own and x.dtype != own[key].dtype and not (x.dtype in FLOATS and own[key].dtype in FLOATS):
            raise CheckpointError(f"{source} is refused: its {key!r} is {x.dtype}, not {own[key].dtype}")


def check_finite(weights: Tensors, source: str) -> None:
    bad = next((key for key, value in weights.items() if not value.isfinite().all()), None)
    if bad is not None:
        raise CheckpointError(f"{source} is refused: {bad!r} has entries that are not finite")


def check_manifold(model: nn.Module, weights: Tensors, source: str) -> None:
    """Raise where weights for the model's constrained parameters are not orthonormal."""
    for name, parameter in stiefel_parameters(model):
        X = weights.get(name)
        if X is None or X.shape != parameter.shape:
            continue
        error = orthogonality_error(cut_blocks(X.detach(), parameter.blocks, parameter.rows))
        limit = TOLERANCE.get(X.dtype, ROUNDED_TOLERANCE)
        if not error <= limit:
            raise CheckpointError(
                f"{source} is refused: its {name!r} is off the manifold by {error:.2g}, more than {limit:.0e}, where its "
                "training has kept it; the file is damaged, use another copy"
            )


@torch.no_grad()
def project_rounded(model: nn.Module, weights: Tensors) -> None:
    """Project the constrained parameters whose weights were stored in float16 or bfloat16, which rounds them."""
    for name, parameter in stiefel_parameters(model):
        if name in weights and weights[name].dtype not in TOLERANCE:
            X = parameter.matrices()
            X.copy_(polar(X))


def check_weights(model: nn.Module, source: str) -> None:
    """Raise for a model with weights that are not finite, or not on the manifold where they are constrained."""
    weights = model.state_dict()
    check_finite(weights, source)
    check_manifold(model, weights, source)
