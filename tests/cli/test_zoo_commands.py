"""`models`, `info`, `verify` and `onnx`: the trained weights on the command line."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from ortho_vit.cli.main import main
from ortho_vit.models import create_model, find_checkpoint, list_models
from tests.helpers.command_line import refused

NAME = "ortho_vit_digits.digits_within_stiefel_sgd"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ortho-vit"])
    return tmp_path


def test_models_are_listed_with_their_accuracy(capsys):
    assert main(["models"]) == 0
    table = capsys.readouterr().out
    for name in list_models(pretrained=True):
        (line,) = [line for line in table.splitlines() if f" {name} " in line]
        card = find_checkpoint(name).card
        assert f"{next(iter(card.accuracy.values())):.2%}" in line
        assert f"{card.parameters:,}" in line
    assert main(["models", "*digits_none*"]) == 0
    assert "within" not in capsys.readouterr().out


def test_info_prints_the_card(capsys):
    assert main(["info", NAME]) == 0
    card, text = find_checkpoint(NAME).card, capsys.readouterr().out
    for value in (card.name, card.sha256, card.licence, "8×8", "StiefelSGD", "within", card.command):
        assert value in text


def test_verify_measures_the_difference_of_the_logits(capsys):
    assert main(["verify", NAME]) == 0
    line = capsys.readouterr().out
    assert float(line.rsplit(" ", 1)[1]) < 1e-4


def test_damaged_weights_are_refused(folder, capsys):
    weights = find_checkpoint(NAME).weights
    for path in (weights, weights.with_suffix(".json")):
        shutil.copy(path, folder)
    data = bytearray((folder / weights.name).read_bytes())
    data[-1] ^= 1
    (folder / weights.name).write_bytes(data)
    assert main(["verify", str(folder / weights.name)]) == 1
    output = capsys.readouterr()
    assert not output.out
    assert "sha256" in output.err.lower()
    assert output.err.count("\n") == 1


def test_onnx_takes_batches_of_any_size(capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert main(["onnx", NAME, "out/digits.onnx"]) == 0
    shown = capsys.readouterr()
    assert "onnxruntime computes the card's logits" in shown.out
    assert [line[:3] for line in shown.err.splitlines()] == ["1/3", "2/3", "3/3"]
    assert [path.name for path in Path("out").iterdir()] == ["digits.onnx"]
    session = onnxruntime.InferenceSession("out/digits.onnx")
    model = create_model(NAME, pretrained=True).eval()
    for n in (1, 3, 8):
        images = torch.randn(n, 1, 8, 8)
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(logits), model(images), atol=1e-4, rtol=0)
    assert main(["onnx", NAME, "out/digits.onnx"]) == 1
    assert "out/digits.onnx is there already; choose another name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["info"], 2, "missing: name"),
        (["info", f"{NAME}x"], 1, "no checkpoint 'ortho_vit_digits.digits_within_stiefel_sgdx'"),
        (["onnx", NAME], 2, "missing: out"),
        (["onnx", NAME, "out.pt"], 1, "the file must end in .onnx, got 'out.pt'"),
        (["models", "resnet*"], 1, "no weights match 'resnet*'; `ortho-vit models` lists them all"),
        (["verify", NAME, "--exact"], 2, "unknown argument --exact"),
    ],
)
def test_a_mistake_ends_in_one_line(arguments, code, message, capsys, folder):
    refused(arguments, message, capsys, codes=(code,))
