"""The sweep: who does which run, what survives a kill, what is a result."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from ortho_vit.errors import UsageError
from ortho_vit.experiments.table1 import runs as runs_module
from ortho_vit.experiments.table1 import sweep as sweep_module
from ortho_vit.experiments.table1.presets import PRESETS
from ortho_vit.experiments.table1.progress import overview
from ortho_vit.experiments.table1.rows import choose
from ortho_vit.experiments.table1.runs import Run, Sweep, environment
from ortho_vit.experiments.table1.sweep import sweep

ROWS = ("none_sgd", "none_adam", "within_stiefel_sgd")


@pytest.fixture(autouse=True)
def fake(tmp_path, monkeypatch):
    """A repository with nothing but a stand-in for train.py, and a sweep that looks at it often."""
    repository = tmp_path / "repository"
    repository.mkdir()
    shutil.copy(Path(__file__).with_name("fake_train.py"), repository / "train.py")
    monkeypatch.setattr(runs_module, "REPOSITORY", repository)
    monkeypatch.setattr(sweep_module, "POLL_SECONDS", 0.02)


def make(folder: Path, *overrides: str, rows=ROWS, seeds=(0, 1)) -> list[Run]:
    plan = Sweep(folder / "out", "reduced", "CIFAR10", overrides)
    return [plan.run(row, seed) for row, seed in choose(PRESETS["reduced"], (), rows, seeds)]


def do(runs, workers=2, show=lambda: None):
    said: list[str] = []
    outcome = sweep(runs, workers, said.append, show)
    return outcome, said


def lines(run: Run) -> list[str]:
    """The output of its attempts."""
    said = (run.folder / "log.txt").read_text().splitlines()
    return [line for line in said if not line.startswith("$ python train.py --config")]


def test_every_run_is_done_once_and_has_its_folder(tmp_path):
    runs = make(tmp_path)
    outcome, said = do(runs)
    assert (outcome.failed, outcome.stopped) == ({}, False)
    assert [run.state() for run in runs] == ["finished"] * 6
    assert len(said) == 12  # started, finished
    do(runs)
    assert all(len(lines(run)) == 1 for run in runs)
    kept = json.loads((tmp_path / "out/reduced-cifar10/none_sgd/seed1/run.json").read_text())
    assert (kept["row"], kept["seed"]) == ("none_sgd", 1)
    assert kept["arguments"][:2] == ["--config", "configs/paper/cifar10/none_sgd.yaml"]
    assert kept["arguments"][-4:] == ["--seed_everything", "1", "--data.seed", "1"]


def test_all_rows_get_a_seed_before_any_gets_the_next(tmp_path):
    assert [run.seed for run in make(tmp_path)] == [0, 0, 0, 1, 1, 1]


def test_a_run_that_another_process_has_claimed_is_left_to_it(tmp_path):
    runs = make(tmp_path, seeds=(0,))
    lock = runs[0].claim()
    assert lock
    assert runs[0].state() == "running"
    assert do(runs)[0].failed == {}
    assert [run.state() for run in runs] == ["running", "finished", "finished"]
    lock.close()
    do(runs)
    assert runs[0].state() == "finished"


def test_the_claim_is_the_training_process_own_and_ends_when_that_is_killed(tmp_path):
    (run,) = make(tmp_path, "--behave", "sleep", rows=["none_sgd"], seeds=(0,))
    lock = run.claim()
    assert lock
    process = run.start(lock, environment(0, 1, []))
    assert lock.closed  # so nothing but the training process holds it now
    assert run.claim() is None
    assert str(process.pid) in run.owner()
    process.kill()
    process.wait()
    claimed = run.claim()
    assert claimed
    claimed.close()


def test_a_run_that_is_killed_affects_no_other_and_is_resumed_by_the_next_sweep(tmp_path):
    runs = make(tmp_path, "--behave", "die", seeds=(0,))
    outcome, _ = do(runs, workers=1)
    assert outcome.failed == {run.name: "was killed by SIGKILL" for run in runs}
    assert [run.state() for run in runs] == ["interrupted"] * 3
    assert do(runs)[0].failed == {}
    assert [run.state() for run in runs] == ["finished"] * 3
    assert [line.split()[0] for line in lines(runs[0])] == ["from", "resumed"]


def test_a_run_that_diverged_is_done_and_no_failure(tmp_path):
    runs = make(tmp_path, "--behave", "diverge", rows=["none_sgd"], seeds=(0,))
    outcome, said = do(runs)
    assert outcome.failed == {}
    assert runs[0].state() == "diverged"
    assert said[-1] == "diverged none_sgd/seed0: the loss is nan at step 7, 6 s"
    assert "1 of 1 runs done (1 diverged)" in overview(runs)[0]


def test_where_everything_fails_the_sweep_gives_up(tmp_path):
    runs = make(tmp_path, "--behave", "fail")
    outcome, _ = do(runs, workers=1)
    assert outcome.failed == {run.name: "no luck" for run in runs[:3]}
    assert outcome.hopeless


def test_an_error_of_an_earlier_attempt_is_not_reported_again(tmp_path):
    (run,) = make(tmp_path, "--behave", "fail", rows=["none_sgd"], seeds=(0,))
    do([run])
    with (run.folder / "log.txt").open("a") as log:
        log.write(f"{runs_module.PROMPT}again\n")
    assert run.error.startswith("ended without a result; see ")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_stops_the_runs_and_the_next_sweep_continues_them(tmp_path, signum):
    if signal.getsignal(signum) is signal.SIG_IGN:
        pytest.skip("started with nohup, which lets a sweep ignore this signal")
    rows = ["none_sgd", "none_adam", "none_adamw"]
    runs = make(tmp_path, "--behave", "sleep", rows=rows, seeds=(0,))

    def interrupt_once_both_run():
        if all(run.checkpoint for run in runs[:2]):
            os.kill(os.getpid(), signum)
            time.sleep(1)

    before = signal.getsignal(signum)
    outcome, _ = do(runs, show=interrupt_once_both_run)
    assert outcome.stopped
    assert [run.state() for run in runs] == ["interrupted", "interrupted", "waiting"]
    assert signal.getsignal(signum) is before
    do(runs[:2])
    assert [run.state() for run in runs] == ["finished", "finished", "waiting"]


def test_other_arguments_than_before_are_refused(tmp_path):
    do(make(tmp_path, rows=["none_sgd"], seeds=(0,)))
    (other,) = make(tmp_path, "--data.limit", "64", rows=["none_sgd"], seeds=(0,))
    with pytest.raises(
        UsageError, match=r"was run with other arguments \(fewer there, --data.limit 64 now\)"
    ):
        other.check(other.started)
    with pytest.raises(UsageError, match="was run with other arguments"):  # a row that has no run yet
        Sweep(tmp_path / "out", "reduced", "CIFAR10", ("--data.limit", "64")).check()


def test_the_refusal_names_a_value_that_another_option_has_too(tmp_path):
    do(make(tmp_path, "--trainer.max_epochs", "1", rows=["none_sgd"], seeds=(0,)))
    (other,) = make(tmp_path, rows=["none_sgd"], seeds=(0,))
    with pytest.raises(UsageError, match=r"\(--trainer.max_epochs 1 there, fewer now\)"):
        other.check(other.started)


def test_a_run_that_another_sweep_began_meanwhile_is_not_taken_over(tmp_path):
    (run,) = make(tmp_path, rows=["none_sgd"], seeds=(0,))
    do(make(tmp_path, "--behave", "die", rows=["none_sgd"], seeds=(0,)))
    with pytest.raises(UsageError, match="--behave die there"):
        run.claim()


def test_a_configuration_without_checkpoint_is_not_kept(tmp_path):
    """It may be another run's; a run that was killed before its first checkpoint starts from scratch."""
    (run,) = make(tmp_path, rows=["none_sgd"], seeds=(0,))
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text("old: true")
    do([run])
    assert not (run.folder / "config.yaml").exists()


def test_workers_share_the_cores_and_each_has_a_gpu(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    assert environment(0, 2, [])["OMP_NUM_THREADS"] == "3"
    assert environment(0, 9, [])["OMP_NUM_THREADS"] == "1"
    assert [environment(slot, 3, ["4", "7"])["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["4", "7", "4"]
    assert "SLURM_NTASKS" not in environment(0, 1, [])


def test_the_overview_says_what_runs_where_it_is_and_how_long_it_will_take(tmp_path):
    runs = make(tmp_path, rows=["none_sgd", "none_adam"], seeds=(0,))
    assert overview(runs) == ["0 of 2 runs done, 0 running, 2 left"]
    lock = runs[0].claim()
    assert lock
    (runs[0].folder / "progress.json").write_text(
        '{"epoch": 1, "epochs": 4, "step": 5, "steps": 20, "seconds": 300}'
    )
    first, second = overview(runs)
    # 60 s per step, 15 steps of one run and 20 of the other to go
    assert first == "0 of 2 runs done, 1 running, 1 left, about 35 min to go"
    assert second.startswith("  none_sgd/seed0  epoch 2/4  step 5/20")
    lock.close()
