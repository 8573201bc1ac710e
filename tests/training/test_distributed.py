"""Two processes on this machine train the same replica."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ortho_vit.models import create_model
from ortho_vit.stiefel import orthogonality_error

REPOSITORY = Path(__file__).parents[2]

SCRIPT = """
import ortho_vit
import torch
from small_run import digits, make_classifier, make_trainer

if __name__ == "__main__":
    model, trainer = make_classifier(), make_trainer(".", devices=2, strategy="ddp")
    trainer.fit(model, datamodule=digits())
    torch.save(model.model.state_dict(), f"rank{trainer.global_rank}.pt")
"""


@pytest.mark.slow
def test_replicas_are_equal_to_the_bit(tmp_path):
    script = tmp_path / "ddp.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    one, two = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    start = create_model("ortho_vit_digits", num_classes=10)
    start.load_state_dict(one)
    assert orthogonality_error(start) < 2e-6


@pytest.mark.slow
def test_the_command_line_trains_with_two_processes(tmp_path):
    command = [sys.executable, REPOSITORY / "train.py", "--config", REPOSITORY / "configs/quickstart.yaml"]
    options = "--trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp --trainer.max_epochs 1"
    done = subprocess.run(
        [*command, *options.split()], cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy ") == 2  # top-1 and top-5, once each: only one process speaks
    run = tmp_path / "runs/quickstart/version_0"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]
