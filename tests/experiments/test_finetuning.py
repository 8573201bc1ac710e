"""The comparison of fine-tuning and training from scratch, in small."""

import csv
import json

import pytest
import torch

from ortho_vit import create_model
from ortho_vit.experiments import finetuning
from ortho_vit.experiments.finetuning import digits_task, main, pretrained, train, ways
from ortho_vit.experiments.result import markdown, run_command
from ortho_vit.models import save_checkpoint
from tests.helpers.zoo_weights import ABOUT

NAME = "ortho_vit_pico.trial"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTHO_VIT_CHECKPOINTS", str(tmp_path))
    letters = ABOUT | {"classes": list("abcdefghij"), "arguments": {}}
    save_checkpoint(create_model("ortho_vit_pico"), NAME, folder=tmp_path, **letters)
    return tmp_path


def test_no_image_is_in_two_sets():
    task = digits_task()
    parts = [images for images, _ in (task.train, task.held_out, task.test)]
    sets = [{tuple(x.flatten().tolist()) for x in images} for images in parts]
    assert [len(images) for images in parts] == [1138, 300, 359]
    assert not sets[0] & sets[1]
    assert not (sets[0] | sets[1]) & sets[2]


def test_few_images_are_of_all_classes_and_of_other_ones_by_seed():
    task = digits_task()
    (images, labels), (others, _) = task.few(50, 0), task.few(50, 1)
    assert labels.bincount().tolist() == [5] * 10
    assert not torch.equal(images, others)


def test_every_way_has_its_network_and_steps(folder):
    found = {way.label: way for way in ways(NAME, 10, 8)}
    sizes_and_steps = [(way.size, way.steps) for way in found.values()]
    assert sizes_and_steps == [(32, 10), (32, 10), (32, 30), (8, 30), (8, 30)]
    tuned, source = pretrained(NAME, 32), create_model(NAME, pretrained=True)
    assert torch.equal(tuned.blocks[0].attn.qkv.weight, source.blocks[0].attn.qkv.weight)
    assert not torch.equal(tuned.head.weight, source.head.weight)
    for way in found.values():
        assert way.build()(torch.zeros(1, 1, way.size, way.size)).shape == (1, 10)


def test_training_is_a_function_of_its_seed(folder):
    way = ways(NAME, 3, 8)[-1]
    images, labels = digits_task().few(20, 0)
    first, again, other = (train(way, images, labels, lr=1e-3, seed=s).head.weight for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_command_writes_table_numbers_and_figure(folder, capsys, monkeypatch):
    monkeypatch.setattr(finetuning, "RATES", (1e-3,))
    main(["--weights", NAME, "--quick", "--output", str(folder / "out")])
    saved = json.loads((folder / "out/finetuning-digits.json").read_text())
    assert markdown(saved["table"]) in capsys.readouterr().out
    assert saved["table"][0]["pretrained is better by"] is None
    with open(folder / "out/finetuning-digits.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10  # five ways, two seeds
    assert (folder / "out/finetuning-digits.png").stat().st_size > 1000


def test_missing_data_is_one_line(folder, capsys):
    arguments = ["--weights", NAME, "--data", "mnist", "--root", str(folder), "--output", str(folder)]
    assert run_command(main, arguments) == 1
    assert capsys.readouterr().err.startswith("error: no MNIST in ")
