"""The zoo's models: sizes, registration with timm, and the ways a name can be wrong."""

import pytest
import timm
import torch
from timm.data import resolve_data_config

import ortho_vit.optim
from ortho_vit import orthogonality_error, stiefel_parameters
from ortho_vit.models import create_model, list_models

ALL = list_models()
PARAMETERS = {
    "ortho_vit_digits": 102_090,
    "ortho_vit_pico": 319_402,
    "ortho_vit_nano": 310_186,
    "ortho_vit_compact": 283_723,
    "ortho_vit_cifar": 6_260_746,  # the paper's
    "ortho_vit_tiny_patch16_224": 5_717_416,  # DeiT's own counts, from here on
    "ortho_vit_small_patch16_224": 22_050_664,
    "ortho_vit_base_patch16_224": 86_567_656,
}


def count(model):
    return sum(p.numel() for p in model.parameters())


def batch(model, n=2):
    return torch.randn(n, *model.default_cfg["input_size"], generator=torch.Generator().manual_seed(0))


def test_the_list_has_them_all():
    assert sorted(PARAMETERS) == ALL
    assert list_models("*_patch16_*") == [name for name in ALL if "patch16" in name]
    assert set(ALL) <= set(timm.list_models("ortho_vit*"))


@pytest.mark.parametrize("name", ALL)
def test_every_model_has_its_size_and_runs(name):
    model = create_model(name)
    assert count(model) == PARAMETERS[name]
    assert model.orthogonal["constraint"] == "within"
    assert orthogonality_error(model) < 2e-6
    logits = model(batch(model, 1 if "224" in name else 2))
    assert logits.shape[1] == model.num_classes == (1000 if "224" in name else 10)
    if "base" not in name:
        logits.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_the_large_ones_are_of_the_size_of_deit(size):
    with torch.device("meta"):
        deit = timm.create_model(f"deit_{size}_patch16_224")
        ours = create_model(f"ortho_vit_{size}_patch16_224", constraint=None)
    assert {k: x.shape for k, x in ours.state_dict().items()} == {
        k: x.shape for k, x in deit.state_dict().items()
    }


@pytest.mark.parametrize(("constraint", "blocks"), [("within", 24), ("across", 2)])
@pytest.mark.parametrize("create", [create_model, timm.create_model])
def test_timm_builds_them_too(create, constraint, blocks):
    model = create("ortho_vit_cifar", constraint=constraint, depth=2)
    parameters = [p for _, p in stiefel_parameters(model)]
    assert [(p.blocks, p.rows, tuple(p.shape)) for p in parameters] == [(blocks, 768, (1152, 384))] * 2


def test_constraint_none_is_timms_own_model():
    assert not list(stiefel_parameters(create_model("ortho_vit_nano", constraint=None)))
    assert not list(stiefel_parameters(timm.create_model("ortho_vit_nano", constraint="none")))


def test_projections_and_timms_keywords_pass_through():
    model = create_model(
        "ortho_vit_pico", projections="qkv", num_classes=3, img_size=64, in_chans=1, drop_path_rate=0.1
    )
    assert model(torch.randn(2, 1, 64, 64)).shape == (2, 3)
    assert {p.rows for _, p in stiefel_parameters(model)} == {3 * 96}


def test_data_configuration_is_that_of_the_data():
    digits = resolve_data_config(model=create_model("ortho_vit_digits"))
    assert (digits["input_size"], digits["mean"], digits["std"]) == ((1, 8, 8), (0.3053,), (0.3759,))
    cifar = resolve_data_config(model=create_model("ortho_vit_nano"))
    assert (cifar["input_size"], cifar["mean"]) == ((3, 32, 32), (0.4914, 0.4822, 0.4465))


def test_features_come_from_the_constrained_model():
    model = timm.create_model("ortho_vit_nano", features_only=True, out_indices=(1, 3))
    assert [tuple(x.shape) for x in model(torch.randn(1, 3, 32, 32))] == [(1, 96, 8, 8)] * 2
    assert orthogonality_error(model) < 2e-6
    assert len(list(stiefel_parameters(model))) == 4


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_patch16_224"])
def test_any_timm_model_is_built_and_constrained_when_asked(name):
    free = create_model(name, img_size=32, num_classes=10, depth=1)
    assert not list(stiefel_parameters(free))
    model = create_model(name, constraint="within", img_size=32, num_classes=10, depth=1)
    assert [(n, p.blocks) for n, p in stiefel_parameters(model)] == [("blocks.0.attn.qkv.weight", 6)]
    model = create_model(name, constraint="across", preserve=True, img_size=32, num_classes=10, depth=1)
    assert model.blocks[0].attn.qkv.core.shape == (2, 192, 192)


def test_pyramids_are_comparators_too():
    model = create_model("pvt_v2_b0", constraint="within", num_classes=10)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 10)
    assert orthogonality_error(model) < 2e-6


def test_a_model_without_attention_says_so():
    with pytest.raises(ValueError, match="no attention found in ResNet"):
        create_model("resnet18", constraint="within")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "ortho_vit_nno",
            "unknown model 'ortho_vit_nno'; did you mean 'ortho_vit_nano'? list_models() has them all",
        ),
        (
            "deit_tiny_patch16_225",
            "unknown model 'deit_tiny_patch16_225'; did you mean 'deit_tiny_patch16_224'?",
        ),
        ("", "unknown model ''; list_models() has them all"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        create_model(name)
    assert str(caught.value).startswith(message)


def test_a_bad_constraint_is_told_the_good_ones():
    with pytest.raises(
        ValueError, match=r"constraint must be 'within', 'across', None or the number of .*, got 'both'"
    ):
        create_model("ortho_vit_pico", constraint="both")


# -------------------------------------------------------------------------------------------------- the compact one


def test_the_compact_stem_gives_64_tokens_and_the_pool_weighs_them():
    model = create_model("ortho_vit_compact").eval()
    images = batch(model)
    tokens = model.patch_embed(images)
    assert tokens.shape == (2, 64, 128)
    with torch.no_grad():
        model.attn_pool.score.weight.zero_()
    features = model.forward_features(images)
    torch.testing.assert_close(model.pool(features), features.mean(1))  # equal scores: the mean
    with torch.no_grad():
        model.attn_pool.score.weight.copy_(100 * features[0, 5])
    chosen = (features[0] @ features[0, 5]).argmax()
    torch.testing.assert_close(model.pool(features)[0], features[0, chosen], atol=1e-4, rtol=0)


def test_the_compact_one_takes_other_images_and_stems():
    model = create_model("ortho_vit_compact", img_size=64, in_chans=1, patch_size=8, num_classes=3)
    assert model.patch_embed(torch.randn(1, 1, 64, 64)).shape == (1, 64, 128)
    assert [conv.out_channels for conv in model.patch_embed.layers[::3]] == [32, 64, 128]
    assert model(torch.randn(2, 1, 64, 64)).shape == (2, 3)
    with pytest.raises(ValueError, match=r"patch_size must be a power of two, 2 or more, .* got 6 and 128"):
        create_model("ortho_vit_compact", img_size=36, patch_size=6)


def test_features_come_from_the_compact_one_too():
    model = timm.create_model("ortho_vit_compact", features_only=True, out_indices=(0, 1))
    assert [tuple(x.shape) for x in model(torch.randn(1, 3, 32, 32))] == [(1, 128, 8, 8)] * 2


# ---------------------------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("name", ortho_vit.optim.__all__)
def test_timm_builds_our_optimizers_by_name(name):
    model = create_model("ortho_vit_digits", depth=1)
    optimizer = timm.optim.create_optimizer_v2(model, opt=name.lower(), lr=0.01, weight_decay=0.1)
    assert type(optimizer) is getattr(ortho_vit.optim, name)
    model(batch(model)).square().sum().backward()
    optimizer.step()
    if "Stiefel" in name:
        assert orthogonality_error(model) < 2e-6
    assert name.lower() in timm.optim.list_optimizers()
