"""Statistics of the heads: against their definitions, and as a run records them."""

import json
import math

import pytest
import timm
import torch
from torch import nn

from ortho_vit.models import create_model
from ortho_vit.models.attention import find_attention
from ortho_vit.training.attention_statistics import AttentionStatistics, attention_statistics
from ortho_vit.training.images import recorded_attention
from ortho_vit.training.recorder import Recorder
from tests.helpers.small_run import digits, make_classifier, make_trainer

PATHS = [f"blocks.{i}.attn" for i in range(3)]


def small(**kwargs):
    torch.manual_seed(0)
    model = create_model("ortho_vit_digits", **{"constraint": None} | kwargs)
    for attention in find_attention(model):
        nn.init.normal_(attention.projections[0].weight, std=0.3)
    return model, torch.randn(5, 1, 8, 8)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_entropy_is_that_of_the_attention_the_model_computes(qk_norm):
    model, images = small(qk_norm=qk_norm)
    with recorded_attention(model) as record, torch.no_grad():
        model.eval()(images)
    model.train()
    statistics = attention_statistics(model, images)
    assert model.training
    assert list(statistics) == PATHS
    for path, p in zip(PATHS, record, strict=True):  # B, h, N, N
        entropy = torch.distributions.Categorical(p).entropy().mean((0, 2))
        torch.testing.assert_close(statistics[path]["entropy"], entropy)


def test_the_largest_logit_is_that_of_queries_and_keys():
    model, images = small()
    attention, seen = model.blocks[0].attn, []
    hook = attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    statistics = attention_statistics(model, images)
    hook.remove()
    q, k, _ = attention.qkv(seen[0]).view(5, -1, 3, 4, 16).permute(2, 0, 3, 1, 4)  # B, h, N, d_k each
    logits = torch.einsum("bhnc,bhmc->bhnm", q, k) / 4  # √16
    torch.testing.assert_close(statistics[PATHS[0]]["logit_max"], logits.amax((0, 2, 3)))


def test_singular_values_are_those_of_the_projections_and_of_their_bilinear_form():
    model, images = small()
    statistics = attention_statistics(model, images)[PATHS[1]]
    q, k, _ = model.blocks[1].attn.qkv.weight.detach().view(3, 4, 16, 64)
    for name, matrix in {"q": q, "k": k, "qk": q.mT @ k}.items():
        singular = torch.linalg.svdvals(matrix)[:, :16]
        torch.testing.assert_close(statistics[f"{name}_max"], singular[:, 0])
        torch.testing.assert_close(statistics[f"{name}_min"], singular[:, -1], rtol=1e-4, atol=1e-5)
    share = singular / singular.sum(-1, keepdim=True)
    rank = torch.distributions.Categorical(share).entropy().exp()
    torch.testing.assert_close(statistics["effective_rank"], rank)


def test_orthonormal_heads_have_full_effective_rank():
    model = create_model("ortho_vit_digits", constraint="within")
    for statistics in attention_statistics(model, torch.randn(2, 1, 8, 8)).values():
        for name in ("q_max", "q_min", "k_max", "k_min", "qk_max", "qk_min"):
            torch.testing.assert_close(statistics[name], torch.ones(4))
        torch.testing.assert_close(statistics["effective_rank"], torch.full((4,), 16.0))


def test_equal_keys_have_the_entropy_of_chance():
    model, images = small()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[64:128] = 0  # keys
    entropy = attention_statistics(model, images)[PATHS[0]]["entropy"]
    torch.testing.assert_close(entropy, torch.full((4,), math.log(5)))  # 4 patches and the class token


def test_attention_of_another_kind_has_the_statistics_of_its_weights():
    model = timm.create_model("eva02_tiny_patch14_224", img_size=28, depth=1)
    (statistics,) = attention_statistics(model, torch.randn(1, 3, 28, 28)).values()
    assert {"q_max", "k_min", "effective_rank"} <= statistics.keys()
    assert "entropy" not in statistics


def test_a_run_records_every_head_each_epoch_and_trains_as_without(tmp_path):
    watched, alone = make_classifier(), make_classifier()
    data = digits(val_size=0, limit=100)  # the last batch has 4 images
    callbacks = AttentionStatistics(images=16), Recorder()
    trainer = make_trainer(tmp_path / "a", *callbacks)
    trainer.fit(watched, data)
    trainer.test(watched, data, verbose=False)
    make_trainer(tmp_path / "b").fit(alone, digits(val_size=0, limit=100))
    for one, other in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)
    curve = json.loads((tmp_path / "a/result.json").read_text())["curve"]
    assert [list(point["attention"]) for point in curve] == [PATHS, PATHS]
    assert [len(values) for values in curve[0]["attention"][PATHS[0]].values()] == [4] * 9
    assert callbacks[0]._last_images.shape == (16, 1, 8, 8)
    assert callbacks[0].latest == curve[1]["attention"] != curve[0]["attention"]


def test_the_number_of_images_is_checked():
    with pytest.raises(ValueError, match="images must be at least 1, got 0"):
        AttentionStatistics(images=0)
