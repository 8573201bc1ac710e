"""The zoo, and the way from a name to a model.

Each is timm's `VisionTransformer` and is registered with timm, as are our optimizers.  Each takes timm's keywords and those
of `create_model`; `constraint="none"` stands for None, because `timm.create_model` drops keywords that are None.

Tags are looked up when a model is created, so importing this module does not read the disk.  Therefore
`timm.list_models(pretrained=True)` does not list our weights; `ortho_vit.list_models(pretrained=True)` does.
"""

import fnmatch
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import timm
from timm.models import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn
from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry
from torch import nn

from ortho_vit.errors import CheckpointError, did_you_mean
from ortho_vit.models.card import Card
from ortho_vit.models.compact import CompactTransformer
from ortho_vit.models.orthogonalize import Projections, orthogonalize, release
from ortho_vit.models.spec import ATTENTION, Choice, ModelSpec
from ortho_vit.models.weights import (
    Checkpoint,
    Source,
    available,
    check_weights,
    find_checkpoint,
    is_place,
    load_weights,
    read_weights,
)

__all__: list[str] = []  # `register_model` adds each name

# Hidden layers of the MLPs that are as wide as the model and twice as wide; timm's default is 4 times
SQUARE, NARROW = {"mlp_ratio": 1, "qkv_bias": False}, {"mlp_ratio": 2, "qkv_bias": False}
POOLED = {"class_token": False, "global_pool": "avg", "fc_norm": False}
SIZES: dict[str, dict[str, Any]] = {  # with the number of parameters
    "ortho_vit_digits": {"patch_size": 4, "embed_dim": 64, "depth": 3, "num_heads": 4, **NARROW},  # 0.1 M
    "ortho_vit_pico": {"patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 6, **NARROW},  # 0.3 M
    "ortho_vit_nano": {"patch_size": 4, "embed_dim": 96, "depth": 4, "num_heads": 6, **NARROW},  # 0.3 M
    # 0.3 M, with a convolutional stem
    "ortho_vit_compact": {"patch_size": 4, "embed_dim": 128, "depth": 2, "num_heads": 2, **SQUARE, **POOLED},
    # 6,260,746, as in Kong, Wang & Tao (ICLR 2023), section 4.2
    "ortho_vit_cifar": {"patch_size": 4, "embed_dim": 384, "depth": 7, "num_heads": 12, **SQUARE},
    # 5.7 M, 22 M and 87 M, as DeiT
    "ortho_vit_tiny_patch16_224": {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3},
    "ortho_vit_small_patch16_224": {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6},
    "ortho_vit_base_patch16_224": {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12},
}

INPUT = {"first_conv": "patch_embed.proj", "classifier": "head", "fixed_input_size": True, "license": "mit"}
DIGITS = {**INPUT, "input_size": (1, 8, 8), "num_classes": 10, "crop_pct": 1.0}
DIGITS |= {"mean": (0.3053,), "std": (0.3759,)}
CIFAR = {**INPUT, "input_size": (3, 32, 32), "num_classes": 10, "crop_pct": 1.0}
CIFAR |= {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)}
COMPACT = {**CIFAR, "first_conv": "patch_embed.layers.0"}
IMAGENET = {**INPUT, "input_size": (3, 224, 224), "num_classes": 1000, "crop_pct": 0.9}

CONFIGS: dict[str, Any] = {name: IMAGENET if name.endswith("_224") else CIFAR for name in SIZES}
CONFIGS |= {"ortho_vit_digits": DIGITS, "ortho_vit_compact": COMPACT}
default_cfgs = timm.models.generate_default_cfgs(CONFIGS)

OPTIMIZERS = (
    "StiefelSGD", "StiefelAdam", "StiefelAdamW", "MomentumlessStiefelSGD", "ProjectedStiefelSGD", "ProjectedStiefelAdam",
    "RegularizedSGD", "RegularizedAdam", "StiefelMuon",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------- by name


def create_model(
    name: Source,
    pretrained: bool = False,
    *,
    constraint: Choice = "default",
    projections: Projections | None = None,
    preserve: bool | None = None,
    scale: bool | None = None,
    checkpoints: Source | None = None,
    verify: bool = False,
    **kwargs: Any,
) -> nn.Module:
    """Build a model of the zoo, or any of timm's with its attention constrained.

    Args:
        name: an architecture of `list_models()` or `timm.list_models()`, or architecture.tag to say which weights; or
            the file, the folder or the address (https://...) of trained weights with a card.
        pretrained: load the weights: a checkpoint of ours by that name if there is one, otherwise timm's.
        constraint: "within", "across", the number of heads that share a block, or None; see `orthogonalize`.  By default
            what the checkpoint was trained with; without one, "within" for the zoo's models and None for timm's.
        projections: which of W^Q, W^K, W^V are constrained, and with "qk+mlp" the MLPs; see `orthogonalize`.  By
            default the checkpoint's, or "qk".
        preserve: constrain without changing the function that the weights compute; see `orthogonalize`.  By default the
            checkpoint's, or False.
        scale: give each head a learned scalar; see `orthogonalize`.  By default the checkpoint's, or False.
        checkpoints: where weights are looked for: a folder, a file or an https address; by default what
            ORTHO_VIT_CHECKPOINTS names and the weights that come with the package.
        verify: check that the loaded weights give the logits on their card.
        kwargs: timm's: num_classes, img_size, in_chans, drop_path_rate, ...
    """
    name = os.fspath(name)
    chosen: Any = {"constraint": constraint, "projections": projections, "preserve": preserve, "scale": scale}
    checkpoint = _checkpoint_for(name, pretrained, checkpoints)
    if checkpoint is not None:
        return load_checkpoint(checkpoint, weights=pretrained, verify=verify, **chosen, **kwargs)
    if verify:
        remedy = "list_models(pretrained=True) has them"
        raise CheckpointError(f"{name}: verify=True needs weights with a card; {remedy}")
    spec = ModelSpec(name, "within" if name in SIZES else None).choose(**chosen)
    return orthogonalize(_build_free(name, kwargs, pretrained=pretrained), **spec.attention)


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the attention, and the arguments of the architecture."""
    chosen = {name: value for name, value in options.items() if name in ATTENTION}
    return chosen, {name: value for name, value in options.items() if name not in ATTENTION}


def list_models(filter: str = "*", pretrained: bool = False) -> list[str]:
    """The zoo's architectures that match a pattern such as `*patch16*`; with `pretrained`, the names of its weights."""
    return fnmatch.filter(available() if pretrained else sorted(SIZES), filter)


def _checkpoint_for(name: str, pretrained: bool, source: Source | None) -> Checkpoint | None:
    """The checkpoint that a name refers to, or None where timm has the weights or none are wanted."""
    if name.startswith(("hf-hub:", "local-dir:")):
        return None
    architecture, _, tag = name.partition(".")
    if name != architecture and is_place(name):
        return find_checkpoint(name)
    if not timm.is_model(architecture):
        if name and Path(name).exists():
            return find_checkpoint(name)
        hint = did_you_mean(name, [*SIZES, *timm.list_models()]).removeprefix("; ")
        raise ValueError(f"unknown model {name!r}; {f'{hint} ' if hint else ''}list_models() has them all")
    wanted = tag or pretrained
    if not wanted or (architecture not in SIZES and source is None and name not in available()):
        return None
    return find_checkpoint(name if tag else _only_tag(architecture, source), source)


def _only_tag(architecture: str, source: Source | None) -> str:
    if source is not None and os.fspath(source).endswith((".safetensors", ".json")):
        return find_checkpoint(source).card.name
    names = [name for name in available(source) if name.startswith(f"{architecture}.")]
    if len(names) != 1:
        have = f"name one: {', '.join(names)}" if names else "list_models(pretrained=True) has them all"
        raise CheckpointError(f"{architecture} has {len(names) or 'no'} trained weights; {have}")
    return names[0]


# ---------------------------------------------------------------------------------------------- from weights


def load_checkpoint(
    checkpoint: Checkpoint, *, weights: bool = True, verify: bool = False, **kwargs: Any
) -> nn.Module:
    """Build the card's model and load its weights (unless `weights` is False).

    The model is constrained as its card says, unless `constraint`, `projections`, `preserve` or `scale` (see
    `orthogonalize`) say otherwise; these are applied after the weights are loaded, and `constraint=None` makes every
    parameter free.  Other keywords are timm's and override the card's: `num_classes` gives a new head, `img_size`
    resamples the position embedding, `in_chans` adapts the first convolution.  `verify` checks the card's logits first.
    """
    chosen, arguments = _split(kwargs)
    spec = checkpoint.card.spec.choose(**chosen)
    num_classes = arguments.pop("num_classes", spec.num_classes)
    spec = spec.replace(num_classes=num_classes, arguments=spec.arguments | arguments)
    if verify:
        verify_checkpoint(checkpoint)
    return _load(checkpoint, spec, weights)[0]


def verify_checkpoint(checkpoint: Checkpoint | Source) -> float:
    """The largest difference between the logits on a card and those that its weights give on this machine.

    Accepts what `find_checkpoint` accepts.  Raises CheckpointError if the difference is above 1e-3.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = find_checkpoint(checkpoint)
    return checkpoint.card.check_golden(load_checkpoint(checkpoint))


def build(spec: ModelSpec) -> nn.Module:
    """The untrained model of a description; with a tag in its name, the architecture on that card."""
    return create_model(spec.name, **spec.attention, **spec.keywords)


def build_from(
    spec: ModelSpec, weights: str, on_manifold: Callable[[Mapping[str, Any]], bool] = lambda run: False
) -> tuple[nn.Module, bool]:
    """The model of a description with initial weights, and whether its head is untrained.

    `weights` are trained weights with a card (a name, a file, a folder or an address), timm's weights by their name, or a
    file without a card: safetensors, a state dict or a run checkpoint.  `on_manifold` tells from a run's hyper-parameters
    whether its training kept the weights on the manifold; if so, weights off it raise CheckpointError.
    """
    path = Path(weights)
    is_file = is_place(weights) and "://" not in weights and not path.is_dir()
    if is_file and not path.with_suffix(".json").is_file():
        model, (tensors, run) = build(spec), read_weights(weights)
        orthonormal = False
        if run and on_manifold(run):
            theirs = ModelSpec.from_options(run)
            orthonormal = (theirs.constraint, theirs.projections) == (spec.constraint, spec.projections)
        return model, bool(load_weights(model, tensors, weights, orthonormal=orthonormal))
    checkpoint = _checkpoint_for(weights, True, None)
    architecture = checkpoint.card.architecture if checkpoint else weights.partition(".")[0]
    if architecture != spec.architecture:
        raise CheckpointError(
            f"weights {weights!r} are of another model, {architecture!r}; name a .safetensors or .ckpt file of "
            f"{spec.architecture!r}, or one of list_models('{spec.architecture}*', pretrained=True)"
        )
    if checkpoint is not None:
        model, head = _load(checkpoint, spec)
        return model, bool(head)
    model = create_model(weights, pretrained=True, **spec.attention, **spec.keywords)
    config: Any = model.pretrained_cfg
    return model, bool(model.num_classes != config["num_classes"])


def _load(checkpoint: Checkpoint, spec: ModelSpec, weights: bool = True) -> tuple[nn.Module, list[str]]:
    """The model of a description, with a checkpoint's weights if wanted, and the untrained parameters of its head."""
    card, trained = checkpoint.card, checkpoint.card.spec
    model = _build_for(card, spec)
    if not weights:
        return orthogonalize(model, **spec.attention), []
    orthogonalize(model, **trained.attention, init="keep")
    head = load_weights(model, checkpoint.read(), card.name, orthonormal=True)
    if spec.attention != trained.attention:
        orthogonalize(release(model), **spec.attention)
    return model, head


# ------------------------------------------------------------------------------------ with nothing constrained


def _build_for(card: Card, spec: ModelSpec) -> nn.Module:
    """The architecture of a card, with timm's configuration filled in from it."""
    if not timm.is_model(card.architecture):
        raise CheckpointError(f"{card.name}: there is no architecture {card.architecture!r}")
    overlay = {
        "tag": card.tag,
        "mean": tuple(card.mean),
        "std": tuple(card.std),
        "num_classes": len(card.classes),
        "label_names": tuple(card.classes),
        "input_size": tuple(card.golden.shape[1:]),
        "crop_pct": card.crop_pct,
        "license": card.licence,
    }
    try:
        return _build_free(card.architecture, spec.keywords, overlay=overlay)
    except ValueError as error:
        raise CheckpointError(f"{card.name}: {error}") from error


def _build_free(
    name: str, kwargs: dict[str, Any], *, pretrained: bool = False, overlay: dict[str, Any] | None = None
) -> nn.Module:
    """An architecture by its name, with nothing constrained."""
    try:
        if name in SIZES:
            return _build_ours(name, kwargs, overlay)
        return timm.create_model(name, pretrained, pretrained_cfg_overlay=overlay, **kwargs)
    except (TypeError, AssertionError, ZeroDivisionError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be built with {kwargs}: {' '.join(str(error).split())}") from error


def _build_ours(
    name: str,
    kwargs: dict[str, Any],
    overlay: dict[str, Any] | None = None,
    hub: dict[str, Any] | None = None,
) -> VisionTransformer:
    """A model of the zoo; with the configuration of a hub folder, also its weights."""
    cfg = timm.models.resolve_pretrained_cfg(name, hub, overlay)
    arguments = {**SIZES[name], **{key: value for key, value in kwargs.items() if value is not None}}
    image, patch = arguments.get("img_size") or cfg.input_size[-1], arguments["patch_size"]
    numbers = isinstance(image, int) and isinstance(patch, int) and patch > 0
    if numbers and image % patch and not arguments.get("dynamic_img_pad"):
        message = f"patch_size must divide img_size = {image}, got {patch}; the rest would be ignored"
        raise ValueError(f"{name}: {message}")
    return timm.models.build_model_with_cfg(
        CompactTransformer if name == "ortho_vit_compact" else VisionTransformer,
        name,
        pretrained=hub is not None,
        pretrained_cfg=cfg.to_dict(),
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **arguments,
    )


# --------------------------------------------------------------------------------------- registered with timm


def _entry_point(name: str) -> Callable[..., nn.Module]:
    def create(
        pretrained: bool = False,
        pretrained_cfg: Any = None,
        pretrained_cfg_overlay: dict[str, Any] | None = None,
        cache_dir: Any = None,
        **kwargs: Any,
    ) -> nn.Module:
        if isinstance(pretrained_cfg, dict):  # "local-dir:FOLDER" or "hf-hub:NAME"
            return _from_hub(name, pretrained, pretrained_cfg, **kwargs)
        return create_model(f"{name}.{pretrained_cfg}" if pretrained_cfg else name, pretrained, **kwargs)

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"{name}; see `ortho_vit.create_model` for its keywords."
    return create


def _from_hub(name: str, pretrained: bool, cfg: dict[str, Any], **kwargs: Any) -> nn.Module:
    """A model from a hub folder that names an architecture of ours, as version 0.1 exported them."""
    chosen, arguments = _split(kwargs)
    spec = ModelSpec(name, "within").choose(**chosen)
    model = _build_ours(name, arguments, hub=cfg if pretrained else None)
    orthogonalize(model, **spec.attention, init="keep" if pretrained else "polar")
    if pretrained:
        check_weights(model, name)
    return model


for _name in SIZES:
    globals()[_name] = timm.models.register_model(_entry_point(_name))

# For `timm.optim.create_optimizer_v2(model, opt="stiefelsgd")`; timm imports them lazily
for _name in OPTIMIZERS:
    _adaptive = "Adam" in _name or "Muon" in _name
    default_registry.register(
        OptimInfo(
            name=_name.lower(),
            opt_class=f"ortho_vit.optim.{_name}",
            description=f"{_name} of ortho_vit, for models with orthonormal weights",
            has_eps=_adaptive,
            has_betas=_adaptive,
            has_momentum=not _adaptive or "Muon" in _name,
        )
    )
