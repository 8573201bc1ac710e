"""The zoo: timm's `VisionTransformer` in seven sizes, registered with timm, its attention on the Stiefel manifold.

    name                             image    patch   width   depth   heads   mlp   parameters
    ortho_vit_digits                  8×8×1     2       64      3       4      2       0.1 M
    ortho_vit_pico                   32×32      8       96      4       6      2       0.3 M
    ortho_vit_nano                   32×32      4       96      4       6      2       0.3 M
    ortho_vit_cifar                  32×32      4      384      7      12      1       6.3 M   the paper's
    ortho_vit_tiny_patch16_224      224×224    16      192     12       3      4       5.7 M   DeiT's
    ortho_vit_small_patch16_224     224×224    16      384     12       6      4        22 M   DeiT's
    ortho_vit_base_patch16_224      224×224    16      768     12      12      4        87 M   DeiT's

Besides timm's own keywords each takes `constraint` ("within", "across", "none"; by default "within", or what loaded weights
were trained with) and `projections` ("q", "qk", "qkv").  "none" stands for None because `timm.create_model` drops keywords
that are None.
"""

from typing import Any, Literal

from timm.models import VisionTransformer, build_model_with_cfg, generate_default_cfgs, register_model

from ortho_vit.models.orthogonalize import Constraint, Projections, orthogonalize

__all__: list[str] = []  # `register_model` adds each name

ZooConstraint = Constraint | Literal["none", "default"]

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


def resolve(constraint: ZooConstraint, default: Constraint) -> Constraint:
    if constraint == "default":
        return default
    return None if constraint == "none" else constraint


def _build(
    name: str,
    pretrained: bool,
    architecture: dict[str, Any],
    *,
    constraint: ZooConstraint = "default",
    projections: Projections = "qk",
    **kwargs: Any,
) -> VisionTransformer:
    model = build_model_with_cfg(
        VisionTransformer,
        name,
        pretrained=False,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **{**architecture, **kwargs},
    )
    return orthogonalize(model, resolve(constraint, "within"), projections=projections)


@register_model
def ortho_vit_digits(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    size = {"patch_size": 2, "embed_dim": 64, "depth": 3, "num_heads": 4, "mlp_ratio": 2, "qkv_bias": False}
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
