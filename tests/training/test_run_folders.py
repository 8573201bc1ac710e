"""A folder belongs to one run: two never share one, and a run that goes on is not resumed a second time."""

import copy
import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from ortho_vit.cli.main import main
from ortho_vit.files import lock, next_folder, try_lock
from ortho_vit.training import AtomicCheckpointIO, Checkpoints
from ortho_vit.training.checkpointing import Preloaded, _copy
from tests.helpers.small_run import digits, make_classifier, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

REPOSITORY = Path(__file__).parents[2]
CONFIG = """
model:
  name: ortho_vit_digits
  optimizer:
    class_path: ortho_vit.optim.StiefelSGD
    init_args: {lr: 0.1}
data:
  class_path: ortho_vit.data.Digits
  init_args: {batch_size: 32, limit: 96}
trainer: {max_epochs: 1, accelerator: cpu, devices: 1}
"""

# Takes the lock, starts a child by fork as a data loader does, and says the child's number
HOLDER = """
import importlib.util, os, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("files", sys.argv[1])
files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
file = files.lock(Path(sys.argv[2]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def files_of(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------------ files


def test_no_two_callers_get_the_same_folder(tmp_path):
    (tmp_path / "run/version_7").mkdir(parents=True)
    (tmp_path / "run/version_old").mkdir()
    together = threading.Barrier(8)

    def create(_):
        together.wait()
        return next_folder(tmp_path / "run", "version_").name

    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(create, range(8)))
    assert sorted(created) == sorted(f"version_{number}" for number in range(8, 16))
    assert next_folder(tmp_path / "new/run", "version_").name == "version_0"


def test_a_lock_names_its_holder_and_ends_when_it_is_closed(tmp_path):
    path = tmp_path / "lock"
    with lock(path), pytest.raises(BlockingIOError, match=rf", process {os.getpid()}$"):
        lock(path)
    lock(path).close()


def test_a_killed_process_gives_up_its_lock_though_a_child_lives_on(tmp_path):
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, REPOSITORY / "ortho_vit/files.py", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        try:
            with pytest.raises(BlockingIOError, match=f"process {process.pid}"):
                lock(path)
            process.kill()
            process.wait()
            os.kill(child, 0)  # still there
            lock(path).close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_shared_look_at_a_lock_takes_nothing(tmp_path):
    path = tmp_path / "lock"
    with lock(path), path.open() as look:
        assert not try_lock(look, shared=True)
    with path.open() as look, path.open() as another:
        assert try_lock(look, shared=True)
        assert try_lock(another, shared=True)


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
