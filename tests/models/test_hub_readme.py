"""The model card of an exported folder, as the Hugging Face hub reads it, and the folder behind `hf-hub:`."""

import dataclasses
import shutil

import huggingface_hub
import pytest
import timm
import torch
from PIL import Image

from ortho_vit.models import export_for_hub, find_checkpoint, load_checkpoint
from ortho_vit.models.readme import hub_readme

NAME = "ortho_vit_digits.digits_within_stiefel_sgd"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return export_for_hub(find_checkpoint(NAME), tmp_path_factory.mktemp("hub") / "folder")


def test_the_hub_reads_the_header(folder):
    card = find_checkpoint(NAME).card
    data = huggingface_hub.ModelCard.load(folder / "README.md").data
    assert (data.license, data.library_name, data.pipeline_tag) == ("mit", "timm", "image-classification")
    assert (data.datasets, data.metrics) == (["digits"], ["accuracy"])
    assert {"timm", "image-classification"} <= set(data.tags)
    found = {result.metric_name: result.metric_value for result in data.eval_results}
    assert found == {
        "test accuracy": pytest.approx(card.accuracy["test/accuracy"], abs=1e-6),
        "test accuracy (top 5)": pytest.approx(card.accuracy["test/accuracy_top5"], abs=1e-6),
    }
    assert {result.task_type for result in data.eval_results} == {"image-classification"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "(qk) are orthonormal within each head"),
        ({"constraint": 3}, "(qk) are orthonormal in blocks of 3 heads"),
        ({"constraint": None}, "with unconstrained attention"),
        ({"licence": "my own terms"}, "license: other\nlicense_name: my own terms\n"),
        ({"data": "CIFAR10"}, "- uoft-cs/cifar10\n"),
        ({"name": "ortho_vit_compact.x"}, "import ortho_vit.models"),
    ],
)
def test_the_page_says_what_the_card_does(changes, expected):
    card = dataclasses.replace(find_checkpoint(NAME).card, **changes)
    assert expected in hub_readme(card)
    assert ("max \\|WWᵀ − I\\|" in hub_readme(card)) == (card.constraint is not None)


def test_the_usage_on_the_page_runs(folder, tmp_path, monkeypatch):
    page = (folder / "README.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    Image.new("RGB", (20, 30), "grey").save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code.replace("hf-hub:USER/NAME", f"local-dir:{folder}"), names)
    assert names["probabilities"].shape == (1, 10)
    assert names["probabilities"].sum().item() == pytest.approx(1, abs=1e-5)


def test_the_folder_loads_by_its_name_on_the_hub(folder, tmp_path, monkeypatch):
    """What `huggingface_hub` has downloaded lies in its cache, so that it needs no connection."""
    commit, cached = "0" * 40, tmp_path / "models--user--name"
    shutil.copytree(folder, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model = timm.create_model("hf-hub:user/name", pretrained=True, cache_dir=tmp_path).eval()
    images = torch.randn(2, 1, 8, 8)
    expected = load_checkpoint(find_checkpoint(NAME)).eval()(images)
    torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=0)
