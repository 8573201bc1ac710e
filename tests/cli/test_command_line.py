"""The command line as its users drive it, well and badly."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.loggers import Logger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from ortho_vit.cli import entry
from ortho_vit.cli.main import main
from ortho_vit.data import CIFAR10
from ortho_vit.training import Classifier
from tests.helpers.cifar_files import place
from tests.helpers.command_line import DIGITS, REPOSITORY, refused, snapshot, train, work_in


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in, with a small configuration."""
    return work_in(tmp_path, monkeypatch, "digits.yaml", DIGITS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which a run has been trained, not to be changed."""
    return train(tmp_path_factory.mktemp("trained"), DIGITS, "--config run.yaml --name digits")


@pytest.fixture
def run(trained, folder):
    """A copy of the trained run."""
    shutil.copytree(trained / "runs", folder / "runs")
    return Path("runs/digits/version_0")


# ------------------------------------------------------------------------------------------------------------ well


def test_a_run_leaves_its_configuration_checkpoints_and_curves(run):
    assert {"config.yaml", "curves.png", "history.csv"} <= {path.name for path in run.iterdir()}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}
    assert list(run.glob("events.out.tfevents.*"))
    with open(run / "history.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert float(rows[1]["orthogonality"]) < 2e-6


def test_a_saved_configuration_runs_again_as_it_is(run, capsys):
    assert main(["--config", str(run / "config.yaml"), "--trainer.limit_train_batches", "1"]) == 0
    again = run.with_name("version_1")
    ours, theirs = (yaml.safe_load((path / "config.yaml").read_text()) for path in (run, again))
    assert theirs["trainer"].pop("limit_train_batches") == 1
    assert ours["trainer"].pop("limit_train_batches") is None
    assert ours == theirs
    output = capsys.readouterr().out
    assert f"run: {again}\n" in output
    assert f"test it: python train.py test --ckpt_path {again}  " in output
    assert "logs: tensorboard --logdir runs\n" in output


@pytest.mark.parametrize("subcommand", ["validate", "test"])
def test_a_checkpoint_is_evaluated(run, capsys, subcommand):
    before = snapshot()
    command = f"{subcommand} --config {run}/config.yaml --ckpt_path {run}/checkpoints/best.ckpt"
    assert main(command.split()) == 0
    output = capsys.readouterr().out
    assert "accuracy" in output
    assert "orthogonality error" in output
    assert snapshot() == before


def test_predict_writes_one_line_for_each_image(run, capsys):
    arguments = f"predict --config {run}/config.yaml --ckpt_path {run}/checkpoints/last.ckpt".split()
    assert main([*arguments, "--predictions.path", "out/digits.csv"]) == 0
    assert "192 predictions in out/digits.csv" in capsys.readouterr().out
    with open("out/digits.csv") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["file", "class", "probability"]
    assert len({row["file"] for row in rows}) == 192
    assert all(row["class"] in "0123456789" and 0.1 <= float(row["probability"]) <= 1 for row in rows)
    again = [*arguments, "--predictions.path", "out/digits.csv"]
    refused(again, "is there already; nothing was overwritten", capsys, codes=(1,))
    capsys.readouterr()
    assert main([*arguments, "--predictions.path", "-", "--predictions.top_k", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "file,class,probability,class_2,probability_2"
    assert len(lines) == 193
    assert main([*arguments, "--predictions.path", "out/digits.csv", "--predictions.overwrite", "true"]) == 0


def test_the_accuracy_of_each_class_is_an_option_of_test(run, capsys):
    checkpoint = ["--ckpt_path", str(run / "checkpoints/last.ckpt")]
    arguments = ["test", "--config", str(run / "config.yaml"), *checkpoint]
    assert main([*arguments, "--per_class.folder", "out"]) == 0
    assert "per-class accuracy and confusion matrix in out" in capsys.readouterr().out
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "classes.csv",
        "confusion.csv",
        "confusion.png",
    ]


def test_predictions_are_there_when_they_are_whole(run, monkeypatch, capsys):
    checkpoint = ["--ckpt_path", str(run / "checkpoints/last.ckpt")]
    arguments = ["predict", "--config", str(run / "config.yaml"), *checkpoint]

    def fail(self, batch, batch_idx):
        if batch_idx:
            raise OSError("the disk is full")
        return predict_step(self, batch, batch_idx)

    predict_step = Classifier.predict_step
    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "predict_step", fail)
        refused(arguments, "the disk is full", capsys, codes=(1,))
    assert not Path("predictions.csv").exists()
    assert main(arguments) == 0
    assert len(Path("predictions.csv").read_text().splitlines()) == 193
    assert not list(Path().glob(".*partial"))


def test_a_run_that_was_not_compiled_may_go_on_compiled(run, monkeypatch):
    compiled = []
    monkeypatch.setattr("ortho_vit.training.classifier.compile_model", lambda *args: compiled.append(args))
    resumed = ["--config", str(run / "config.yaml"), "--ckpt_path", str(run / "checkpoints/last.ckpt")]
    assert main([*resumed, "--model.compile", "true", "--trainer.max_epochs", "3"]) == 0
    assert len(compiled) == 1


def test_a_finished_run_is_continued_in_its_folder(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["trainer"]["max_epochs"] = 3
    Path("longer.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", "longer.yaml", "--ckpt_path", "last"]) == 0
    assert not run.with_name("version_1").exists()
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["epoch"] == 2


def test_last_without_a_run_starts_one(folder, capsys):
    assert main(["--config", "digits.yaml", "--ckpt_path", "last", "--trainer.limit_train_batches", "1"]) == 0
    assert "no last.ckpt below runs/digits yet: starting from the beginning" in capsys.readouterr().out
    assert yaml.safe_load(Path("runs/digits/version_0/config.yaml").read_text())["ckpt_path"] is None


def test_fine_tuning_starts_from_the_weights_of_a_run(run):
    weights = run / "checkpoints/last.ckpt"
    small = "--trainer.max_steps 1 --model.optimizer.lr 1e-9 --model.optimizer.stiefel_lr 0 --name tuned"
    assert main(["--config", "digits.yaml", "--model.weights", str(weights), *small.split()]) == 0
    before, after = (
        torch.load(path, weights_only=True)["state_dict"]
        for path in (weights, "runs/tuned/version_0/checkpoints/last.ckpt")
    )
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, atol=1e-6, rtol=0)


def test_configurations_compose_and_the_later_wins(folder, capsys):
    (folder / "deep").mkdir()
    Path("deep/lower.yaml").write_text(
        "base: ../digits.yaml\nmodel: {label_smoothing: 0.1, optimizer: {init_args: {lr: 2e-2}}}"
    )
    Path("upper.yaml").write_text(
        "base: [deep/lower.yaml]\nmodel: {label_smoothing: 0.2}\ndata: {init_args: {limit: 64}}"
    )
    with pytest.raises(SystemExit) as exit:
        main(["--config", "upper.yaml", "--data.batch_size", "16", "--print_config"])
    assert exit.value.code in (0, None)
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["label_smoothing"] == 0.2
    assert config["model"]["optimizer"]["init_args"]["lr"] == 0.02
    assert config["model"]["optimizer"]["init_args"]["momentum"] == 0.9
    assert config["data"]["init_args"] == config["data"]["init_args"] | {"limit": 64, "batch_size": 16}


def test_help_is_short(capsys):
    assert entry.main(["--help"]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) < 45
    assert "--config quickstart.yaml" in short
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    assert "--model.layer_decay" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- CIFAR-10, in small


def test_training_on_a_sample_shaped_as_cifar10(folder, capsys):
    place(folder / "data", CIFAR10, "binary folder", per_file=20)
    small = ["--model.name", "ortho_vit_pico", "--trainer.max_epochs", "1", "--data.num_workers", "0"]
    config = REPOSITORY / "configs/paper/cifar10/within_stiefel_adam.yaml"
    assert main(["--config", str(config), "--trainer.accelerator", "cpu", *small]) == 0
    output = capsys.readouterr().out
    assert "test accuracy" in output
    assert Path("runs/paper/cifar10/within_stiefel_adam/version_0/checkpoints/last.ckpt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deit_tiny", "pvt_v2_b1"])
def test_comparators_train_on_cifar10(folder, capsys, name):
    place(folder / "data", CIFAR10, "binary folder", per_file=20)
    config = REPOSITORY / f"configs/cifar10/{name}.yaml"
    small = "--trainer.accelerator cpu --trainer.max_steps 2 --data.batch_size 8 --data.num_workers 0 --data.limit 16"
    assert main(["--config", str(config), *small.split()]) == 0
    assert "test accuracy" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*0.png", "ignore:ImageFolder. skipped 1 of 8")
def test_ones_own_images_train_and_are_predicted(folder, capsys):
    generator = np.random.default_rng(0)
    for i, name in enumerate(["cat", "dog", "owl"]):
        (folder / "images" / name).mkdir(parents=True)
        for j in range(8):
            pixels = generator.integers(0, 255, (40, 50, 3), dtype=np.uint8)
            pixels[..., i] = 255
            Image.fromarray(pixels).save(folder / f"images/{name}/{j}.png")
    options = "--data ortho_vit.data.ImageFolder --data.root images --data.image_size 32 --data.batch_size 8"
    model = "--model.name ortho_vit_pico --model.layer_decay 0.8 --name own"
    assert main(["--config", "digits.yaml", *options.split(), *model.split()]) == 0
    run = Path("runs/own/version_0")
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["num_classes"] == 3
    (folder / "images/owl/0.png").write_bytes(b"not an image")
    capsys.readouterr()
    predict = f"predict --config {run}/config.yaml --ckpt_path {run}/checkpoints/last.ckpt --data.predict_root images/owl"
    assert main(predict.split()) == 0
    assert "7 predictions in predictions.csv" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------- badly


def test_a_corrupted_archive_is_refused(folder, capsys):
    archive = place(folder / "data", CIFAR10, "binary archive", per_file=20)
    content = archive.read_bytes()
    archive.write_bytes(content[: len(content) // 2])
    arguments = ["--config", "digits.yaml", "--data", "ortho_vit.data.CIFAR10", "--trainer.logger", "false"]
    arguments += ["--model.name", "ortho_vit_pico"]
    refused(arguments, "cifar-10-binary.tar.gz is damaged", capsys, codes=(1,))


def test_a_run_is_not_written_over_another(run, capsys):
    arguments = ["--config", "digits.yaml", "--trainer.logger", "false", "--trainer.limit_train_batches", "1"]
    assert main(arguments) == 0
    assert "tensorboard" not in capsys.readouterr().out
    message = "runs/checkpoints/last.ckpt is there already; nothing was overwritten"
    line = refused(arguments, message, capsys, codes=(1,))
    assert "or choose another folder: --trainer.default_root_dir" in line


def test_another_logger_writes_its_own_files_and_the_folder_of_the_run_stays_where_it_is(folder):
    arguments = ["--config", "digits.yaml", "--config", str(REPOSITORY / "configs/parts/csv.yaml")]
    assert main([*arguments, "--trainer.max_epochs", "1"]) == 0
    assert main(["fit", "--ckpt_path", "runs/digits/version_0", "--trainer.max_epochs", "2"]) == 0
    assert main(["test", "--ckpt_path", "best"]) == 0
    assert [path.name for path in Path("runs/digits").iterdir()] == ["version_0"]
    for part, epoch in (
        ("version_0", "0"),
        ("version_1", "1"),
    ):  # those of the run that was resumed are not overwritten
        with open(f"runs/csv/{part}/metrics.csv") as file:
            rows = list(csv.DictReader(file))
        assert {"val/accuracy", "train/loss"} <= rows[0].keys()
        assert {row["epoch"] for row in rows} - {""} == {epoch}
    assert len(list(Path("runs/csv").iterdir())) == 2


class Remote(Logger):
    """A logger that has one folder for all runs, as those of Weights & Biases and MLflow have."""

    name, version, save_dir = "remote", None, "runs"

    def log_metrics(self, metrics, step=None): ...

    def log_hyperparams(self, *args, **kwargs): ...


def test_runs_with_a_logger_without_folders_have_folders_of_their_own(folder):
    arguments = ["--config", "digits.yaml", "--trainer.logger", f"{__name__}.Remote"]
    for _ in range(2):
        assert main([*arguments, "--trainer.max_epochs", "1"]) == 0
    assert sorted(map(str, Path("runs").glob("**/last.ckpt"))) == [
        f"runs/digits/version_{n}/checkpoints/last.ckpt" for n in (0, 1)
    ]


def test_tensorboard_has_the_hyper_parameters(run):
    events = EventAccumulator(str(run))
    events.Reload()
    content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["optimizer"].string_value == "StiefelSGD"
    assert values["optimizer.lr"].number_value == 0.1
    assert values["data"].string_value == "Digits"
    assert values["data.batch_size"].number_value == 64


def test_a_scheduler_is_chosen_and_resumed_by_its_class(folder, capsys):
    options = ["--config", "digits.yaml", "--model.scheduler", "StepLR", "--model.scheduler.step_size", "1"]
    assert main([*options, "--trainer.max_epochs", "1"]) == 0
    assert main([*options, "--trainer.max_epochs", "3", "--ckpt_path", "last"]) == 0
    with open("runs/digits/version_0/history.csv") as file:
        rates = [float(row["lr"]) for row in csv.DictReader(file)]
    assert rates == pytest.approx([1e-2, 1e-3, 1e-4])  # those of the epochs to come
    other = [*options, "--model.scheduler.gamma", "0.5", "--ckpt_path", "last"]
    refused(other, "scheduler.init_args.gamma was 0.1, now 0.5", capsys, codes=(2,))
