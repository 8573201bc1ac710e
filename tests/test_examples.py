"""The examples run, learn something, and stay short."""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
CHANCE = 0.1  # ten digits


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_fits_a_screen_and_imports_no_other(path):
    assert len(path.read_text().splitlines()) < 60
    assert "from examples" not in path.read_text()


def test_a_plain_pytorch_loop(capsys):
    assert importlib.import_module("examples.plain_pytorch").main(epochs=3) > 3 * CHANCE
    text = capsys.readouterr().out
    assert "epoch 3: test accuracy" in text
    assert "2 of them constrained: 2 by StiefelSGD" in text
    assert "problems" not in text


def test_a_timm_model_is_fine_tuned(capsys):
    assert importlib.import_module("examples.timm_finetune").main(steps=100) > 2 * CHANCE
    text = capsys.readouterr().out
    assert "step 50: loss" in text
    assert "3 of them constrained: 3 by StiefelAdam" in text


@pytest.mark.parametrize(("name", "needs"), [("huggingface", "transformers"), ("sweep", "optuna")])
def test_an_example_without_its_package_says_so_in_one_line(name, needs, monkeypatch):
    monkeypatch.setitem(sys.modules, needs, None)
    monkeypatch.delitem(sys.modules, f"examples.{name}", raising=False)
    with pytest.raises(SystemExit, match=rf"examples/{name}.py needs \w+: pip install {needs}"):
        importlib.import_module(f"examples.{name}")


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_hugging_face_model_is_constrained(capsys):
    assert importlib.import_module("examples.huggingface").main(steps=100) > 2 * CHANCE
    assert "4 of them constrained: 4 by StiefelSGD" in capsys.readouterr().out


@pytest.mark.skipif(find_spec("optuna") is None, reason="optuna is not installed")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*deprecated")
def test_a_sweep_finds_a_learning_rate(capsys):
    assert importlib.import_module("examples.sweep").main(trials=2, epochs=1) > 2 * CHANCE
