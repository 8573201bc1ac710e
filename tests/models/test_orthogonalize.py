"""`orthogonalize`: which rows of which weights are orthonormal, on every layout of attention, and what it leaves alone."""

import copy

import pytest
import timm
import torch
import torchvision
from torch import nn

from ortho_vit import StiefelParameter, orthogonality_error, stiefel_parameters
from ortho_vit.models import orthogonalize
from ortho_vit.models.orthogonalize import CoredLinear, release

SMALL = {"img_size": 32, "num_classes": 5}
TINY = {**SMALL, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}

# Orthonormal to rounding: float32 blocks measure below 1e-6.
MANIFOLD = 2e-6
# The same logits: measured 1e-6 at most; a wrong core gives 1e-2 or more.
LOGITS = 2e-5


def vit(**kwargs):
    return timm.create_model("vit_tiny_patch16_224", **{**TINY, **kwargs})


def distilled():
    return timm.create_model("deit_tiny_distilled_patch16_224", **TINY)


def dinov2():
    return timm.create_model("vit_small_patch14_reg4_dinov2", **{**TINY, "init_values": 1e-5})


def siglip():
    return timm.create_model("vit_base_patch16_siglip_224", **TINY)


def eva(**kwargs):
    return timm.create_model("eva02_tiny_patch14_224", **{**TINY, **kwargs})


def dinov3():
    return timm.create_model("vit_small_patch16_dinov3", **TINY)


def beit():
    return timm.create_model("beit_base_patch16_224", **TINY)


def swin(name="swin_tiny_patch4_window7_224"):
    return timm.create_model(
        name,
        img_size=32,
        patch_size=4,
        embed_dim=24,
        depths=(1, 1),
        num_heads=(2, 4),
        window_size=4,
        num_classes=5,
    )


def swinv2():
    return swin("swinv2_tiny_window8_256")


def pvt():
    return timm.create_model(
        "pvt_v2_b0",
        num_classes=5,
        depths=(1, 1, 1, 1),
        embed_dims=(16, 32, 32, 32),
        num_heads=(1, 2, 4, 8),
        sr_ratios=(2, 2, 1, 1),
    )


def xcit():
    return timm.create_model("xcit_nano_12_p16_224", **{**SMALL, "embed_dim": 48, "depth": 2, "num_heads": 4})


def cait():
    return timm.create_model("cait_xxs24_224", **TINY)


def torchvision_vit():
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5
    )


def narrow_heads():
    """Heads that are narrower in all than the model: heads · d_k = 24, d_model = 48."""
    model = vit()
    for block in model.blocks:
        block.attn = timm.layers.Attention(48, 4, attn_head_dim=6, qkv_bias=True)
    return model


TIMM = [vit, distilled, dinov2, siglip, eva, dinov3, beit, swin, swinv2, pvt, xcit, cait, narrow_heads]
TIMM += [pytest.param(lambda: vit(qk_norm=True), id="vit_qk_norm")]
TIMM += [pytest.param(lambda: eva(qkv_fused=False), id="eva_separate")]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randomize(model):
    """Give every bias, norm and scale a value of its own, so that none can be lost unnoticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def images():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def gram_error(rows):
    rows = rows.detach().double()
    return (rows @ rows.mT - torch.eye(len(rows))).abs().max().item()


# -------------------------------------------------------------------------------------------------- which rows, where


def test_within_makes_each_head_of_q_and_k_orthonormal_and_leaves_v_alone():
    model = vit()
    before = [block.attn.qkv.weight.detach().clone() for block in model.blocks]
    assert orthogonalize(model, "within") is model
    for block, old in zip(model.blocks, before, strict=True):
        qkv = block.attn.qkv.weight
        assert (qkv.blocks, qkv.rows) == (2 * 4, 2 * 48)
        q, k, v = qkv.unflatten(0, (3, 4, 12))  # (part, head, d_k, d_model)
        assert max(gram_error(head) for part in (q, k) for head in part) < MANIFOLD
        assert gram_error(q.flatten(0, 1)) > 0.01  # different heads are not orthogonal to each other
        assert torch.equal(v.flatten(0, 1), old[96:])


def test_across_makes_all_heads_of_a_projection_orthonormal_together():
    model = orthogonalize(vit(), "across")
    for block in model.blocks:
        qkv = block.attn.qkv.weight
        assert (qkv.blocks, qkv.rows) == (2, 2 * 48)
        q, k, v = qkv.chunk(3)
        assert max(gram_error(q), gram_error(k)) < MANIFOLD
        assert gram_error(v) > 0.01


@pytest.mark.parametrize("constraint", ["within", "across"])
@pytest.mark.parametrize(("projections", "parts"), [("q", 1), ("qk", 2), ("qkv", 3)])
def test_projections_says_how_many_of_q_k_and_v_are_constrained(constraint, projections, parts):
    model = orthogonalize(vit(), constraint, projections=projections)
    for _, parameter in stiefel_parameters(model):
        assert parameter.rows == parts * 48
        assert parameter.blocks == (parts * 4 if constraint == "within" else parts)


@pytest.mark.parametrize("mlp_ratio", [2, 1, 0.5])
def test_with_the_mlp_both_layers_are_orthonormal_along_their_shorter_side(mlp_ratio):
    model = orthogonalize(vit(mlp_ratio=mlp_ratio), "within", projections="qk+mlp")
    hidden = int(48 * mlp_ratio)
    for block in model.blocks:
        assert (block.attn.qkv.weight.blocks, block.attn.qkv.weight.rows) == (2 * 4, 2 * 48)
        assert block.mlp.fc1.weight.matrices().shape == (1, hidden, 48)
        assert block.mlp.fc2.weight.matrices().shape == (1, 48, hidden)
    assert len(list(stiefel_parameters(model))) == 2 * 3
    assert orthogonality_error(model) < MANIFOLD
    assert model.orthogonal["projections"] == "qk+mlp"


def test_a_model_without_an_mlp_says_so():
    refuses(timm.layers.Attention(48, num_heads=4), "no MLP found in Attention", projections="qk+mlp")


@pytest.mark.parametrize("build", [*TIMM, torchvision_vit])
@pytest.mark.parametrize("constraint", ["within", "across"])
def test_every_layout_of_attention_is_constrained_and_still_runs(build, constraint):
    model = build()
    keys, shapes = list(model.state_dict()), [p.shape for p in model.parameters()]
    orthogonalize(model, constraint)
    assert orthogonality_error(model) < MANIFOLD
    assert len(list(stiefel_parameters(model))) >= 2
    assert list(model.state_dict()) == keys
    assert [p.shape for p in model.parameters()] == shapes
    model(images()).sum().backward()
    assert all(p.grad is not None for _, p in stiefel_parameters(model))


def test_fused_and_separate_projections_get_the_same_blocks():
    fused, separate = eva(qkv_fused=True), eva(qkv_fused=False)
    orthogonalize(fused, "within")
    orthogonalize(separate, "within")
    attention = separate.blocks[0].attn
    assert fused.blocks[0].attn.qkv.weight.matrices().shape == (8, 12, 48)
    assert attention.q_proj.weight.matrices().shape == attention.k_proj.weight.matrices().shape == (4, 12, 48)
    assert not isinstance(attention.v_proj.weight, StiefelParameter)


def test_query_apart_from_key_and_value():
    model = orthogonalize(siglip(), "within")
    pool = model.attn_pool
    assert pool.q.weight.matrices().shape == (4, 12, 48)
    assert (pool.kv.weight.blocks, pool.kv.weight.rows) == (4, 48)
    assert not isinstance(
        orthogonalize(siglip(), "within", projections="q").attn_pool.kv.weight, StiefelParameter
    )


def test_grouped_queries_have_fewer_heads_of_keys():
    attention = timm.layers.AttentionRope(48, num_heads=4, num_kv_heads=2, qkv_fused=False)
    orthogonalize(attention, "within")
    assert attention.q_proj.weight.matrices().shape == (4, 12, 48)
    assert attention.k_proj.weight.matrices().shape == (2, 12, 48)


@pytest.mark.parametrize("options", [{}, {"kdim": 20, "vdim": 24}])
def test_torch_attention_fused_and_apart(options):
    attention = orthogonalize(nn.MultiheadAttention(32, 4, batch_first=True, **options), "within")
    blocks = sum(p.blocks for _, p in stiefel_parameters(attention))
    assert blocks == 8
    assert orthogonality_error(attention) < MANIFOLD


def test_polar_is_the_nearest_and_random_forgets():
    model, near, far = vit(), vit(), vit()
    near.load_state_dict(model.state_dict())
    far.load_state_dict(model.state_dict())
    W = model.blocks[0].attn.qkv.weight.detach()[:12].double()
    U, _, Vh = torch.linalg.svd(W, full_matrices=False)
    orthogonalize(near, "within")
    orthogonalize(far, "within", init="random")
    assert (near.blocks[0].attn.qkv.weight[:12] - U @ Vh).abs().max() < 1e-6
    assert (far.blocks[0].attn.qkv.weight[:12] - U @ Vh).abs().max() > 0.1
    assert orthogonality_error(far) < MANIFOLD


def test_keep_constrains_the_values_as_they_are():
    model = vit()
    before = copy.deepcopy(model.state_dict())
    orthogonalize(model, "within", init="keep")
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert len(list(stiefel_parameters(model))) == 2


def test_no_constraint_changes_nothing():
    model = vit()
    assert orthogonalize(model, None) is model
    assert not list(stiefel_parameters(model))
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 1))
    assert orthogonalize(convolutions, None) is convolutions


def test_a_model_can_be_constrained_again():
    model = orthogonalize(orthogonalize(vit(), "within"), "across")
    assert {p.blocks for _, p in stiefel_parameters(model)} == {2}
    assert (model.orthogonal["constraint"], model.orthogonal["projections"]) == ("across", "qk")


def test_frozen_parameters_stay_frozen():
    model = vit().requires_grad_(False)
    assert not any(p.requires_grad for p in orthogonalize(model, "within", preserve=True).parameters())


# ------------------------------------------------------------------------------------------- keeping the function


@pytest.mark.parametrize("build", TIMM)
@pytest.mark.parametrize("constraint", ["within", "across"])
@pytest.mark.parametrize("projections", ["qk", "qkv"])
def test_preserve_keeps_the_logits(build, constraint, projections):
    model = randomize(build())
    expected, other = model(images()), copy.deepcopy(model)
    orthogonalize(model, constraint, projections=projections, preserve=True)
    orthogonalize(other, constraint, projections=projections)
    assert orthogonality_error(model) < MANIFOLD
    assert (model(images()) - expected).abs().max() < LOGITS
    assert (other(images()) - expected).abs().max() > 5 * LOGITS  # without preserve the logits change


def test_a_plain_dot_product_needs_one_core_per_head_and_a_norm_two():
    plain, normed = (orthogonalize(m, "within", preserve=True) for m in (vit(), vit(qk_norm=True)))
    assert plain.blocks[0].attn.qkv.core.shape == (4, 12, 12)
    assert normed.blocks[0].attn.qkv.core.shape == (8, 12, 12)


def test_preserve_in_double_precision_is_exact_and_leaves_the_original_alone():
    model = randomize(vit()).double()
    expected, twin = model(images().double()), copy.deepcopy(model)
    orthogonalize(twin, "within", preserve=True)
    assert orthogonality_error(twin) < 1e-14
    assert (twin(images().double()) - expected).abs().max() < 1e-13  # measured 5e-15
    assert torch.equal(model(images().double()), expected)


def test_preserve_survives_a_singular_projection():
    model = randomize(vit())
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[5] = 0
        model.blocks[1].attn.qkv.weight[:96] = 0
    expected = model(images())
    orthogonalize(model, "within", preserve=True)
    assert orthogonality_error(model) < MANIFOLD
    assert (model(images()) - expected).abs().max() < LOGITS


def test_preserve_with_keep_starts_from_identity_cores():
    model = randomize(vit())
    expected = model(images())
    orthogonalize(model, "within", init="keep", preserve=True)
    assert torch.equal(model.blocks[0].attn.qkv.core[0], torch.eye(12))
    assert (model(images()) - expected).abs().max() < LOGITS


def test_cores_are_saved_beside_their_weights_and_train():
    model, other = (orthogonalize(vit(), "across", preserve=True) for _ in range(2))
    assert "blocks.0.attn.qkv.core" in model.state_dict()
    assert set(model.state_dict()) - set(vit().state_dict()) == {
        f"blocks.{i}.attn.qkv.core" for i in range(2)
    }
    other.load_state_dict(model.state_dict())
    twin = copy.deepcopy(model)
    assert torch.equal(model.eval()(images()), other.eval()(images()))
    assert torch.equal(model(images()), twin.eval()(images()))
    model(images()).square().sum().backward()
    assert model.blocks[0].attn.qkv.core.grad.abs().max() > 0


def test_the_cored_weight_is_the_original_one():
    model = vit(qk_norm=True)
    before = model.blocks[0].attn.qkv.weight.detach().clone()
    orthogonalize(model, "within", preserve=True)
    layer = model.blocks[0].attn.qkv
    assert isinstance(layer, CoredLinear)
    assert (layer.cored_weight() - before).abs().max() < 1e-7


# --------------------------------------------------------------------------------------------------- clear refusals


def refuses(model, match, constraint="within", **kwargs):
    """The error, after which the model is what it was."""
    before, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=match):
        orthogonalize(model, constraint, **kwargs)
    assert not list(stiefel_parameters(model))
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())


def test_no_attention_says_what_was_looked_for():
    refuses(
        nn.Sequential(nn.Linear(4, 4)),
        "no attention found in Sequential; looked for nn.MultiheadAttention and .*qkv",
    )


def test_rows_that_do_not_fit_are_told_with_their_numbers():
    attention = timm.layers.Attention(24, num_heads=4, attn_head_dim=12)
    refuses(
        attention,
        r"heads·d_k = 4·12 = 48 rows do not fit in d_model = 24 dimensions; use constraint='within'",
        "across",
    )
    refuses(
        timm.layers.Attention(8, num_heads=2, attn_head_dim=12), r"d_k = 12 rows do not fit in d_model = 8"
    )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            {"constraint": "inside"},
            "constraint must be 'within', 'across', None or the number of .*, got 'inside'",
        ),
        ({"projections": "kv"}, "projections must be one of 'q', 'qk', 'qkv', 'qk\\+mlp', got 'kv'"),
        ({"projections": "qk+mlp", "preserve": True}, "preserve=True has no core for an MLP"),
        ({"init": "zero"}, "init must be one of 'polar', 'random', 'keep', got 'zero'"),
        ({"init": "random", "preserve": True}, "preserve=True keeps .* init must be 'polar'"),
    ],
)
def test_bad_values_are_named_with_the_good_ones(arguments, match):
    refuses(vit(), match, **arguments)


def test_a_rank_deficient_weight_is_named():
    model = vit()
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[3] = model.blocks[1].attn.qkv.weight[2]
    refuses(model, r"blocks.1.attn.qkv.weight: .*rank-deficient.*init='random'")


def test_a_weight_that_is_not_finite_is_named():
    model = vit()
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[3, 3] = torch.inf
    for preserve in (False, True):
        refuses(model.double(), r"blocks.1.attn.qkv.weight.*not finite", preserve=preserve)


def test_a_model_without_values_can_only_keep_them():
    with torch.device("meta"):
        model = vit()
    for preserve in (False, True):
        with pytest.raises(ValueError, match="on the meta device and has no values; use init='keep'"):
            orthogonalize(model, "within", preserve=preserve)
    assert len(list(stiefel_parameters(orthogonalize(model, "within", init="keep")))) == 2


def test_torch_attention_has_no_place_for_a_core():
    refuses(
        torchvision_vit(),
        "needs a place for a core after the projection, and MultiheadAttention",
        preserve=True,
    )


def test_a_forward_that_reads_the_weight_has_no_place_for_a_core():
    model = torchvision.models.SwinTransformer([4, 4], 16, [2], [2], [4, 4], num_classes=5)
    refuses(model, "ShiftedWindowAttention reads the weight", preserve=True)
    assert orthogonality_error(orthogonalize(model, "within")) < MANIFOLD


def test_cores_cannot_be_stacked():
    model = orthogonalize(vit(), "within", preserve=True)
    with pytest.raises(ValueError, match=r"blocks.0.attn.qkv.weight already has a core"):
        orthogonalize(model, "within", preserve=True)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("resnet18", "no attention found in ResNet"),
        ("tiny_vit_5m_224", "ordered head by head"),
        ("maxvit_nano_rw_256", "is a Conv2d; only an nn.Linear|ordered head by head"),
        ("visformer_tiny", "is a Conv2d; only an nn.Linear"),
        ("gcvit_xxtiny", "has 128 rows, which are not 3 × heads × d_k for 2 heads"),
        ("mobilenetv4_hybrid_medium", "only an nn.Linear can be constrained"),
    ],
)
def test_layouts_that_are_not_known_are_refused_by_name(name, match):
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(ValueError, match=match):
        orthogonalize(model, "within", init="keep")


def test_a_parallel_block_is_refused():
    block = timm.models.vision_transformer.ParallelScalingBlock(48, 4)
    refuses(block, r"ParallelScalingBlock[)] has heads but no nn.Linear")


class GatedAttention(nn.Module):
    """One weight for gate, q, k and v, of which only the number of rows tells."""

    def __init__(self, name="qkv", parts=4):
        super().__init__()
        self.num_heads, self.scale = 4, 1.0
        self.add_module(name, nn.Linear(48, parts * 48))
        self.proj = nn.Linear(48, 48)


def test_a_fused_weight_of_more_than_q_k_and_v_is_refused():
    refuses(GatedAttention(), "qkv of GatedAttention has 192 rows, which are not 3 × heads × d_k for 4 heads")
    assert orthogonality_error(orthogonalize(GatedAttention(parts=3), "within")) < MANIFOLD


@pytest.mark.parametrize("name", ["gqkv", "to_qkv", "Wqkv", "q_k_gate"])
def test_a_fused_weight_of_an_unknown_name_is_refused(name):
    message = f"{name} of GatedAttention holds q and k in an order that is not known; call constrain"
    refuses(nn.Sequential(vit(), GatedAttention(name)), message)


# --------------------------------------------------------------------------------------------------- groups of heads


@pytest.mark.parametrize(("heads", "blocks"), [(1, 8), (2, 4), (4, 2)])
def test_heads_share_blocks_in_groups(heads, blocks):
    model = orthogonalize(vit(), heads)
    q, k, _ = model.blocks[0].attn.qkv.weight.chunk(3)
    assert model.blocks[0].attn.qkv.weight.blocks == blocks
    for group in torch.cat([q, k]).split(12 * heads):
        assert gram_error(group) < MANIFOLD
    if heads < 4:
        assert gram_error(q) > 0.01


@pytest.mark.parametrize(("heads", "name"), [(1, "within"), (4, "across")])
def test_one_head_is_within_and_all_are_across(heads, name):
    by_number, by_name = vit(), vit()
    by_name.load_state_dict(by_number.state_dict())
    orthogonalize(by_number, heads)
    orthogonalize(by_name, name)
    assert all(torch.equal(x, by_name.state_dict()[key]) for key, x in by_number.state_dict().items())


def test_groups_of_heads_preserve_the_function_too():
    model = randomize(vit())
    expected = model(images())
    orthogonalize(model, 2, preserve=True)
    assert model.blocks[0].attn.qkv.core.shape == (4, 24, 24)
    assert (model(images()) - expected).abs().max() < LOGITS


def test_groups_must_divide_the_heads():
    refuses(vit(), r"blocks.0.attn.qkv.weight has 4 heads, so .* must divide 4, got constraint=3", 3)
    for value in (0, -2, True, 1.0):
        refuses(vit(), f"or the number of heads that share a block, got {value}", value)


# ------------------------------------------------------------------------------------------------------ scales


@pytest.mark.parametrize("build", [vit, siglip, eva, cait])
def test_a_scale_starts_at_one_and_multiplies_the_logits_of_its_head(build):
    model, scaled = randomize(build()), build()
    scaled.load_state_dict(model.state_dict())
    orthogonalize(model, "within")
    orthogonalize(scaled.eval(), "within", scale=True)
    assert (scaled(images()) - model(images())).abs().max() < LOGITS
    cores = [layer for layer in scaled.modules() if isinstance(layer, CoredLinear)]
    assert cores
    assert all(torch.equal(layer.core, torch.ones(4)) for layer in cores)
    scaled(images()).square().sum().backward()
    assert all(layer.core.grad.abs().max() > 0 for layer in cores)


def test_a_scale_acts_on_its_own_head_and_on_q_alone():
    attention = orthogonalize(timm.layers.Attention(48, num_heads=4), "within", projections="qkv", scale=True)
    with torch.no_grad():
        attention.qkv.core.copy_(torch.tensor([1.0, 2.0, 0.5, 1.0]))
    W, O = attention.qkv.cored_weight(), attention.qkv.weight
    expected = O.detach().clone()
    expected[12:24] *= 2
    expected[24:36] *= 0.5
    assert torch.equal(W, expected)


def test_released_weights_compute_the_same_without_constraint_or_core():
    for options in ({"scale": True}, {"preserve": True}):
        model = orthogonalize(randomize(vit()), "across", **options)
        with torch.no_grad():
            model.blocks[0].attn.qkv.core.mul_(1.5)
        expected = model(images())
        assert release(model) is model
        assert not list(stiefel_parameters(model))
        assert not hasattr(model, "orthogonal")
        assert set(model.state_dict()) == set(vit().state_dict())
        assert (model(images()) - expected).abs().max() < LOGITS


def test_scales_have_their_refusals():
    refuses(vit(), "the cores of preserve=True include a scale", scale=True, preserve=True)
    refuses(torchvision_vit(), "scale=True needs a place for a core", scale=True)


# ----------------------------------------------------------------------------------------------- what was done


def test_it_notes_how_far_each_block_moved_and_how_it_was_conditioned(capsys):
    model = vit(depth=1)
    with torch.no_grad():
        W = model.blocks[0].attn.qkv.weight
        W[:96] = torch.eye(48).repeat(2, 1)
        W[0] *= 3
    orthogonalize(model, "within", verbose=True)
    (noted,) = model.orthogonal["blocks"]
    assert noted["name"] == "blocks.0.attn.qkv.weight"
    assert noted["condition"] == pytest.approx([3.0] + 7 * [1.0])
    assert noted["moved"] == pytest.approx([2 / 20**0.5] + 7 * [0.0], abs=1e-6)
    text = capsys.readouterr().out
    assert "blocks.0.attn.qkv.weight: 8 blocks moved by 0.45 of their norm at most" in text
    assert "condition numbers up to 3" in text
    assert "preserve=True would keep it" in text
    orthogonalize(vit(), "within", preserve=True, verbose=True)
    assert "the network computes what it did before" in capsys.readouterr().out


def test_it_prints_nothing_unasked(capsys):
    assert orthogonalize(vit(), "within", init="keep").orthogonal["blocks"] == []
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------------------ other names


class NamedAsHuggingFace(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_attention_heads = 4
        self.query, self.key, self.value = (nn.Linear(48, 48) for _ in range(3))


def test_hugging_faces_names_are_known():
    attention = orthogonalize(NamedAsHuggingFace(), "within", scale=True)
    assert [name for name, _ in stiefel_parameters(attention)] == ["query.weight", "key.weight"]
    assert attention.query.weight.matrices().shape == (4, 12, 48)
    assert attention.query.core.shape == (4,)
    assert not hasattr(attention.key, "core")


def test_a_scale_multiplies_biased_queries_and_so_the_logits():
    torch.manual_seed(0)
    attention = timm.layers.Attention(48, num_heads=4, qkv_bias=True)
    nn.init.normal_(attention.qkv.bias)
    x = torch.randn(2, 5, 48)
    before = orthogonalize(attention, "within", scale=True).qkv(x)
    with torch.no_grad():
        attention.qkv.core.fill_(2.0)
    after = attention.qkv(x)
    torch.testing.assert_close(after[..., :48], 2 * before[..., :48])
    torch.testing.assert_close(after[..., 48:], before[..., 48:])
    attention.qkv.fold()
    torch.testing.assert_close(attention.qkv(x), after)


@pytest.mark.parametrize("first", ["qkv", "qk+mlp"])
def test_a_second_call_with_fewer_projections_frees_the_others(first):
    model = orthogonalize(vit(), "within", projections=first)
    orthogonalize(model, "within", projections="qk")
    once = orthogonalize(vit(), "within", projections="qk")
    ours, expected = ({name: p.rows for name, p in stiefel_parameters(m)} for m in (model, once))
    assert ours == expected
