"""Attention maps and Gram matrices from weights of a small zoo."""

import json

import pytest
import torch
from matplotlib.axes import Axes
from PIL import Image

from ortho_vit import create_model
from ortho_vit.experiments.attention import (
    attend,
    heads_of,
    image_of,
    main,
    measure,
    plot_attention,
    rollout,
)
from ortho_vit.experiments.result import run_command
from ortho_vit.models import find_checkpoint, save_checkpoint
from ortho_vit.models.weights import free_counterpart
from ortho_vit.pixels import normalize
from tests.helpers.zoo_weights import ABOUT

PIXELS = ABOUT["pixels"][:4]
ANIMALS = ABOUT | {"pixels": PIXELS, "labels": [2, 0, 1, 3], "classes": ["bird", "cat", "dog", "frog"]}
ANIMALS |= {"arguments": {"depth": 2}}
OURS, FREE = "ortho_vit_pico.within", "ortho_vit_pico.free"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTHO_VIT_CHECKPOINTS", str(tmp_path))
    for name, constraint in ((OURS, "within"), (FREE, None)):
        model = create_model("ortho_vit_pico", constraint=constraint, depth=2, num_classes=4)
        save_checkpoint(model, name, folder=tmp_path, **ANIMALS)
    return tmp_path


def test_attention_and_its_rollout_are_distributions(folder):
    probabilities, attention = attend(create_model(OURS, pretrained=True), torch.randn(1, 3, 32, 32))
    assert [A.shape for A in attention] == [(6, 17, 17)] * 2
    for each in (probabilities, *attention, rollout(attention)):
        torch.testing.assert_close(each.sum(-1), torch.ones(each.shape[:-1]))


def test_rollout_of_blocks_that_look_nowhere_else_is_the_identity():
    torch.testing.assert_close(rollout([torch.eye(5).expand(3, 5, 5)] * 4), torch.eye(5))


def test_heads_are_the_rows_of_the_fused_weight(folder):
    model = create_model(FREE, pretrained=True)
    weight = model.blocks[1].attn.qkv.weight
    assert torch.equal(heads_of(model, 1, "q")[2], weight[32:48])
    assert torch.equal(heads_of(model, 1, "k")[0], weight[96:112])


def test_only_orthonormal_heads_have_condition_one(folder):
    for name, orthonormal in ((OURS, True), (FREE, False)):
        for row in measure(name, create_model(name, pretrained=True)):
            values = [value for key, value in row.items() if "condition" in key]
            assert len(values) == 2
            assert all((abs(value - 1) < 1e-5) == orthonormal for value in values)


def test_images_come_from_the_card_or_a_file(folder):
    card = find_checkpoint(OURS).card
    assert torch.equal(image_of(card, None), PIXELS[0])
    assert torch.equal(image_of(card, "cat"), PIXELS[2])
    Image.fromarray(PIXELS[3].permute(1, 2, 0).numpy()).save(folder / "own.png")
    assert torch.equal(image_of(card, str(folder / "own.png")), PIXELS[3])
    with pytest.raises(
        ValueError, match=r"no image of 'horse' on the card of .*; give a file or one of dog, bird"
    ):
        image_of(card, "horse")


def test_the_command_draws_both_figures(folder, capsys):
    arguments = ["--weights", OURS, "--free", FREE, "--image", "cat", "--output", str(folder / "out")]
    main(arguments)
    assert "free, untrained" in capsys.readouterr().out
    assert {path.name for path in (folder / "out").iterdir()} == {"attention.png", "gram.png", "gram.json"}
    assert len(json.loads((folder / "out/gram.json").read_text())["table"]) == 6
    assert run_command(main, [*arguments, "--block", "3"]) == 1
    assert capsys.readouterr().err == "error: block must be in [1, 2], got 3\n"
    assert run_command(main, [*arguments, "--weights", "ortho_vit_pico.gone"]) == 1
    assert "no checkpoint 'ortho_vit_pico.gone'" in capsys.readouterr().err


def test_without_a_class_token_the_map_is_the_average_over_all_patches(folder, monkeypatch):
    name = "ortho_vit_compact.within"
    model = create_model("ortho_vit_compact", depth=2, num_classes=4)
    save_checkpoint(model, name, folder=folder, **ANIMALS)
    card, drawn = find_checkpoint(name).card, []
    monkeypatch.setattr(Axes, "imshow", lambda axes, image, **options: drawn.append(image))
    plot_attention(card, model, PIXELS[0])
    _, attention = attend(model, normalize(PIXELS[:1], card.mean, card.std))
    expected = [*attention[-1].mean(1), rollout(attention).mean(0)]
    for image, looks in zip(drawn[1:], expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(image).flatten(), looks)


def test_free_weights_are_those_of_the_same_architecture(folder):
    assert free_counterpart(find_checkpoint(OURS).card) == FREE
    model = create_model("ortho_vit_compact", depth=2, num_classes=4)
    save_checkpoint(model, "ortho_vit_compact.x", folder=folder, **ANIMALS)
    assert free_counterpart(find_checkpoint("ortho_vit_compact.x").card) is None
