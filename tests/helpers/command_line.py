"""What the tests of the command line share: small configurations, and where the repository is."""

import shutil
from pathlib import Path

import pytest

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


def work_in_copy(trained: Path, folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Make `folder`, with a copy of what a fixture has trained, the working directory."""
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    patch.chdir(folder)
    return folder
