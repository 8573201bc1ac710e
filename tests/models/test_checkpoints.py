"""Every checkpoint of the repository is what its card says."""

import hashlib
import shlex

import pytest
import timm
import torch

from ortho_vit import create_model, list_models, orthogonality_error
from ortho_vit.cli import main as cli
from ortho_vit.models import find_checkpoint
from ortho_vit.models.__main__ import catalogue, main
from ortho_vit.models.weights import available
from ortho_vit.resources import checkpoints_folder

FOLDER = checkpoints_folder()
NAMES = available(FOLDER)
DIGITS = [name for name in NAMES if find_checkpoint(name, FOLDER).card.data == "Digits"]  # needs no download


def test_they_are_listed_and_every_file_belongs_to_one():
    assert list_models(pretrained=True) == NAMES
    files = {path.name for path in FOLDER.iterdir() if not path.name.startswith(".")}
    assert files == {f"{name}.{suffix}" for name in NAMES for suffix in ("json", "safetensors")} | {
        "README.md"
    }
    assert len(DIGITS) >= 4


def test_together_they_are_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 20e6


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_what_its_card_says_and_timm_loads_the_same_model(name):
    checkpoint = find_checkpoint(name)
    card = checkpoint.card
    assert hashlib.sha256(checkpoint.weights.read_bytes()).hexdigest() == card.sha256
    model = create_model(name, pretrained=True)
    card.check_golden(model)
    assert card.parameters == sum(p.numel() for p in model.parameters())
    assert getattr(model, "orthogonal", {}).get("constraint") == card.constraint
    assert orthogonality_error(model) == pytest.approx(card.orthogonality_error, abs=1e-7)  # rounding of X Xᵀ
    assert card.orthogonality_error < 2e-6
    assert card.command == f"python train.py test --weights {name}"
    theirs = timm.create_model(name, pretrained=True)
    assert all(torch.equal(x, theirs.state_dict()[key]) for key, x in model.state_dict().items())
    card.check_golden(theirs)


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*deprecated")
@pytest.mark.parametrize("name", DIGITS)
def test_the_accuracy_on_digits_is_what_the_cards_command_measures(name, capsys):
    card = find_checkpoint(name).card
    assert cli.main(shlex.split(card.command)[2:]) == 0
    (line,) = (
        line
        for line in capsys.readouterr().out.splitlines()
        if "test accuracy " in line and "top" not in line
    )
    measured = float(line.split("│")[2].strip(" %")) / 100
    # One image may change its class elsewhere
    assert measured == pytest.approx(card.accuracy["test/accuracy"], abs=1.1 / 359)


def test_the_page_about_them_is_true_to_the_cards(tmp_path, capsys):
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == catalogue(FOLDER)
    for name in NAMES:
        for suffix in ("json", "safetensors"):
            (tmp_path / f"{name}.{suffix}").write_bytes((FOLDER / f"{name}.{suffix}").read_bytes())
    assert main([str(tmp_path)]) == 0
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == catalogue(FOLDER)
    assert main([str(tmp_path / "README.md")]) == 1
    assert "error: no checkpoints in" in capsys.readouterr().err
