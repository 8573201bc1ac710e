"""A whole sweep on a few random images: real runs, one of them killed, resumed, reported."""

import os
import signal

import pytest

from ortho_vit.data import CIFAR10
from ortho_vit.experiments.table1 import sweep as sweep_module
from ortho_vit.experiments.table1.__main__ import main
from ortho_vit.experiments.table1.progress import Display
from ortho_vit.experiments.table1.rows import ROWS
from ortho_vit.experiments.table1.runs import Sweep
from tests.helpers.cifar_files import place

TINY = ["--trainer.max_epochs", "4", "--data.batch_size", "32", "--checkpoints.every_n_steps", "1"]
CHOSEN = ["within_stiefel_sgd", "within_stiefel_sgd_qk_mlp"]


@pytest.mark.slow
def test_a_sweep_survives_a_kill_and_is_reported(tmp_path, monkeypatch, capsys):
    data = str(place(tmp_path, CIFAR10, "binary folder", per_file=40))
    plan = Sweep(tmp_path / "out", "reduced", "CIFAR10")
    killed, other = (plan.run(ROWS[name], 0) for name in CHOSEN)
    options = ["--preset", "reduced", "--out", str(tmp_path / "out")]
    run = ["run", *options, "--root", data, "--seeds", "1", "--workers", "2", "--rows", *CHOSEN]
    monkeypatch.setattr(sweep_module, "POLL_SECONDS", 0.02)

    def kill_once_it_has_a_checkpoint(display):
        if killed.checkpoint and killed.state() == "running":
            os.kill(int(killed.owner().split()[-1]), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(Display, "show", kill_once_it_has_a_checkpoint)
        assert main([*run, "--", *TINY]) == 1
    assert (killed.state(), other.state()) == ("interrupted", "finished")
    assert "error: within_stiefel_sgd/seed0: was killed by SIGKILL" in capsys.readouterr().err

    assert main([*run, "--", *TINY]) == 0
    assert "resumed within_stiefel_sgd/seed0" in capsys.readouterr().out
    result = killed.result
    assert result
    assert [point["epoch"] for point in result["curve"]] == [1, 2, 3, 4]
    assert {"config.yaml", "history.csv", "checkpoints", "log.txt"} <= {
        p.name for p in killed.folder.iterdir()
    }

    assert main([*run]) == 2  # without what followed the dashes
    assert "was run with other arguments" in capsys.readouterr().err
    assert main(["status", *options]) == 0  # as it was started
    assert capsys.readouterr().out == "2 of 2 runs done, 0 running, 0 left\n"
    assert main(["report", *options]) == 0
    assert f"{100 * (1 - result['test_accuracy']):.2f} | 1 | 8.32 ± 0.39" in capsys.readouterr().out
