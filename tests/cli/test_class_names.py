"""Class names belong to weights: data with other names, or another order of them, is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from ortho_vit.cli.export import parse
from ortho_vit.cli.main import main
from ortho_vit.data import Digits, ImageFolder
from ortho_vit.training.same_data import check_classes
from tests.helpers.command_line import refused, train, work_in_copy
from tests.helpers.image_files import class_folders
from tests.helpers.small_run import digits, make_classifier, make_trainer

CONFIG = """
model:
  name: ortho_vit_pico
  model_kwargs: {depth: 1}
  optimizer: {class_path: ortho_vit.optim.StiefelSGD, init_args: {lr: 0.01}}
data:
  class_path: ortho_vit.data.ImageFolder
  init_args: {root: images, image_size: 32, batch_size: 4}
trainer: {max_epochs: 1, accelerator: cpu, devices: 1}
"""
RUN = "runs/run/version_0"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    class_folders(folder / "images", ("train", "test"), ("apple", "leaf"))
    export = f"export --ckpt_path {RUN}/checkpoints/last.ckpt --name fruit --folder zoo"
    return train(folder, CONFIG, "--config run.yaml", export)


@pytest.fixture
def renamed(trained, tmp_path, monkeypatch):
    """The run, beside a folder whose first class has been renamed, so that it sorts after the other."""
    work_in_copy(trained, tmp_path, monkeypatch)
    for part in ("train", "test"):
        Path(f"images/{part}/apple").rename(f"images/{part}/red_apple")
    return tmp_path


def test_a_run_checkpoint_holds_the_names(trained):
    saved = torch.load(trained / RUN / "checkpoints/last.ckpt", weights_only=True)
    assert saved["ortho_vit"]["classes"] == ["apple", "leaf"]


@pytest.mark.parametrize(
    "command",
    [
        f"fit --config {RUN}/config.yaml --trainer.max_epochs 2 --ckpt_path last",
        f"validate --config {RUN}/config.yaml --ckpt_path last",
        f"test --config {RUN}/config.yaml --ckpt_path last",
        f"predict --config {RUN}/config.yaml --ckpt_path last",
        f"test --config {RUN}/config.yaml --model.weights {RUN}/checkpoints/last.ckpt",
        "test --weights zoo/ortho_vit_pico.fruit.safetensors --data.root images",
        f"export --ckpt_path {RUN}/checkpoints/last.ckpt --name again --folder zoo",
    ],
)
def test_data_of_other_names_is_refused_in_one_line(renamed, capsys, command):
    name = () if command.startswith("export") or "--weights zoo" in command else ("--name", "run")
    message = "its class 0 is 'apple', but that of ImageFolder is 'leaf'; give data whose classes"
    refused([*command.split(), *name], message, capsys)


@pytest.mark.parametrize(
    "command",
    [
        f"fit --config {RUN}/config.yaml --trainer.max_epochs 2 --ckpt_path {RUN}",
        f"test --ckpt_path {RUN}",
        f"predict --ckpt_path {RUN} --predictions.path out.csv",
        "test --weights zoo/ortho_vit_pico.fruit.safetensors --data.root images",
        f"export --ckpt_path {RUN} --name again --folder zoo",
    ],
)
def test_a_mapping_gives_the_data_the_names_of_the_weights(renamed, trained, capsys, command):
    assert main([*command.split(), "--data.class_names", "{red_apple: apple}"]) == 0
    # The same predictions, under the same names, as before the folder was renamed
    if command.startswith("predict"):
        capsys.readouterr()
        shutil.copytree(trained / "images", "before")
        assert main(["predict", "--ckpt_path", RUN, "--data.root", "before", "--predictions.path", "-"]) == 0
        rows = [line.replace("red_apple/", "apple/") for line in Path("out.csv").read_text().splitlines()]
        assert sorted(rows) == sorted(capsys.readouterr().out.splitlines())
    if command.startswith("export"):
        again, before = (
            json.loads(Path(f"zoo/ortho_vit_pico.{name}.json").read_text()) for name in ("again", "fruit")
        )
        assert again["classes"] == before["classes"] == ["apple", "leaf"]
        assert again["accuracy"] == before["accuracy"]
        assert "class_names" not in str(again["recipe"])


def test_a_mapping_that_does_not_fit_is_refused(renamed, capsys):
    for mapping, message in (
        (
            "{apple: leaf}",
            "class_names has ['apple'], which is not a class folder of images/train: leaf; red_apple",
        ),
        ("{red_apple: leaf}", "class_names gives 'leaf' and 'red_apple' the same name, 'leaf'"),
        ("{leaf: apple}", "its class 1 is 'leaf', but that of ImageFolder is 'red_apple'"),
        ("{red_apple: pear}", """rename some with --data.class_names '{"red_apple": "apple"}'"""),
    ):
        assert main(["test", "--ckpt_path", RUN, "--data.class_names", mapping]) in (1, 2)
        assert message in capsys.readouterr().err
    assert main(["export", "--ckpt_path", RUN, "--name", "x", "--data.class_names", "apple"]) == 2
    assert "expected a mapping such as '{red_apple: apple}', got apple" in capsys.readouterr().err


def test_the_same_names_are_accepted(trained, monkeypatch):
    monkeypatch.chdir(trained)
    assert main(["test", "--weights", "zoo/ortho_vit_pico.fruit.safetensors", "--data.root", "images"]) == 0


class Reversed(Digits):
    classes = tuple(reversed(Digits.classes))


class Nameless(Digits):
    """The number of its classes, and no names."""

    num_classes = 10  # type: ignore[assignment]
    classes = None  # type: ignore[assignment]


def test_from_python_too_and_data_without_names_is_compared_by_number(tmp_path):
    model = make_classifier()
    make_trainer(tmp_path, max_epochs=1).fit(model, datamodule=digits())
    last = tmp_path / "checkpoints/last.ckpt"
    loaded = type(model).load_from_checkpoint(last, weights_only=True)
    for other in (model, loaded):
        with pytest.raises(
            ValueError, match="of other classes: its class 0 is '0', but that of Reversed is '9'"
        ):
            make_trainer(tmp_path).test(other, datamodule=Reversed(limit=32), verbose=False)
    with pytest.raises(ValueError, match=r"last.ckpt is of other classes"):
        make_trainer(tmp_path).fit(make_classifier(), datamodule=Reversed(limit=128), ckpt_path=last)
    assert make_trainer(tmp_path).test(loaded, datamodule=Nameless(limit=32), verbose=False)


def test_names_that_yaml_reads_as_numbers_or_booleans_are_names(tmp_path, monkeypatch):
    for name in ("3", "yes"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "image.png")
    data = ImageFolder(str(tmp_path), class_names={3: "three"}, val_size=0)
    assert data.classes == ("three", "yes")
    with pytest.raises(ValueError, match="its class 0 is '1', but that of ImageFolder is 'three'") as refusal:
        check_classes(["1", "yes"], data, "run")
    (hint,) = re.findall(r"--data.class_names '(.*)', or", str(refusal.value))
    assert parse(["--ckpt_path", "x", "--name", "y", "--data.class_names", hint]).class_names == {"3": "1"}
    options = parse(["--ckpt_path", "x", "--name", "y", "--data.class_names", "{ja: yes, 3: 1}"])
    assert options.class_names == {"ja": "yes", "3": "1"}
