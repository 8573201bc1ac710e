"""A run that was interrupted and resumed ends with the same bits as one that was not."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from ortho_vit import optim
from ortho_vit.data import CIFAR10
from ortho_vit.training import Checkpoints, History, OrthogonalityMonitor, WeightAveraging
from tests.helpers.cifar_files import place
from tests.helpers.command_line import REPOSITORY
from tests.helpers.small_run import BadImage, assert_same_bits, digits, make_classifier


class KeepAll(Checkpoints):
    """Keeps a copy of every checkpoint that was ever the last."""

    def _save(self, trainer, improved=False):
        super()._save(trainer, improved)
        assert self.folder is not None
        kept = self.folder / "kept"
        kept.mkdir(parents=True, exist_ok=True)
        if self.last_path:
            shutil.copy(self.last_path, kept / f"{len(list(kept.iterdir()))}.ckpt")


class StopAfter(L.Callback):
    """Stops the run after a step, as Lightning's `Timer` does when the time is up."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step == self.step


def run(
    folder,
    optimizer,
    *,
    resume=None,
    stop=None,
    every_n_steps=1,
    ema=False,
    bad=(),
    data=(),
    model=None,
    kwargs=None,
    **trainer,
):
    torch.manual_seed(random.randrange(10**6))  # as another process would start
    model = make_classifier(
        optimizer,
        warmup_epochs=1,
        model_kwargs={"proj_drop_rate": 0.1, "drop_path_rate": 0.1} | (kwargs or {}),
        **(model or {}),
    )
    data = dict(data)
    callbacks = [OrthogonalityMonitor(every_n_steps=2, threshold=None), StopAfter(stop), History()]
    callbacks += [KeepAll(every_n_steps=every_n_steps)]
    if trainer.get("precision") == "16-mixed":  # for which the trainer takes bf16-mixed on a CPU
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
        trainer = {"plugins": [MixedPrecision(trainer.pop("precision"), "cpu", scaler)]} | trainer
    L.Trainer(
        default_root_dir=folder,
        callbacks=[BadImage(*bad), *([WeightAveraging(decay=0.9)] if ema else []), *callbacks],
        **{"max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False, "num_sanity_val_steps": 0}
        | trainer,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, datamodule=CIFAR10(**data) if "root" in data else digits(**data), ckpt_path=resume)
    last = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    return last | {"weights in memory": dict(model.state_dict())}


SGD = partial(optim.StiefelSGD, lr=0.1, momentum=0.9, weight_decay=5e-5)
ADAM = partial(optim.StiefelAdam, lr=3e-3)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        pytest.param(SGD, {}, id="sgd"),
        pytest.param(ADAM, {"accumulate_grad_batches": 3, "max_epochs": 3}, id="adam, accumulating"),
        pytest.param(SGD, {"ema": True}, id="averaging"),
        pytest.param(
            SGD,
            {"ema": True, "bad": [(0, 1), (1, 0), (1, 3)], "model": {"skip_nonfinite": True}},
            id="skipping steps",
            marks=pytest.mark.filterwarnings("ignore:step skipped"),
        ),
        pytest.param(SGD, {"ema": True, "precision": "bf16-true"}, id="bfloat16"),
        pytest.param(SGD, {"precision": "16-mixed"}, id="float16"),
        pytest.param(SGD, {"precision": "64-true"}, id="float64"),
        pytest.param(SGD, {"val_check_interval": 2}, id="validating within epochs"),
        pytest.param(SGD, {"check_val_every_n_epoch": 2}, id="validating now and then"),
        pytest.param(SGD, {"data": {"val_size": 0}}, id="not validating"),
        pytest.param(SGD, {"max_epochs": -1, "max_steps": 7}, id="counting steps"),
        *(
            pytest.param(partial(getattr(optim, name), lr=0.01), {}, id=name, marks=pytest.mark.slow)
            for name in optim.__all__
            if name not in ("StiefelSGD", "StiefelAdam")
        ),
        pytest.param(SGD, {"data": {"num_workers": 2}}, id="workers", marks=pytest.mark.slow),
    ],
)
def test_every_checkpoint_leads_to_the_same_end(tmp_path, optimizer, options):
    whole = run(tmp_path / "whole", optimizer, **options)
    kept = sorted((tmp_path / "whole/checkpoints/kept").iterdir(), key=lambda path: int(path.stem))
    assert len(kept) >= 4
    # Within epochs and at their ends
    chosen = kept[:-1] if optimizer is SGD and not options else kept[1:-1:2]
    for path in chosen:
        resumed = run(tmp_path / path.stem, optimizer, resume=path, **options)
        assert_same_bits(whole, resumed, f"resumed from {path.name} of {len(kept)}")


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}, {"data": {"val_size": 0}}])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_run_that_is_stopped_goes_on_where_it_was(tmp_path, step, options):
    whole = run(tmp_path / "whole", SGD, every_n_steps=None, **options)
    run(tmp_path / "stopped", SGD, every_n_steps=None, stop=step, **options)
    last = tmp_path / "stopped/checkpoints/last.ckpt"
    resumed = run(tmp_path / "resumed", SGD, every_n_steps=None, resume=last, **options)
    assert_same_bits(whole, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmented_images_are_the_same_after_resuming(tmp_path, num_workers):
    place(tmp_path, CIFAR10, "binary archive", per_file=20)
    data = {
        "root": str(tmp_path),
        "batch_size": 16,
        "val_size": 20,
        "crop": True,
        "flip": True,
        "autoaugment": True,
    }
    options = {
        "data": data | {"num_workers": num_workers},
        "kwargs": {"img_size": 32, "in_chans": 3, "patch_size": 8, "depth": 2, "attn_drop_rate": 0.1},
        "accumulate_grad_batches": 2,
    }
    whole = run(tmp_path / "whole", SGD, **options)
    kept = sorted((tmp_path / "whole/checkpoints/kept").iterdir(), key=lambda path: int(path.stem))
    assert len(kept) == 6  # after 2, 4 and 5 batches of each epoch
    for path in kept[:-1]:
        assert_same_bits(whole, run(tmp_path / path.stem, SGD, resume=path, **options), path.name)


COMMAND = """
seed_everything: 3
model:
  name: ortho_vit_digits
  optimizer:
    class_path: ortho_vit.optim.StiefelSGD
    init_args: {lr: 0.1, momentum: 0.9}
  model_kwargs: {img_size: 32, in_chans: 3, patch_size: 8, depth: 2, proj_drop_rate: 0.1, drop_path_rate: 0.1}
data:
  class_path: ortho_vit.data.CIFAR10
  init_args: {root: .., batch_size: 8, val_size: 40, autoaugment: true, num_workers: NUM_WORKERS}
trainer: {max_epochs: 3, accelerator: cpu, devices: DEVICES, strategy: STRATEGY, accumulate_grad_batches: 2}
checkpoints: {every_n_steps: 3}
"""


def start(folder, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, REPOSITORY / "train.py", "--config", "run.yaml", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "devices", "strategy"),
    [(0, 1, "auto"), (2, 1, "auto"), (0, 2, "ddp")],
    ids=["alone", "workers", "two processes"],
)
def test_killed_twice_and_resumed_by_the_same_command(tmp_path, num_workers, devices, strategy):
    text = COMMAND.replace("NUM_WORKERS", str(num_workers))
    text = text.replace("DEVICES", str(devices)).replace("STRATEGY", strategy)
    place(tmp_path, CIFAR10, "binary archive", per_file=100)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.yaml").write_text(text)
    finish(start(tmp_path / "whole"))
    last = tmp_path / "killed/runs/run/version_0/checkpoints/last.ckpt"
    for _ in range(2):
        process = start(tmp_path / "killed", "--ckpt_path", "last")
        before, deadline = last.stat().st_mtime_ns if last.exists() else 0, time.monotonic() + 60
        while not (last.exists() and last.stat().st_mtime_ns > before) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.3))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    finish(start(tmp_path / "killed", "--ckpt_path", "last"))
    whole, resumed = (
        torch.load(tmp_path / name / "runs/run/version_0/checkpoints/last.ckpt", weights_only=True)
        for name in ("whole", "killed")
    )
    assert_same_bits(whole, resumed)
