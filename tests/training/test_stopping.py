"""SIGTERM and Ctrl-C: a run ends after a step, says how to continue, and then ends with the bits of one that was not."""

import contextlib
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from ortho_vit.cli.main import main
from ortho_vit.data import Digits
from ortho_vit.training import Classifier, stopping
from ortho_vit.training.stopping import Signals, Stopped, signals
from tests.helpers.command_line import REPOSITORY, work_in
from tests.helpers.small_run import assert_same_bits, digits, make_classifier, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

CONFIG = """
seed_everything: 3
model:
  name: ortho_vit_digits
  optimizer:
    class_path: ortho_vit.optim.StiefelSGD
    init_args: {lr: 0.1, momentum: 0.9}
  model_kwargs: {proj_drop_rate: 0.1}
data:
  class_path: ortho_vit.data.Digits
  init_args: {batch_size: 16, limit: 96}
trainer: {max_epochs: 2, accelerator: cpu, devices: 1, enable_progress_bar: false}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in, with a configuration of 2 epochs of 6 steps."""
    return work_in(tmp_path, monkeypatch, "run.yaml", CONFIG)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The last checkpoint and the history of a run with some options that nothing has stopped."""

    @cache
    def run(*options):
        folder = tmp_path_factory.mktemp("whole")
        (folder / "run.yaml").write_text(CONFIG)
        with contextlib.chdir(folder):
            assert main(["--config", "run.yaml", *options]) == 0
            return load("run"), history("run")

    return run


@pytest.fixture
def signalled(monkeypatch):
    """Sends signals to this process, and to the workers of its data loaders, while it trains for a step, once."""

    def at(step, *numbers):
        start = Classifier.on_train_batch_start
        waiting = list(numbers)

        def on_train_batch_start(self, batch, batch_idx):
            if self.global_step == step and waiting:
                for process in [*multiprocessing.active_children(), multiprocessing.current_process()]:
                    for number in numbers:
                        os.kill(process.pid, number)
                waiting.clear()
            start(self, batch, batch_idx)

        monkeypatch.setattr(Classifier, "on_train_batch_start", on_train_batch_start)

    return at


@pytest.fixture
def signalled_in_validation(monkeypatch):
    """Sends a signal to this process in a batch of the validation after a step, once, and lists the batches validated."""

    def at(step, batch, number):
        validation_step, seen, waiting = Classifier.validation_step, [], [number]

        def signalled(self, images_and_labels, batch_idx):
            seen.append((self.global_step, batch_idx))
            if seen[-1] == (step, batch) and waiting:
                os.kill(os.getpid(), waiting.pop())
            return validation_step(self, images_and_labels, batch_idx)

        monkeypatch.setattr(Classifier, "validation_step", signalled)
        return seen

    return at


def load(name):
    return torch.load(f"runs/{name}/version_0/checkpoints/last.ckpt", weights_only=True)


def history(name):
    return Path(f"runs/{name}/version_0/history.csv").read_text()


def without_paths(checkpoint):
    return {key: value for key, value in checkpoint.items() if key != "hyper_parameters"}


STEPS = [
    pytest.param(3, signal.SIGTERM, [], id="within an epoch"),
    pytest.param(2, signal.SIGINT, ["--data.num_workers", "2"], id="with workers"),
    pytest.param(3, signal.SIGTERM, ["--trainer.accumulate_grad_batches", "2"], id="accumulating"),
    pytest.param(2, signal.SIGINT, ["--trainer.val_check_interval", "3"], id="before validation"),
    pytest.param(5, signal.SIGTERM, [], id="at the end of an epoch"),
    pytest.param(11, signal.SIGTERM, ["--test_after_fit", "true"], id="at the last step"),
]


@pytest.mark.parametrize(("step", "number", "options"), STEPS)
def test_a_run_that_a_signal_stops_goes_on_with_the_same_bits(
    folder, whole, signalled, capsys, step, number, options
):
    arguments, (expected, _) = ["--config", "run.yaml", *options], whole(*options)
    signalled(step, number)
    capsys.readouterr()
    assert main([*arguments, "--name", "stopped"]) == 128 + number
    output, error = capsys.readouterr()
    last = "runs/stopped/version_0/checkpoints/last.ckpt"
    line, command = error.rstrip("\n").split("; continue with python train.py ")
    assert line == f"stopped at step {step + 1} of {expected['global_step']}"
    assert command == shlex.join(["fit", *arguments, "--name", "stopped", "--ckpt_path", last])
    assert "accuracy" not in output  # neither a summary nor a test
    assert load("stopped")["global_step"] == step + 1
    assert main(shlex.split(command)) == 0
    assert_same_bits(without_paths(expected), without_paths(load("stopped")))


STATISTICS = "ortho_vit.training.attention_statistics.AttentionStatistics"
WITHIN = [
    pytest.param(6, 0, [], id="at the end of an epoch"),
    pytest.param(
        12,
        2,
        ["--checkpoints.every_n_steps", "4", "--trainer.callbacks", STATISTICS],
        id="at the end of the run",
    ),
    pytest.param(3, 1, ["--trainer.val_check_interval", "3"], id="within an epoch"),
    pytest.param(3, 1, ["--trainer.accumulate_grad_batches", "2"], id="accumulating"),
    pytest.param(6, 1, ["--trainer.max_steps", "9"], id="counting steps"),
    pytest.param(6, 1, ["--trainer.callbacks", "ortho_vit.training.WeightAveraging"], id="averaging"),
    pytest.param(6, 1, ["--model.skip_nonfinite", "true"], id="skipping steps"),
]


@pytest.mark.parametrize(("step", "batch", "options"), WITHIN)
def test_a_run_that_a_signal_stops_within_validation_goes_on_with_the_same_bits(
    folder, whole, signalled_in_validation, capsys, step, batch, options
):
    arguments, (expected, rows) = ["--config", "run.yaml", *options], whole(*options)
    validated = signalled_in_validation(step, batch, signal.SIGTERM)
    capsys.readouterr()
    assert main([*arguments, "--name", "stopped"]) == 143
    error = capsys.readouterr().err
    assert error.startswith(f"stopped at step {step} of ")
    assert [number for after, number in validated if after == step] == list(range(batch + 2))  # of six
    assert load("stopped")["global_step"] == step
    validated.clear()
    assert main(shlex.split(error.split("train.py ")[1])) == 0
    # The same validation, from its first batch
    assert validated[:6] == [(step, number) for number in range(6)]
    assert_same_bits(without_paths(expected), without_paths(load("stopped")))
    assert history("stopped") == rows


def test_a_validation_after_the_last_step_is_finished(folder, signalled_in_validation):
    validated = signalled_in_validation(4, 1, signal.SIGTERM)
    assert (
        main(["--config", "run.yaml", "--trainer.max_steps", "4", "--trainer.val_check_interval", "4"]) == 143
    )
    assert validated == [(4, number) for number in range(6)]
    assert load("run")["callbacks"]["Checkpoints"]["best_score"] is not None


def test_a_resumed_run_can_be_stopped_again(folder, whole, signalled, capsys):
    expected, _ = whole()
    arguments = ["fit", "--config", "run.yaml", "--name", "stopped", "--ckpt_path=last"]
    for step in (2, 7):
        signalled(step, signal.SIGTERM)
        capsys.readouterr()
        assert main(arguments) == 143
        error = capsys.readouterr().err
        assert error.count("\n") == error.count("--ckpt_path") == 1
        assert load("stopped")["global_step"] == step + 1
    assert main(shlex.split(error.split("train.py ")[1])) == 0
    assert_same_bits(without_paths(expected), without_paths(load("stopped")))


def test_the_signal_of_a_batch_system_wins_and_one_may_come_twice(folder, signalled):
    signalled(1, signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGINT)
    assert main(["--config", "run.yaml"]) == 143
    assert load("run")["global_step"] == 2


def test_handlers_are_as_before_when_a_command_has_ended(folder, signalled):
    before = [signal.getsignal(number) for number in stopping.NUMBERS]
    signalled(1, signal.SIGTERM)
    assert main(["--config", "run.yaml", "--trainer.logger", "false"]) == 143
    assert main(["--config", "run.yaml", "--trainer.fast_dev_run", "true"]) == 0
    assert [signal.getsignal(number) for number in stopping.NUMBERS] == before


def test_the_command_of_a_run_without_logger_works(folder, signalled, capsys):
    signalled(1, signal.SIGTERM)
    assert main(["--config", "run.yaml", "--trainer.logger", "false"]) == 143
    command = capsys.readouterr().err.split("train.py ")[1]
    assert main(shlex.split(command)) == 0
    assert torch.load("runs/checkpoints/last.ckpt", weights_only=True)["global_step"] == 12


def test_ctrl_c_before_training_ends_at_once_with_one_line(folder, monkeypatch, capsys):
    monkeypatch.setattr(Digits, "setup", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    assert main(["--config", "run.yaml"]) == 130
    assert capsys.readouterr().err == "stopped by SIGINT\n"
    assert not Path("runs").exists()


def test_sigterm_during_a_test_ends_at_once(folder, monkeypatch, capsys):
    assert main(["--config", "run.yaml"]) == 0
    run = Path("runs/run/version_0")
    monkeypatch.setattr(Classifier, "test_step", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    capsys.readouterr()
    arguments = ["--config", str(run / "config.yaml"), "--ckpt_path", str(run / "checkpoints/last.ckpt")]
    assert main(["test", *arguments]) == 143
    assert capsys.readouterr().err == "stopped by SIGTERM\n"


def test_training_from_python_stops_too(tmp_path, signalled):
    before = signal.getsignal(signal.SIGINT)
    signalled(2, signal.SIGINT)
    with pytest.raises(Stopped) as stop:
        make_trainer(tmp_path).fit(make_classifier(), datamodule=digits())
    assert (stop.value.code, stop.value.step, stop.value.steps) == (130, 3, 8)
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 3
    assert signal.getsignal(signal.SIGINT) is before
    make_trainer(tmp_path / "next", max_epochs=1).fit(make_classifier(), datamodule=digits())


def test_a_second_ctrl_c_ends_the_process_at_once(monkeypatch):
    ended, now = [], [0.0]
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    ours = Signals()
    ours.wait_for_step(True)
    ours._handle(signal.SIGINT, None)
    ours._handle(signal.SIGINT, None)  # the same, forwarded
    assert (ours.received, ended) == (signal.SIGINT, [])
    now[0] = 2.0
    ours._handle(signal.SIGINT, None)
    assert ended == [130]


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell has it for jobs in the background
    try:
        with signals.handled():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) == signals._handle
    finally:
        signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_imports_prints_nothing(tmp_path, number):
    process = subprocess.Popen(
        [sys.executable, REPOSITORY / "train.py", "fit", "--help"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    loaded = Path(f"/proc/{process.pid}/maps")
    deadline = time.monotonic() + 60
    while "libtorch" not in loaded.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (128 + number, b"")


# A command whose ranks SIGNALLED get a signal while they train for their third step, or in the validation after it
COMMAND = """
import os
import sys
from ortho_vit.training import Classifier
from ortho_vit.cli.main import main

HOOK, STEP = os.environ.get("HOOK", "on_train_batch_start 2").split()
hook = getattr(Classifier, HOOK)


def signalled(self, batch, batch_idx):
    if self.global_step == int(STEP) and str(self.global_rank) in os.environ.get("SIGNALLED", ""):
        os.kill(os.getpid(), int(os.environ["NUMBER"]))
    return hook(self, batch, batch_idx)


if __name__ == "__main__":
    setattr(Classifier, HOOK, signalled)
    sys.exit(main(sys.argv[1:]))
"""


def run(program, arguments, **variables):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | variables
    return subprocess.run(
        [sys.executable, *program, *arguments],
        env=environment, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


def ddp(devices):
    return f"fit --config run.yaml --trainer.strategy ddp --trainer.devices {devices} --name".split()


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["on_train_batch_start 2", "validation_step 3"])
def test_a_signal_to_one_of_two_processes_stops_both(folder, hook):
    Path("train.py").write_text(COMMAND)
    whole = run(["train.py"], [*ddp(2), "whole"])
    assert whole.returncode == 0, whole.stderr
    signalled = {"HOOK": hook, "SIGNALLED": "1", "NUMBER": str(int(signal.SIGTERM))}
    stopped = run(["train.py"], [*ddp(2), "stopped"], **signalled)
    assert stopped.returncode == 143, stopped.stderr
    (line,) = [line for line in stopped.stderr.splitlines() if line.startswith("stopped")]
    assert line.startswith("stopped at step 3 of 6; continue with python ")
    assert "Traceback" not in stopped.stderr
    assert load("stopped")["global_step"] == 3
    resumed = run(["train.py"], shlex.split(line.split("train.py ")[1]))
    assert resumed.returncode == 0, resumed.stderr
    assert_same_bits(without_paths(load("whole")), without_paths(load("stopped")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "devices", "ranks", "number", "code"),
    [
        pytest.param([], 3, "012", signal.SIGINT, 130, id="all of three"),
        pytest.param([], 2, "0", signal.SIGTERM, 143, id="the first of two"),
        pytest.param(
            ["-m", "torch.distributed.run", "--nproc-per-node", "2"], 2, "0", signal.SIGTERM, 1, id="torchrun"
        ),
    ],
)
def test_signals_stop_all_processes(folder, program, devices, ranks, number, code):
    Path("train.py").write_text(COMMAND)
    numbers = {"SIGNALLED": ranks, "NUMBER": str(int(number))}
    stopped = run([*program, "train.py"], [*ddp(devices), "stopped"], **numbers)
    assert stopped.returncode == code, stopped.stderr
    launcher = re.findall(r"stopped at step 3 of \d; continue with (\w+) .*train\.py fit", stopped.stderr)
    assert launcher == ["torchrun" if program else "python"]
    assert load("stopped")["global_step"] == 3
