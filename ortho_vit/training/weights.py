"""Weights from a file: what a user may have downloaded, so nothing is unpickled."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

PICKLED = (".ckpt", ".pt", ".pth", ".bin")


def is_file(source: str) -> bool:
    """Whether `source` means a file; the names of models have no such endings."""
    return Path(source).suffix in (".safetensors", *PICKLED) or "/" in source or Path(source).is_file()


def read_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """A `.ckpt` file, read with `weights_only=True`: tensors and plain values, no code."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint {path}" + (": it is a folder" if path.is_dir() else ""))
    try:
        with warnings.catch_warnings(action="ignore"):  # of pickles that are refused anyway
            content = torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is refused: it holds more than tensors and plain values ({str(error).splitlines()[0]})"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise ValueError(
            f"{path} is damaged or no checkpoint at all ({str(error).splitlines()[0]})"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no checkpoint: it holds a {type(content).__name__}")
    return content


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The state dict of a model, from safetensors, from a plain state dict, or from a checkpoint of a run."""
    path = Path(path)
    if path.suffix == ".safetensors":
        if not path.is_file():
            raise FileNotFoundError(f"no weights {path}")
        try:
            return load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path} is damaged or no safetensors file ({error})") from error
    content = read_checkpoint(path)
    if "state_dict" in content:
        content = {
            k.removeprefix("model."): v for k, v in content["state_dict"].items() if k.startswith("model.")
        }
    if not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} has no weights of a classifier in it")
    return content


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Load the weights of a file into a model of the same architecture; a head of other classes is left as it is."""
    weights = read_weights(path)
    if isinstance(model, VisionTransformer):
        weights = _resample(weights, model)
    ours = model.state_dict()
    head = {
        k for k in ours if k.split(".")[0] == "head" and k in weights and weights[k].shape != ours[k].shape
    }
    weights = {key: value for key, value in weights.items() if key not in head}
    missing, unexpected = sorted(ours.keys() - weights.keys() - head), sorted(weights.keys() - ours.keys())
    other = [k for k in ours if k in weights and weights[k].shape != ours[k].shape]
    for what, names in (("has no", missing), ("has an unknown", unexpected)):
        if names:
            raise ValueError(f"{path} is of another architecture: it {what} {names[0]!r} ({len(names)} such)")
    if other:
        shapes = f"{tuple(weights[other[0]].shape)}, not {tuple(ours[other[0]].shape)}"
        raise ValueError(
            f"{path} is of another architecture: its {other[0]!r} is {shapes} ({len(other)} such)"
        )
    bad = next((key for key, value in weights.items() if not value.isfinite().all()), None)
    if bad is not None:
        raise ValueError(f"{path} is refused: {bad!r} has entries that are not finite")
    model.load_state_dict(weights, strict=False)
    return model


def _resample(weights: dict[str, Tensor], model: VisionTransformer) -> dict[str, Tensor]:
    """To the model's number of channels, and by timm's rules to its size of patches and number of positions."""
    first = weights.get("patch_embed.proj.weight")
    if first is not None and first.ndim == 4:
        old, new = first.shape[1], model.patch_embed.proj.in_channels
        if new == 1:
            first = first.sum(1, keepdim=True)
        elif new != old:  # each of theirs again and again, with the same sum
            first = first.repeat(1, -(-new // old), 1, 1)[:, :new] * (old / new)
        weights = weights | {"patch_embed.proj.weight": first}
    return checkpoint_filter_fn(weights, model)
