"""Weights from a file: what a user may have downloaded, so nothing is unpickled.

Weights that are not finite are refused.  Those of a plain file may be off the manifold, as they were trained without a
constraint: the optimizer takes the nearest point on it.  Those of a run that kept the same constraint may not: such a
file is damaged.
"""

import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from ortho_vit import optim
from ortho_vit.models.weights import ROUNDED_TOLERANCE, TOLERANCE
from ortho_vit.parameter import cut_blocks, stiefel_parameters
from ortho_vit.stiefel import orthogonality_error

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
            _check_sums(path)
            content = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # damaged input raises all sorts; torch's advice is to run what is in it
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            what = f"it holds more than tensors and plain values: it asks for {found[1]}"
            raise ValueError(f"{path} is refused: {what}") from error
        reason = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
        raise ValueError(f"{path} is damaged or no checkpoint at all{reason}; use another copy") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no checkpoint: it holds a {type(content).__name__}")
    return content


def _check_sums(path: Path) -> None:
    """Raise for a file whose checksums are wrong: torch writes them and does not look at them again."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} has another checksum")


def read_weights(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state dict of a model, from safetensors, from a plain state dict, or from a checkpoint of a run.

    With it the run's hyper-parameters, of which other files have none.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        if not path.is_file():
            raise FileNotFoundError(f"no weights {path}")
        try:
            return load_file(path), {}
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path} is damaged or no safetensors file ({error})") from error
    content, run = read_checkpoint(path), {}
    if "state_dict" in content:
        run, state = content.get("hyper_parameters", {}), content["state_dict"]
        state = state if isinstance(state, dict) else {}
        content = {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
    if not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} has no weights of a classifier in it")
    return content, run


def is_head(name: str) -> bool:
    """Whether a parameter belongs to the classifier, of which distilled models have two."""
    return name.partition(".")[0] in ("head", "head_dist", "head_drop")


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Load the weights of a file into a model of the same architecture; a head of other classes is left as it is."""
    weights, run = read_weights(path)
    if isinstance(model, VisionTransformer):
        try:
            weights = _resample(weights, model)
        except (RuntimeError, ValueError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{path} is of another architecture: it cannot be resampled ({reason})"
            ) from error
    ours = model.state_dict()
    head = {k for k in ours if is_head(k) and k in weights and weights[k].shape != ours[k].shape}
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
    for name, value in weights.items():
        if value.is_floating_point() != ours[name].is_floating_point():
            raise ValueError(f"{path} is refused: its {name!r} is {value.dtype}, not {ours[name].dtype}")
    check_finite(weights, str(path))
    if keeps_manifold(run) and _same_constraint(model, run):
        check_manifold(model, weights, str(path))
    model.load_state_dict(weights, strict=False)
    if head:
        model.new_head = True  # type: ignore[assignment]  # untrained
    return model


def _same_constraint(model: nn.Module, run: dict[str, Any]) -> bool:
    ours: Any = getattr(model, "orthogonal", {"constraint": None})
    theirs = (run.get("model_kwargs") or {}).get("projections", "qk")
    return ours["constraint"] == run["constraint"] and ours["projections"] == theirs


def keeps_manifold(run: Any) -> bool:
    """Whether a run of these hyper-parameters claims that its constrained weights are orthonormal."""
    recipe = run.get("optimizer") if isinstance(run, dict) and run.get("constraint") else None
    if not isinstance(recipe, dict):
        return False
    optimizer = getattr(optim, str(recipe.get("class_path")).rpartition(".")[2], None)  # none of others' code
    return getattr(optimizer, "exact", False) and (recipe.get("init_args") or {}).get("inner_steps") is None


def check_finite(weights: Mapping[str, Tensor], source: str) -> None:
    bad = next((key for key, value in weights.items() if not value.isfinite().all()), None)
    if bad is not None:
        raise ValueError(f"{source} is refused: {bad!r} has entries that are not finite")


def check_manifold(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Raise ValueError where weights for the model's constrained parameters are not orthonormal."""
    for name, parameter in stiefel_parameters(model):
        X = weights.get(name)
        if X is None or X.shape != parameter.shape:
            continue
        error = orthogonality_error(cut_blocks(X, parameter.blocks, parameter.rows))
        limit = TOLERANCE.get(X.dtype, ROUNDED_TOLERANCE)
        if not error <= limit:
            raise ValueError(
                f"{source} is refused: its {name!r} is off the manifold by {error:.2g}, more than {limit:.0e}, where its "
                "run has kept it; the file is damaged, use another checkpoint"
            )


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
