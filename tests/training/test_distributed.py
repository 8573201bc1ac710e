"""Two processes on this machine train the same replica."""

import os
import subprocess
import sys

import pytest
import torch

from ortho_vit.models import create_model
from ortho_vit.stiefel import orthogonality_error
from tests.helpers.command_line import REPOSITORY
from tests.helpers.small_run import assert_same_bits, digits

TRAIN = """
import ortho_vit
import torch
from tests.helpers.small_run import digits, make_classifier, make_trainer

if __name__ == "__main__":
    model, trainer = make_classifier(), make_trainer(".", devices=2, strategy="ddp")
    trainer.fit(model, datamodule=digits())
    torch.save(model.model.state_dict(), f"rank{trainer.global_rank}.pt")
"""

# The same run, its Stiefel step whole and shared, looped and stacked
SHARED = """
from functools import partial
import ortho_vit
import torch
from ortho_vit.optim import StiefelSGD
from tests.helpers.small_run import digits, make_classifier, make_trainer

if __name__ == "__main__":
    for folder, options in (
        ("whole", {}), ("shared", {"shard_stiefel": True}), ("stacked", {"foreach": True, "shard_stiefel": 2})
    ):
        model = make_classifier(partial(StiefelSGD, lr=0.1, momentum=0.9, **options))
        trainer = make_trainer(folder, devices=2, strategy="ddp", max_epochs=1)
        trainer.fit(model, datamodule=digits())
        torch.save(model.model.state_dict(), f"{folder}-{trainer.global_rank}.pt")
"""

# The second process alone gets a bad image: step 1 is skipped, and another run stops.
BAD_IMAGE = """
import ortho_vit
import torch
from tests.helpers.small_run import BadImage, digits, make_classifier, make_trainer


class OnRankOne(BadImage):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_rank == 1:
            super().on_train_batch_start(trainer, *args)


if __name__ == "__main__":
    options = {"devices": 2, "strategy": "ddp", "max_epochs": 1}
    model = make_classifier(skip_nonfinite=True)
    trainer = make_trainer("skipped", OnRankOne((0, 1)), **options)
    trainer.fit(model, datamodule=digits())
    assert model.steps.skipped == 1
    rank = trainer.global_rank
    torch.save(model.model.state_dict(), f"rank{rank}.pt")
    try:
        make_trainer("stopped", OnRankOne((0, 1)), **options).fit(make_classifier(), datamodule=digits())
    except FloatingPointError as error:
        open(f"rank{rank}.txt", "w").write(str(error))
"""

SPAWN = """
import ortho_vit
import torch
from lightning import Callback
from tests.helpers.small_run import digits, make_classifier, make_trainer


class SaveReplica(Callback):
    def on_train_end(self, trainer, pl_module):
        torch.save(pl_module.model.state_dict(), f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    model = make_classifier()
    blocks = [(name, p.blocks, p.rows) for name, p in ortho_vit.stiefel_parameters(model.model)]
    trainer = make_trainer("run", SaveReplica(), devices=2, strategy="ddp_spawn")
    trainer.fit(model, datamodule=digits())
    assert str(trainer.checkpoint_callback.best_path) == "run/checkpoints/best.ckpt"
    assert [(name, p.blocks, p.rows) for name, p in ortho_vit.stiefel_parameters(model.model)] == blocks
    assert ortho_vit.orthogonality_error(model.model) < 2e-6
    torch.save(model.model.state_dict(), "parent.pt")
"""


def run(folder, text):
    script = folder / "script.py"
    script.write_text(text)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))]


@pytest.mark.slow
def test_replicas_are_equal_to_the_bit(tmp_path):
    one, two = run(tmp_path, TRAIN)
    assert_same_bits(one, two)
    start = create_model("ortho_vit_digits", num_classes=10)
    start.load_state_dict(one)
    assert orthogonality_error(start) < 2e-6


@pytest.mark.slow
def test_a_shared_step_ends_with_the_same_bits_and_saves_the_whole_state(tmp_path):
    first, *others = run(tmp_path, SHARED)
    for other in others:
        assert_same_bits(first, other)
    whole, shared, stacked = (
        torch.load(tmp_path / folder / "checkpoints/last.ckpt", weights_only=True)["optimizer_states"][0][
            "state"
        ]
        for folder in ("whole", "shared", "stacked")
    )
    assert_same_bits(whole, shared)
    assert_same_bits(whole, stacked)


@pytest.mark.slow
def test_all_processes_leave_out_the_step_that_is_not_finite_in_one_of_them(tmp_path):
    one, two = run(tmp_path, BAD_IMAGE)
    assert_same_bits(one, two)
    assert all(value.isfinite().all() for value in one.values())
    data = digits()
    data.setup("fit")
    order = data.train_dataloader().sampler
    order.rank, order.world_size = 1, 2
    samples = ", ".join(str(sample) for sample in data.train_set.names(order.batches(0)[1]))
    told = {(tmp_path / f"rank{rank}.txt").read_text() for rank in range(2)}
    assert len(told) == 1
    assert told.pop().startswith("the loss is nan at step 1 (epoch 0; rank 1, batch 1 because of ")
    assert f"with samples {samples});" in (tmp_path / "rank0.txt").read_text()


@pytest.mark.slow
def test_a_model_comes_back_from_spawned_processes_with_its_constraint(tmp_path):
    parent, one, two = run(tmp_path, SPAWN)
    assert_same_bits(one, two)
    assert_same_bits(one, parent)


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
