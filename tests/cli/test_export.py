"""From a run to an entry of the zoo and back: export, then test and predict with what was exported."""

import csv
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from ortho_vit import create_model, orthogonality_error
from ortho_vit.cli import entry
from ortho_vit.cli.export import sample
from ortho_vit.cli.main import main
from ortho_vit.data import Digits
from ortho_vit.models import Checkpoint
from ortho_vit.models.__main__ import catalogue
from tests.helpers.command_line import REPOSITORY, refused, work_in_copy
from tests.helpers.image_files import class_folders

NAME = "ortho_vit_digits.small"
DIGITS = """
model:
  name: ortho_vit_digits
  model_kwargs: {depth: 2}
  optimizer: {class_path: ortho_vit.optim.StiefelAdam, init_args: {lr: 3.0e-3}}
data: {class_path: ortho_vit.data.Digits, init_args: {batch_size: 16, limit: 320}}
trainer:
  max_epochs: 10
  accelerator: cpu
  callbacks: [{class_path: ortho_vit.training.WeightAveraging, init_args: {decay: 0.9}}]
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run and of the entry made from it, not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "digits.yaml").write_text(DIGITS)
    assert main(["--config", f"{folder}/digits.yaml", "--trainer.default_root_dir", str(folder)]) == 0
    (folder / "digits/version_0").rename(folder / "run")
    assert export(folder, "--name", "small") == 0
    return folder


def export(folder, *options):
    run = () if "--ckpt_path" in options else ("--ckpt_path", f"{folder}/run/checkpoints/last.ckpt")
    return main(["export", "--folder", f"{folder}/zoo", *run, *options])


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    """A copy of it to work in."""
    monkeypatch.setenv("ORTHO_VIT_CHECKPOINTS", "zoo")
    return work_in_copy(trained, tmp_path, monkeypatch)


# -------------------------------------------------------------------------------------------------------------- export


def test_the_card_is_filled_from_the_run(folder):
    card = Checkpoint.open(f"zoo/{NAME}.json").card
    assert (card.name, card.constraint, card.arguments) == (NAME, "within", {"depth": 2})
    assert card.optimizer["class_path"] == "ortho_vit.optim.StiefelAdam"
    assert card.recipe["trainer"]["max_epochs"] == 10
    assert card.recipe["data"]["init_args"]["limit"] == 320
    assert (card.recipe["seed_everything"], card.recipe["steps"]) == (0, 200)
    assert (card.data, card.classes, card.mean, card.std) == (
        "Digits",
        list("0123456789"),
        [0.3053],
        [0.3759],
    )
    assert card.orthogonality_error < 2e-6
    card.check_golden(create_model(NAME, pretrained=True))


def test_the_golden_images_are_of_the_test_set_where_that_is_asked_for(folder):
    assert Checkpoint.open(f"zoo/{NAME}.json").card.golden.pixels == "synthetic"
    assert export(folder, "--name", "shown", "--golden_images", "true") == 0
    golden = Checkpoint.open("zoo/ortho_vit_digits.shown.json").card.golden
    images, labels = Digits().read(train=False)
    assert len(set(golden.labels)) == len(golden.images()) == 8
    for image, label in zip(golden.images(), golden.labels, strict=True):
        assert labels[(images == image).flatten(1).all(1)].tolist() == [label]


def test_fewer_classes_give_fewer_golden_images():
    class Two:
        classes, mean, std = ("a", "b"), (0.5,), (0.25,)

        def test_dataloader(self):
            pixels = torch.arange(256).view(256, 1, 1, 1)
            return [((pixels / 255 - 0.5) / 0.25, pixels.flatten() // 128)]

    pixels, labels = sample(Two(), 8)
    assert (pixels.flatten().tolist(), labels) == ([0, 128], [0, 1])


@pytest.mark.parametrize(
    "command",
    [
        "python train.py test --weights NAME",
        "python train.py test --config run/config.yaml --model.weights zoo/NAME.safetensors",
        "python train.py test --config run/config.yaml --ckpt_path run/checkpoints/last.ckpt",
        None,
    ],
)
def test_the_accuracy_is_what_the_commands_measure(folder, capsys, command):
    card = Checkpoint.open(f"zoo/{NAME}.json").card
    assert 0.1 < card.accuracy["test/accuracy"] < 1
    command = command.replace("NAME", NAME) if command else card.command
    assert main(shlex.split(command)[2:]) == 0
    assert f"│ {card.accuracy['test/accuracy']:.2%} " in capsys.readouterr().out


def test_averaged_weights_are_exported_where_the_run_averaged(folder):
    checkpoint = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    averaged, current = checkpoint["state_dict"], checkpoint["current_model_state"]
    exported = create_model(NAME, pretrained=True)
    assert orthogonality_error(exported) < 2e-6
    for key, value in exported.state_dict().items():
        assert torch.equal(value, averaged[f"model.{key}"])
    assert not torch.equal(exported.head.weight, current["model.head.weight"])


def test_the_card_names_the_weights_that_a_run_started_from(folder):
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    config["model"]["weights"] = "/on/one/machine/start.safetensors"
    Path("run/config.yaml").write_text(yaml.safe_dump(config))
    assert export(folder, "--name", "tuned") == 0
    card = Checkpoint.open("zoo/ortho_vit_digits.tuned.json").card
    assert card.recipe["model"]["weights"] == "start.safetensors"


def test_a_full_name_another_licence_and_overwriting(folder, capsys):
    assert export(folder, "--name", NAME, "--overwrite", "true", "--licence", "CC0-1.0") == 0
    output = capsys.readouterr().out
    assert "test accuracy" in output
    assert f"python train.py test --weights {folder}/zoo/{NAME}.safetensors" in output
    assert Checkpoint.open(f"zoo/{NAME}.json").card.licence == "CC0-1.0"


def test_a_place_on_one_machine_is_not_on_the_card(folder, capsys):
    class_folders(folder / "images")
    data = f"--data ImageFolder --data.root {folder}/images --data.image_size 32 --data.val_size 4"
    model = "--model.name ortho_vit_pico --name own --trainer.max_epochs 1 --trainer.default_root_dir runs"
    assert main(["--config", "digits.yaml", *data.split(), *model.split()]) == 0
    assert export(folder, "--ckpt_path", "runs/own/version_0/checkpoints/last.ckpt", "--name", "own") == 0
    printed = re.sub(r"[│\s]", "", capsys.readouterr().out)  # a table, whose cells may be folded
    assert f"ortho_vit_pico.own.safetensors--data.root{folder}/images" in printed
    card = Checkpoint.open("zoo/ortho_vit_pico.own.json").card
    assert card.command.endswith("ortho_vit_pico.own.safetensors --data.root FOLDER")
    assert card.classes == ["cat", "dog"]
    # None of the user's images unless asked for
    assert (card.golden.labels, card.golden.pixels) == ([], "synthetic")
    assert (card.crop_pct, card.licence) == (0.875, "unknown")
    assert "root" not in card.recipe["data"]["init_args"]
    assert list(card.accuracy) == ["val/accuracy"]  # there is no folder of test images
    assert f"{card.accuracy['val/accuracy']:.2%} (validation)" in catalogue(folder / "zoo")
    assert main(["test", "--weights", "ortho_vit_pico.own", "--data.root", "images"]) == 0
    assert main(["predict", "--weights", "ortho_vit_pico.own", "--pictures", "images/cat"]) == 0


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("", 2, "export needs --ckpt_path RUN, the folder of a run, and --name TAG"),
        ("--name x", 2, "export needs --ckpt_path"),
        ("--ckpt_path RUN --name x --model.name y", 2, "unknown argument --model.name"),
        ("--ckpt_path RUN --name x --foldr y", 2, "unknown argument --foldr; did you mean '--folder'?"),
        ("--ckpt_path RUN --name x --overwrite maybe", 2, "--overwrite"),
        ("--ckpt_path RUN --name ortho_vit_pico.x", 2, "but the run is of ortho_vit_digits: give --name "),
        ("--ckpt_path RUN --name ../x", 2, "name must be architecture.tag"),
        ("--ckpt_path RUN --name small", 2, "small.safetensors exists already; --overwrite true replaces it"),
        ("--ckpt_path gone.ckpt --name x", 2, "ckpt_path: no checkpoint gone.ckpt"),
        ("--ckpt_path digits.yaml --name x", 2, "ckpt_path: digits.yaml is "),
        ("--ckpt_path zoo/ortho_vit_digits.small.safetensors --name x", 2, "holds weights and no run"),
        ("--ckpt_path RUN --name x --config gone.yaml", 2, "no configuration gone.yaml"),
        ("--ckpt_path RUN --name x --config nodata.yaml", 2, "nodata.yaml names no data"),
        ("--ckpt_path RUN --name x --config noclass.yaml", 2, "noclass.yaml: data: there is no ortho_vit.data.Digit: "),
        ("--ckpt_path RUN --name x --config short.yaml", 2, "short.yaml: data: there is no CIFAR10: "),
        ("--ckpt_path RUN --name x --config option.yaml", 2, "option.yaml: data: "),
        ("--ckpt_path RUN --name x --config code.yaml", 2, "code.yaml: data: subprocess.Popen is not a data module"),
        ("--ckpt_path RUN --name x --config cifar.yaml", 2, "its class 0 is '0', but that of CIFAR10 is 'airplane'"),
        ("--ckpt_path RUN --name x --config cifar100.yaml", 2, "num_classes is 10, but CIFAR100 has 100 classes"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_refused_in_one_line(folder, capsys, options, code, message):
    Path("nodata.yaml").write_text("model: {}")
    Path("noclass.yaml").write_text("data: {class_path: ortho_vit.data.Digit}")
    Path("short.yaml").write_text("data: {class_path: CIFAR10}")
    Path("option.yaml").write_text("data: {class_path: ortho_vit.data.CIFAR10, init_args: {colour: 1}}")
    Path("code.yaml").write_text("data: {class_path: subprocess.Popen, init_args: {args: [mkdir, ran]}}")
    Path("cifar.yaml").write_text("data: {class_path: ortho_vit.data.CIFAR10, init_args: {root: gone}}")
    Path("cifar100.yaml").write_text("data: {class_path: ortho_vit.data.CIFAR100}")
    arguments = options.replace("RUN", "run/checkpoints/last.ckpt").split()
    refused(["export", "--folder", "zoo", *arguments], message, capsys, codes=(code,))


def test_a_checkpoint_without_its_configuration_is_refused(folder, capsys):
    Path("run/config.yaml").unlink()
    arguments = ["export", "--ckpt_path", "run/checkpoints/last.ckpt", "--folder", "zoo", "--name", "x"]
    refused(arguments, "beside run/checkpoints/last.ckpt: give the run's with --config", capsys, codes=(2,))
    Path("own.yaml").write_text(yaml.safe_dump({"data": yaml.safe_load(DIGITS)["data"]}))
    assert main([*arguments, "--config", "own.yaml"]) == 0


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("model.blocks.0.attn.qkv.weight", lambda x: x * 1.01, "blocks.0.attn.qkv.weight' is off the manifold"),
        ("model.norm.weight", lambda x: x * torch.nan, "norm.weight' has entries that are not finite"),
        ("model.norm.weight", lambda x: x[:5], "its weights do not fit the model it describes"),
    ],
)  # fmt: skip
def test_weights_that_are_no_good_are_refused(folder, capsys, key, change, message):
    path = "run/checkpoints/last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"][key] = change(checkpoint["state_dict"][key])
    torch.save(checkpoint, path)
    refused(["export", "--ckpt_path", path, "--folder", "zoo", "--name", "x"], message, capsys, codes=(2,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_run_in_low_precision_is_exported_in_float32_and_on_the_manifold(tmp_path, dtype):
    """bf16-true and 16-true; the run was written by version 0.1."""
    run = REPOSITORY / "tests/fixtures/v0_1/command_line_within_sgd_bfloat16"
    shutil.copytree(run, tmp_path / "run")
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    checkpoint["state_dict"] = {key: value.to(dtype) for key, value in checkpoint["state_dict"].items()}
    torch.save(checkpoint, tmp_path / "run/checkpoints/last.ckpt")
    assert export(tmp_path, "--name", "low") == 0
    model = create_model(f"{tmp_path}/zoo/ortho_vit_digits.low.safetensors", pretrained=True, verify=True)
    assert orthogonality_error(model) < 2e-6
    for name, x in model.state_dict().items():
        stored = checkpoint["state_dict"][f"model.{name}"].float()
        assert x.dtype == torch.float32
        assert (x - stored).abs().max() < 1e-2
        assert "qkv" in name or torch.equal(x, stored)


def test_integers_among_the_weights_of_a_run_are_refused(folder, capsys):
    path = "run/checkpoints/last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"]["model.head.weight"] = (
        checkpoint["state_dict"]["model.head.weight"].mul(9).long()
    )
    torch.save(checkpoint, path)
    message = (
        "run/checkpoints/last.ckpt is refused: its 'model.head.weight' is torch.int64, not torch.float32"
    )
    refused(["export", "--ckpt_path", path, "--folder", "zoo", "--name", "x"], message, capsys, codes=(2,))
    refused(["test", "--config", "run/config.yaml", "--ckpt_path", path], message, capsys, codes=(1,))
    message = message.replace("model.h", "h")
    refused(["test", "--config", "run/config.yaml", "--model.weights", path], message, capsys, codes=(2,))


# ------------------------------------------------------------------------------------- trained weights, by their name


@pytest.fixture
def images(folder):
    """Test digits as large coloured images, and two files that are none."""
    images, labels = Digits().read(train=False)
    (folder / "images/more").mkdir(parents=True)
    for i in range(12):
        grey = Image.fromarray(images[i, 0].numpy()).resize((64, 64), Image.Resampling.NEAREST)
        grey.convert("RGB").save(folder / f"images/{'more/' if i % 2 else ''}{i:02}_{labels[i]}.png")
    (folder / "images/notes.txt").write_text("no image")
    (folder / "images/damaged.jpg").write_bytes(b"no image")
    return folder / "images"


@pytest.mark.filterwarnings("ignore:ImageFolder. cannot read", "ignore:ImageFolder. skipped 2 of 14")
def test_one_command_names_the_images_of_a_folder(images, capsys):
    assert main(["predict", "--weights", NAME, "--pictures", "images", "--predictions.path", "out.csv"]) == 0
    output = capsys.readouterr().out
    assert "12 predictions in out.csv" in output
    with open("out.csv") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["file"] in output
    assert {row["file"] for row in rows} == {str(p.relative_to(images)) for p in images.rglob("*.png")}
    right = sum(Path(row["file"]).stem[-1] == row["class"] for row in rows)
    assert right >= 8  # of 12; a network of ten short epochs


def test_an_image_of_the_right_size_is_seen_as_in_the_test_set(folder):
    pixels, _ = Digits().read(train=False)
    Image.fromarray(pixels[0, 0].numpy()).save("digit.png")
    assert main(["predict", "--weights", f"zoo/{NAME}.safetensors", "--pictures", "digit.png"]) == 0
    model = create_model(NAME, pretrained=True).eval()
    with torch.no_grad():
        expected = model((pixels[:1] / 255 - 0.3053) / 0.3759).softmax(-1).max()
    (row,) = csv.DictReader(Path("predictions.csv").read_text().splitlines())
    assert abs(float(row["probability"]) - expected) < 1e-5


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("predict --weights ortho_vit_digits.smll --pictures .", 2, "no checkpoint 'ortho_vit_digits.smll' in zoo or "),
        ("predict --weights gone.safetensors --pictures .", 2, "gone.safetensors: no such file"),
        ("predict --weights", 2, "--weights needs a value"),
        ("predict --pictures .", 2, "--pictures needs --weights NAME"),
        ("predict --weights NAME --pictures empty", 1, "empty does not exist"),
        ("predict --weights NAME --picture .", 2, "--weights and --pictures must be written in full"),
        ("test --weights NAME --pictures .", 2, "--pictures is for predict"),
        ("fit --weights NAME", 2, "fit starts from weights with --model.weights"),
        ("test", 2, "missing: "),
    ],
)  # fmt: skip
def test_a_bad_command_about_weights_ends_in_one_line(folder, capsys, command, code, message):
    refused(command.replace("NAME", NAME).split(), message, capsys, codes=(code,))


@pytest.mark.parametrize(
    "data", [None, "cifar", {"class_path": "shutil.rmtree", "init_args": {"path": "zoo"}}]
)
def test_a_card_cannot_name_code_of_elsewhere(folder, capsys, data):
    path = Path(f"zoo/{NAME}.json")
    card = json.loads(path.read_text())
    card["recipe"]["data"] = data
    path.write_text(json.dumps(card))
    refused(
        ["test", "--weights", NAME], "no data: give --data, such as ortho_vit.data.Digits", capsys, codes=(2,)
    )
    assert main(["test", "--weights", NAME, "--data", "Digits"]) == 0


def test_export_is_in_the_help(capsys):
    assert entry.main(["--help"]) == 0
    assert "python train.py export " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    assert "--overwrite" in capsys.readouterr().out
