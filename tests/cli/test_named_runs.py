"""Runs are found by their folder, or as the newest that has a checkpoint; a start that failed is not in the way."""

import os
from pathlib import Path

import pytest
import torch
import yaml

from ortho_vit.cli.main import main
from ortho_vit.cli.run_folder import locate_checkpoint
from ortho_vit.data import Digits
from ortho_vit.errors import UsageError
from tests.helpers.command_line import DIGITS, work_in_copy


class Halves(Digits):
    """Other data of the same classes."""


FIT = ["--config", "digits.yaml", "--trainer.max_epochs", "1"]


def failing(*options: str) -> list[str]:
    return [*FIT, *options]


TOO_LATE = failing("--trainer.val_check_interval", "1000")  # which Lightning finds out when it has the data
DIVERGING = failing("--model.optimizer.lr", "1e30")  # after its first step


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which one start failed, one run diverged, and one ended well."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "digits.yaml").write_text(DIGITS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(TOO_LATE) == 1
        assert not Path("runs/digits").exists()
        assert main(DIVERGING) == 1
        assert main(FIT) == 0
    return folder


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    return work_in_copy(trained, tmp_path, monkeypatch)


def test_a_start_that_failed_leaves_no_folder_and_a_run_that_diverged_its_log(trained):
    versions = {path.name: path for path in (trained / "runs/digits").iterdir()}
    assert sorted(versions) == ["version_0", "version_1"]
    assert list(versions["version_0"].glob("events.*"))
    assert not list(versions["version_0"].rglob("*.ckpt"))
    assert (versions["version_1"] / "checkpoints/best.ckpt").is_file()


@pytest.mark.parametrize(
    "where",
    [
        "--ckpt_path best",
        "--ckpt_path runs/digits/version_1",
        "--ckpt_path runs/digits",
        "--ckpt_path best --name digits",
        "--ckpt_path best --config digits.yaml",
        "--ckpt_path runs/digits/version_1/checkpoints/best.ckpt",
    ],
)
def test_the_next_command_finds_the_run(folder, capsys, where):
    assert main(["test", *where.split()]) == 0
    assert "runs/digits/version_1/checkpoints/best.ckpt" in capsys.readouterr().out


def test_predict_and_export_take_the_same(folder, capsys):
    assert main(["predict", "--ckpt_path", "best"]) == 0
    assert (
        "192 predictions in predictions.csv, by runs/digits/version_1/checkpoints/best.ckpt"
        in capsys.readouterr().out
    )
    for number, source in enumerate(("best", "runs/digits/version_1")):
        assert main(["export", "--ckpt_path", source, "--name", f"own{number}", "--folder", "zoo"]) == 0
        assert "runs/digits/version_1/checkpoints/best.ckpt" in capsys.readouterr().out


def test_a_run_continues_with_its_own_configuration_and_changes(folder, capsys):
    run = "runs/digits/version_1"
    change = ["--trainer.max_epochs", "2", "--data.batch_size", "32"]
    assert main(["fit", "--ckpt_path", run, *change]) == 2
    assert "data.batch_size was 64, now 32" in capsys.readouterr().err
    assert main(["fit", "--ckpt_path", run, *change, "--allow_changes", "data.batch_size"]) == 0
    assert main(["fit", "--ckpt_path", "last", "--trainer.max_epochs", "3"]) == 0  # still in batches of 32
    saved = torch.load(f"{run}/checkpoints/last.ckpt", weights_only=True)
    assert (saved["epoch"], saved["global_step"]) == (2, 3 + 6 + 6)
    assert not Path("runs/digits/version_2").exists()


def test_changed_data_is_recorded_whole(folder):
    run, other = "runs/digits/version_1", "tests.cli.test_named_runs.Halves"
    options = ["--trainer.max_epochs", "2", "--data", other, "--data.batch_size", "64", "--data.limit", "96"]
    assert (
        main(["fit", "--config", "digits.yaml", "--ckpt_path", run, *options, "--allow_changes", "data"]) == 0
    )
    assert main(["fit", "--ckpt_path", run, "--trainer.max_epochs", "3"]) == 0
    saved = torch.load(f"{run}/checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == 3 + 2 + 2


def test_the_folder_of_a_run_without_validation_means_its_last_checkpoint(tmp_path):
    last = tmp_path / "checkpoints/last.ckpt"
    last.parent.mkdir()
    last.touch()
    for subcommand in ("test", "fit"):
        assert locate_checkpoint(str(tmp_path), Path("elsewhere"), subcommand) == str(last)


def test_the_newest_checkpoint_counts_not_the_highest_number(tmp_path, capsys):
    for age, name in enumerate(("b/version_0", "a/version_3", "a/version_10")):
        path = tmp_path / name / "checkpoints/best.ckpt"
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "a/version_11").mkdir()
    assert "a/version_3" in locate_checkpoint("best", tmp_path / "a", "test")
    assert "b/version_0" in locate_checkpoint("best", tmp_path, "test", runs="**")
    with pytest.raises(
        UsageError, match=r"no last.ckpt below .*/a; give its path, the folder of its run, or"
    ):
        locate_checkpoint("last", tmp_path / "a", "test")
    assert locate_checkpoint("last", tmp_path / "a", "fit") is None
    assert "starting from the beginning" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"version_11 holds no checkpoints/best.ckpt: it is not the folder"):
        locate_checkpoint(str(tmp_path / "a/version_11"), tmp_path, "test")


def test_a_configuration_beside_a_checkpoint_cannot_name_code_for_the_model(folder, capsys):
    config = yaml.safe_load(Path("runs/digits/version_1/config.yaml").read_text())
    config["model"]["model_kwargs"] = {"norm_layer": {"class_path": "torch.nn.Identity"}}
    Path("runs/digits/version_1/config.yaml").write_text(yaml.safe_dump(config))
    assert main(["test", "--ckpt_path", "best"]) == 2
    assert "is refused: among the model's arguments it names 'torch.nn.Identity'" in capsys.readouterr().err


def test_a_trial_that_fails_removes_nothing(folder, capsys):
    before = sorted(folder.rglob("*"))
    assert main(failing("--trainer.fast_dev_run", "2", "--model.optimizer.lr", "1e30")) == 1
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("path", ["best", "runs/digits"])
def test_the_best_checkpoint_is_that_of_the_newest_run_or_its_last_without_validation(folder, capsys, path):
    assert main([*FIT, "--data.val_size", "0", "--trainer.check_val_every_n_epoch", "1"]) == 0
    newest = "runs/digits/version_2/checkpoints/last.ckpt"
    assert Path(newest).is_file()
    assert locate_checkpoint(path, Path("runs/digits"), "test") == newest
