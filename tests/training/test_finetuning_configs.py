"""The files in configs/finetune/ run from weights of a zoo, by command and from Python."""

from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

from ortho_vit import create_model, orthogonality_error
from ortho_vit.cli.main import main
from ortho_vit.data import ImageFolder
from ortho_vit.models import save_checkpoint
from ortho_vit.optim import StiefelAdam
from ortho_vit.training import Classifier

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]

CONFIGS = Path(__file__).parents[2] / "configs/finetune"
NAME = "ortho_vit_nano.cifar10_within_stiefel_sgd"
SMALL = "--trainer.max_epochs 1 --trainer.accelerator cpu --data.batch_size 4 --model.warmup_epochs 0"


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A zoo with weights of that name, and images of two classes, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORTHO_VIT_CHECKPOINTS", "zoo")
    generator = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for i in range(6):
            pixels = generator.integers(0, 255, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"images/{label}/{i}.png")
    about = {"classes": list("abcdefghij"), "data": "letters", "mean": [0.5] * 3, "std": [0.2] * 3}
    about |= {"accuracy": {"test/accuracy": 0.1}, "command": "none", "optimizer": {}, "recipe": {}}
    model = create_model("ortho_vit_nano")
    pixels = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    save_checkpoint(model, NAME, pixels=pixels, labels=[0], folder="zoo", **about)
    return model.state_dict()


def state_of(name):
    path = f"runs/finetune/{name}/version_0/checkpoints/last.ckpt"
    return torch.load(path, weights_only=True)["state_dict"]


def test_digits_are_learnt_from_weights_of_cifar10(weights, capsys):
    arguments = ["--config", str(CONFIGS / "cifar10_to_digits.yaml"), *SMALL.split(), "--data.limit", "8"]
    assert main([*arguments, "--model.freeze", '["blocks.0.*"]']) == 0
    assert "test accuracy" in capsys.readouterr().out
    after = state_of("cifar10_to_digits")
    key = "blocks.0.attn.qkv.weight"
    assert torch.equal(after[f"model.{key}"], weights[key])
    assert not torch.equal(after["model.blocks.1.attn.qkv.weight"], weights["blocks.1.attn.qkv.weight"])


@pytest.mark.parametrize("freeze", [False, True])
def test_own_images_are_learnt_from_weights_of_the_zoo(weights, freeze):
    path = CONFIGS / "imagefolder_nano.yaml"
    arguments = ["--config", str(path), *SMALL.split(), "--data.root", "images", "--data.val_size", "4"]
    if freeze:  # as the file's own comment says
        line = next(line for line in path.read_text().splitlines() if "--model.freeze" in line)
        patterns = line.split("'")[1]
        arguments += ["--model.freeze", patterns, "--model.layer_decay", "1"]
    assert main(arguments) == 0
    after = state_of("imagefolder_nano")
    changed = {key for key, value in weights.items() if not torch.equal(after[f"model.{key}"], value)}
    assert after["model.head.weight"].shape == (2, 96)
    assert (changed == {"head.weight", "head.bias"}) == freeze


def test_the_same_in_ten_lines_of_python(weights):
    data = ImageFolder("images", image_size=32, batch_size=4, val_size=4)
    optimizer = partial(StiefelAdam, lr=2e-3)
    model = Classifier(
        "ortho_vit_nano", optimizer, weights=NAME, num_classes=2, layer_decay=0.75, freeze=["patch_embed.*"]
    )
    assert torch.equal(model.model.blocks[0].attn.qkv.weight, weights["blocks.0.attn.qkv.weight"])
    L.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, data)  # fmt: skip
    assert not torch.equal(model.model.blocks[0].attn.qkv.weight, weights["blocks.0.attn.qkv.weight"])
    assert torch.equal(model.model.patch_embed.proj.weight, weights["patch_embed.proj.weight"])
    assert orthogonality_error(model) < 2e-6
