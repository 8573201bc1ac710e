"""A folder belongs to one run: two never share one, and a run that is active is not resumed a second time."""

import copy
import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from ortho_vit.cli.main import main
from ortho_vit.files import lock
from ortho_vit.training import AtomicCheckpointIO, Checkpoints
from ortho_vit.training.checkpointing import Preloaded, _copy
from tests.helpers.command_line import ONE_EPOCH, REPOSITORY
from tests.helpers.small_run import digits, make_classifier, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(ONE_EPOCH)
    return tmp_path


def files_of(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("logger", ["true", "false"])
def test_a_run_that_goes_on_is_not_resumed(folder, capsys, logger):
    arguments = ["fit", "--config", "run.yaml", "--trainer.logger", logger]
    assert main(arguments) == 0
    (last,) = folder.rglob("last.ckpt")
    before = files_of(folder)
    with lock(last.parents[1] / ".lock"):
        capsys.readouterr()
        assert main([*arguments, "--trainer.max_epochs", "2", "--ckpt_path", str(last)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"is still going on ({os.uname().nodename}, process {os.getpid()}); nothing was changed" in error
    assert files_of(folder) == before
    assert main([*arguments, "--trainer.max_epochs", "2", "--ckpt_path", str(last)]) == 0
    assert torch.load(last, weights_only=True)["epoch"] == 1


@pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty")
def test_the_folder_of_another_logger_is_claimed_too(tmp_path):
    (tmp_path / "run").mkdir()
    with lock(tmp_path / "run/.lock"):
        trainer = make_trainer(tmp_path, logger=CSVLogger(tmp_path, "", "run"))
        with pytest.raises(RuntimeError, match=r"the run in .*/run is still going on"):
            trainer.fit(make_classifier(), datamodule=digits())
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_run_holds_its_folder_until_it_ends_or_fails(tmp_path):
    held = []

    class Look(Checkpoints):
        def on_train_batch_end(self, trainer, *args):
            super().on_train_batch_end(trainer, *args)
            with pytest.raises(BlockingIOError):
                lock(tmp_path / ".lock")
            held.append(trainer.global_step)
            if trainer.global_step == 6:
                raise ValueError("on purpose")

    def fit(**kwargs):
        trainer = make_trainer(tmp_path, max_epochs=2)
        trainer.callbacks[-1] = Look(every_n_steps=1)
        trainer.fit(make_classifier(), datamodule=digits(), **kwargs)

    with pytest.raises(ValueError, match="on purpose"):
        fit()
    last = tmp_path / "checkpoints/last.ckpt"
    fit(ckpt_path=last)
    assert held == [1, 2, 3, 4, 5, 6, 7, 8]
    lock(tmp_path / ".lock").close()


def test_a_claim_stays_with_the_process_that_made_it(tmp_path):
    checkpoints = Checkpoints()
    checkpoints.claim(tmp_path)
    for copied in (pickle.loads(pickle.dumps(checkpoints)), copy.copy(checkpoints)):
        copied.claim(tmp_path)  # as a spawned process would, whose parent has it
        copied.release()
    with pytest.raises(RuntimeError, match="still going on"):
        Checkpoints().claim(tmp_path)
    checkpoints.release()
    lock(tmp_path / ".lock").close()


def test_a_trial_leaves_no_folder(folder):
    assert main(["--config", "run.yaml", "--trainer.fast_dev_run", "true"]) == 0
    assert {path.name for path in folder.iterdir()} == {"run.yaml"}


@pytest.mark.slow
def test_two_runs_that_start_together_have_a_folder_each(folder):
    command = [sys.executable, REPOSITORY / "train.py", "--config", "run.yaml"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    runs = [subprocess.Popen([*command, "--seed_everything", seed], env=environment) for seed in "12"]
    assert [run.wait(300) for run in runs] == [0, 0]
    versions = sorted((folder / "runs/run").iterdir())
    assert [path.name for path in versions] == ["version_0", "version_1"]
    seeds = set()
    for version in versions:
        last = torch.load(version / "checkpoints/last.ckpt", weights_only=True)
        seeds.add(last["ortho_vit"]["seed"])
        assert f"seed_everything: {last['ortho_vit']['seed']}\n" in (version / "config.yaml").read_text()
        assert len(list(version.glob("events.*"))) == 1
    assert seeds == {1, 2}


# ------------------------------------------------------------------------------------------------------- disks


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_named_and_not_kept_full(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"a": 1}, path)
    before = path.read_bytes()
    (tmp_path / ".last.ckpt.partial").symlink_to("/dev/full")
    with pytest.raises(
        OSError, match=r"last.ckpt could not be written: the disk is full \(/.* has .* free\)"
    ) as error:
        AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(100_000)}, path)
    assert "the one before is kept" in str(error.value)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"last.ckpt": before}


def test_a_checkpoint_that_was_read_is_read_again_only_if_it_has_changed(tmp_path, monkeypatch):
    path, reads = tmp_path / "last.ckpt", []
    io = AtomicCheckpointIO()
    io.save_checkpoint({"a": 1}, path)

    def read(path, map_location="cpu"):
        reads.append(path)
        return {"read": len(reads)}

    monkeypatch.setattr("ortho_vit.training.checkpointing.read_checkpoint", read)
    preloaded = Preloaded(path, read)
    assert AtomicCheckpointIO(preloaded).load_checkpoint(path) == {"read": 1}
    io.save_checkpoint({"a": 2}, path)
    assert AtomicCheckpointIO(preloaded).load_checkpoint(path) == {"read": 2}


def test_a_copy_that_does_not_fit_is_removed(tmp_path, monkeypatch):
    (tmp_path / "best.ckpt").write_bytes(b"new")
    (tmp_path / "last.ckpt").write_bytes(b"old")

    def half(source, target):
        target.write_bytes(b"n")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", lambda *args: (_ for _ in ()).throw(OSError("no links")))
    monkeypatch.setattr("shutil.copyfile", half)
    with pytest.raises(OSError, match=r"last.ckpt could not be written: the disk is full"):
        _copy(tmp_path / "best.ckpt", tmp_path / "last.ckpt")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"best.ckpt": b"new", "last.ckpt": b"old"}
