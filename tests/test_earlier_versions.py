"""What version 0.1 has written still loads: run checkpoints are resumed, weights with a card are loaded.

A resumed run of version 0.1 continues with the present arithmetic, which rounds differently; a warning says so.
"""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from ortho_vit import create_model, orthogonality_error
from ortho_vit.cli.main import main
from ortho_vit.models import Checkpoint
from ortho_vit.training import Classifier
from ortho_vit.training.classifier import NUMERICS
from ortho_vit.training.measuring import rounding_error
from tests.helpers.small_run import digits, make_trainer

FIXTURES = Path(__file__).parent / "fixtures/v0_1"
RUNS = sorted(path.name for path in FIXTURES.glob("command_line_*"))
FILES = sorted(path.name for path in FIXTURES.glob("python_*.ckpt"))
EARLIER = "is of an earlier version, whose steps round differently"

pytestmark = pytest.mark.filterwarnings("ignore:ortho_vit.optim.momentum_stiefel is now:FutureWarning")


def allowed_error(name):
    """Of X Xᵀ − I: what float32 leaves, or what rounding to bfloat16 does."""
    return rounding_error(torch.bfloat16) if "bfloat16" in name else 2e-6


def step_of(path):
    return torch.load(path, weights_only=True)["global_step"]


def test_there_are_runs_of_every_kind():
    assert len(RUNS) == len(FILES) == 8


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_the_command_line_goes_on(name, tmp_path, monkeypatch):
    run = shutil.copytree(FIXTURES / name, tmp_path / "run")
    last = run / "checkpoints/last.ckpt"
    monkeypatch.chdir(tmp_path)
    assert step_of(last) == 6
    arguments = ["--config", str(run / "config.yaml"), "--ckpt_path", str(last)]
    with pytest.warns(UserWarning, match=EARLIER) as warned:
        assert main(["fit", *arguments, "--trainer.max_steps", "9", "--trainer.max_epochs", "3"]) == 0
    assert len([w for w in warned if EARLIER in str(w.message)]) == 1
    saved = torch.load(last, weights_only=True)
    assert (saved["global_step"], saved["ortho_vit"]["numerics"]) == (9, NUMERICS)
    assert saved["ortho_vit"]["classes"] == [str(digit) for digit in range(10)]
    assert main(["test", *arguments]) == 0  # without a warning, as it is of this version now


@pytest.mark.parametrize("name", FILES)
def test_a_run_from_python_goes_on(name, tmp_path):
    path = FIXTURES / name
    model = Classifier.load_from_checkpoint(path, weights_only=True)
    saved = torch.load(path, weights_only=True)
    for key, value in saved["state_dict"].items():
        assert torch.equal(model.state_dict()[key].to(value.dtype), value)
    precision = "bf16-true" if "bfloat16" in name else "32-true"
    trainer = make_trainer(tmp_path, max_epochs=-1, max_steps=saved["global_step"] + 2, precision=precision)
    with pytest.warns(UserWarning, match=EARLIER):
        trainer.fit(model, datamodule=digits(), ckpt_path=path)
    assert trainer.global_step == saved["global_step"] + 2
    assert orthogonality_error(model.model) <= allowed_error(name)


def test_the_old_path_of_a_class_is_an_alias_that_warns(monkeypatch):
    monkeypatch.delitem(sys.modules, "ortho_vit.optim.momentum_stiefel", raising=False)
    saved = torch.load(FIXTURES / FILES[0], weights_only=True)
    assert saved["hyper_parameters"]["optimizer"]["class_path"].startswith(
        "ortho_vit.optim.momentum_stiefel."
    )
    with pytest.warns(
        FutureWarning, match="ortho_vit.optim.momentum_stiefel is now ortho_vit.optim.momentum"
    ):
        Classifier.load_from_checkpoint(FIXTURES / FILES[0], weights_only=True)


def test_weights_with_a_card_are_loaded():
    checkpoint = Checkpoint.open(FIXTURES / "card/ortho_vit_digits.old.safetensors")
    model = create_model("ortho_vit_digits.old", pretrained=True, checkpoints=FIXTURES / "card", verify=True)
    assert checkpoint.card.golden_error(model) < 1e-4
    assert orthogonality_error(model) < 2e-6
