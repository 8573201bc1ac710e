"""The zoo: timm's `VisionTransformer` in seven sizes, registered with timm, its attention on the Stiefel manifold.

    name                             image    patch   width   depth   heads   mlp   parameters
    ortho_vit_digits                  8×8×1     4       64      3       4      2       0.1 M
    ortho_vit_pico                   32×32      8       96      4       6      2       0.3 M
    ortho_vit_nano                   32×32      4       96      4       6      2       0.3 M
    ortho_vit_cifar                  32×32      4      384      7      12      1       6.3 M   the paper's
    ortho_vit_tiny_patch16_224      224×224    16      192     12       3      4       5.7 M   DeiT's
    ortho_vit_small_patch16_224     224×224    16      384     12       6      4        22 M   DeiT's
    ortho_vit_base_patch16_224      224×224    16      768     12      12      4        87 M   DeiT's

Besides timm's own keywords each takes `constraint` ("within", "across" or "none"; by default "within", or what loaded
weights were trained with) and `projections` ("q", "qk", "qkv" or "qk+mlp").  "none" stands for None, because
`timm.create_model` drops keywords that are None.
"""

import dataclasses
from typing import Any, cast

from timm.models import (
    VisionTransformer,
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
    resolve_pretrained_cfg,
)
from timm.models.vision_transformer import checkpoint_filter_fn

from ortho_vit.errors import CheckpointError
from ortho_vit.models import weights as checkpoints
from ortho_vit.models.orthogonalize import Choice, Init, Projections, orthogonalize, resolve

__all__: list[str] = []  # `register_model` adds each name

INPUT = {"first_conv": "patch_embed.proj", "classifier": "head", "fixed_input_size": True, "license": "mit"}
DIGITS = {
    **INPUT,
    "input_size": (1, 8, 8),
    "num_classes": 10,
    "crop_pct": 1.0,
    "mean": (0.3053,),
    "std": (0.3759,),
}
CIFAR = {**INPUT, "input_size": (3, 32, 32), "num_classes": 10, "crop_pct": 1.0}
CIFAR |= {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)}
IMAGENET = {**INPUT, "input_size": (3, 224, 224), "num_classes": 1000, "crop_pct": 0.9}

default_cfgs = generate_default_cfgs(
    {
        "ortho_vit_digits": DIGITS,
        "ortho_vit_pico": CIFAR,
        "ortho_vit_nano": CIFAR,
        "ortho_vit_cifar": CIFAR,
        "ortho_vit_tiny_patch16_224": IMAGENET,
        "ortho_vit_small_patch16_224": IMAGENET,
        "ortho_vit_base_patch16_224": IMAGENET,
    }
)


# So that timm knows architecture.tag; the untagged name stays without weights.
for _name in checkpoints.available():
    _architecture, _, _tag = _name.partition(".")
    if _architecture in default_cfgs:
        _entry = default_cfgs[_architecture]
        _entry.tags.append(_tag)
        _entry.cfgs[_tag] = dataclasses.replace(_entry.cfgs[""], file=checkpoints.path_of(_name))


def _build(
    name: str,
    pretrained: bool,
    architecture: dict[str, Any],
    *,
    constraint: Choice = "default",
    projections: Projections | None = None,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: dict[str, Any] | None = None,
    **kwargs: Any,
) -> VisionTransformer:
    cfg = resolve_pretrained_cfg(name, pretrained_cfg, pretrained_cfg_overlay)
    from_hub = cfg.source in ("hf-hub", "local-dir")
    if cfg.file and not from_hub:
        checkpoint = checkpoints.Checkpoint.open(cfg.file)
        choice: dict[str, Any] = {"constraint": constraint, "projections": projections}
        return cast(
            VisionTransformer, checkpoints.load_checkpoint(checkpoint, weights=pretrained, **choice, **kwargs)
        )
    if pretrained and not from_hub:
        have = ", ".join(n for n in checkpoints.available() if n.startswith(name + ".")) or "none yet"
        raise CheckpointError(f"{name}: name the weights to load, one of: {have}")
    image, patch = kwargs.get("img_size") or cfg.input_size[-1], {**architecture, **kwargs}["patch_size"]
    padded = kwargs.get("dynamic_img_pad", False)
    if isinstance(image, int) and isinstance(patch, int) and patch > 0 and image % patch and not padded:
        raise ValueError(
            f"{name}: patch_size must divide img_size = {image}, got {patch}; the rest would not be seen"
        )
    model = build_model_with_cfg(
        VisionTransformer,
        name,
        pretrained,
        pretrained_cfg=cfg.to_dict(),
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **{**architecture, **kwargs},
    )
    init: Init = "keep" if pretrained else "polar"
    orthogonalize(model, resolve(constraint, "within"), projections=projections or "qk", init=init)
    if pretrained:
        checkpoints.check_weights(model, name)
    return model


@register_model
def ortho_vit_digits(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    size = {"patch_size": 4, "embed_dim": 64, "depth": 3, "num_heads": 4, "mlp_ratio": 2, "qkv_bias": False}
    return _build("ortho_vit_digits", pretrained, size, **kwargs)


@register_model
def ortho_vit_pico(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    size = {"patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 6, "mlp_ratio": 2, "qkv_bias": False}
    return _build("ortho_vit_pico", pretrained, size, **kwargs)


@register_model
def ortho_vit_nano(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    size = {"patch_size": 4, "embed_dim": 96, "depth": 4, "num_heads": 6, "mlp_ratio": 2, "qkv_bias": False}
    return _build("ortho_vit_nano", pretrained, size, **kwargs)


@register_model
def ortho_vit_cifar(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """The network of Kong, Wang & Tao (ICLR 2023), section 4.2: 6,260,746 parameters."""
    size = {"patch_size": 4, "embed_dim": 384, "depth": 7, "num_heads": 12, "mlp_ratio": 1, "qkv_bias": False}
    return _build("ortho_vit_cifar", pretrained, size, **kwargs)


@register_model
def ortho_vit_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    size = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
    return _build("ortho_vit_tiny_patch16_224", pretrained, size, **kwargs)


@register_model
def ortho_vit_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    size = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
    return _build("ortho_vit_small_patch16_224", pretrained, size, **kwargs)


@register_model
def ortho_vit_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    size = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12}
    return _build("ortho_vit_base_patch16_224", pretrained, size, **kwargs)
