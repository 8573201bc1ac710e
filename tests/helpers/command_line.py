"""What the tests of the command line share: small configurations, commands that are refused, where the repository is."""

import hashlib
import shutil
import sys
from pathlib import Path

import pytest

from ortho_vit.cli.main import main

REPOSITORY = Path(__file__).parents[2]
DIGITS = """
model:
  name: ortho_vit_digits
  optimizer:
    class_path: ortho_vit.optim.StiefelSGD
    init_args: {lr: 0.1, momentum: 0.9}
data:
  class_path: ortho_vit.data.Digits
  init_args: {batch_size: 64, limit: 192}
trainer: {max_epochs: 2, accelerator: cpu, devices: 1}
"""
ONE_EPOCH = DIGITS.replace("max_epochs: 2", "max_epochs: 1")  # of three steps


def work_in(folder: Path, patch: pytest.MonkeyPatch, name: str, config: str) -> Path:
    """Make `folder`, with a configuration in it, the working directory of what was started as `train.py`."""
    patch.chdir(folder)
    patch.setattr(sys, "argv", ["train.py"])
    (folder / name).write_text(config)
    return folder


def work_in_copy(trained: Path, folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Make `folder`, with a copy of what a fixture has trained, the working directory."""
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    patch.chdir(folder)
    return folder


def train(folder: Path, config: str, *commands: str) -> Path:
    """Run commands, by default that of a training, in a folder that has `config` as `run.yaml`."""
    (folder / "run.yaml").write_text(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in commands or ["--config run.yaml"]:
            assert main(command.split()) == 0
    return folder


def snapshot(folder: Path | str = ".") -> dict[str, list[object]]:
    """Everything below a folder: what it is, and for files their size, time and content."""
    found: dict[str, list[object]] = {}
    for path in sorted(Path(folder).rglob("*")):
        status = path.lstat()
        found[str(path)] = [status.st_mode]
        if path.is_file() and not path.is_symlink():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            changed = None if path.name == ".lock" else status.st_mtime_ns  # who asks for a lock writes to it
            found[str(path)] += [status.st_size, changed, digest]
    return found


def refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], codes: tuple[int, ...] = (1, 2)
) -> str:
    """The one line with which a command ends, which has `message`; every file is as it was."""
    before = snapshot()
    capsys.readouterr()
    assert main(arguments) in codes
    error = capsys.readouterr().err
    assert error.startswith("error: "), error
    assert error.count("\n") == 1, error
    assert message in error
    assert len(error) < 500
    assert snapshot() == before
    return error.rstrip("\n")
