"""A run that is resumed remains the run it was, unless a change is asked for by name; and nothing of it is lost."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from ortho_vit.cli.main import launched_processes, main
from ortho_vit.data import Digits
from ortho_vit.errors import UsageError
from ortho_vit.training.checkpointing import refuse_to_lose_steps
from tests.helpers.command_line import refused, train, work_in_copy
from tests.helpers.image_files import class_folders, image_file
from tests.helpers.small_run import digits, make_classifier, make_trainer

CONFIG = """
model:
  name: ortho_vit_digits
  model_kwargs: {depth: 1}
  optimizer: {class_path: ortho_vit.optim.StiefelSGD, init_args: {lr: 0.1}}
data:
  class_path: ortho_vit.data.Digits
  init_args: {batch_size: 32, limit: 96}
trainer: {max_epochs: 1, accelerator: cpu, devices: 1}
"""
RUN = Path("runs/run/version_0")
AGAIN = ["--config", "run.yaml", "--ckpt_path", "last", "--trainer.max_epochs", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"), CONFIG)


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    return work_in_copy(trained, tmp_path, monkeypatch)


# ----------------------------------------------------------------------------------------------------- changes


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--data.seed 5", "data.seed was 0, now 5"),
        ("--data.val_size 0.5", "data.val_size was 0.1, now 0.5"),
        ("--data.limit 64", "data.limit was 96, now 64"),
        ("--data.batch_size 16", "data.batch_size was 32, now 16"),
        ("--data.mixup 0.2", "data.mixup was 0.0, now 0.2"),
        ("--data CIFAR10", "data was ortho_vit.data.Digits, now ortho_vit.data.CIFAR10"),
        ("--trainer.precision bf16-mixed", "trainer.precision was 32-true, now bf16-mixed"),
        ("--trainer.accumulate_grad_batches 2", "trainer.accumulate_grad_batches was 1, now 2"),
        ("--trainer.gradient_clip_val 1.0", "trainer.gradient_clip_val was None, now 1.0"),
        ("--trainer.limit_train_batches 2", "trainer.limit_train_batches was 1.0, now 2"),
        ("--seed_everything 3", "seed_everything was 0, now 3"),
    ],
)
def test_another_run_is_refused(folder, capsys, option, message):
    refused([*AGAIN, *option.split()], message, capsys, codes=(2,))


def test_a_change_is_allowed_by_name_and_recorded(folder, capsys):
    change = ["--data.batch_size", "16", "--seed_everything", "3"]
    refused(
        [*AGAIN, *change, "--allow_changes", "data.batch_size"],
        "seed_everything was 0, now 3",
        capsys,
        codes=(2,),
    )
    allowed = ["--allow_changes", "data.batch_size,seed_everything"]
    assert main([*AGAIN, *change, *allowed]) == 0
    assert json.loads((RUN / "changes.jsonl").read_text()) == {
        "step": 3,
        "changes": {"seed_everything": [0, 3], "data.batch_size": [32, 16], "trainer.max_epochs": [1, 2]},
    }
    saved = torch.load(RUN / "checkpoints/last.ckpt", weights_only=True)
    assert (saved["global_step"], saved["ortho_vit"]["seed"]) == (9, 3)
    longer = [*AGAIN[:-1], "3"]  # from now on the run is what it was changed to
    refused(longer, "seed_everything was 3, now 0; data.batch_size was 16, now 32", capsys, codes=(2,))
    assert main([*longer, *change]) == 0
    _, second = map(json.loads, (RUN / "changes.jsonl").read_text().splitlines())
    assert second == {"step": 9, "changes": {"trainer.max_epochs": [2, 3]}}


def test_the_card_says_what_was_changed_up_to_its_checkpoint(folder):
    change = ["--data.batch_size", "16", "--allow_changes", "data.batch_size"]
    assert main([*AGAIN, *change]) == 0
    shutil.copytree(RUN, "early")
    longer = ["fit", "--ckpt_path", str(RUN), "--trainer.max_epochs", "3", "--data.seed", "1"]
    assert main([*longer, "--allow_changes", "data.seed"]) == 0
    shutil.copy(RUN / "changes.jsonl", "early")
    recipes = {}
    for name, run in {"early": "early", "late": RUN}.items():
        last = f"{run}/checkpoints/last.ckpt"
        assert main(["export", "--ckpt_path", last, "--name", name, "--folder", "zoo"]) == 0
        recipes[name] = json.loads(Path(f"zoo/ortho_vit_digits.{name}.json").read_text())["recipe"]
    first = {"step": 3, "changes": {"data.batch_size": [32, 16], "trainer.max_epochs": [1, 2]}}
    second = {"step": 9, "changes": {"data.seed": [0, 1], "trainer.max_epochs": [2, 3]}}
    for name, changes, seed in (("early", [first], 0), ("late", [first, second], 1)):
        recipe = recipes[name]
        assert recipe["changes"] == changes
        assert recipe["trainer"]["max_epochs"] == 1 + len(changes)
        assert recipe["data"]["init_args"] | {"batch_size": 16, "seed": seed} == recipe["data"]["init_args"]


def test_what_does_not_change_a_run_is_free(folder):
    free = (
        "--data.num_workers 1 --trainer.precision 32 --trainer.log_every_n_steps 1 --images.every_n_epochs 1"
    )
    assert main([*AGAIN, *free.split(), "--seed_everything", "true"]) == 0
    recorded = json.loads((RUN / "changes.jsonl").read_text())
    assert recorded == {"step": 3, "changes": {"trainer.max_epochs": [1, 2]}}
    assert torch.load(RUN / "checkpoints/last.ckpt", weights_only=True)["ortho_vit"]["seed"] == 0


def test_names_of_changes_are_checked(folder, capsys):
    refused([*AGAIN, "--allow_changes", "batch_size"], "a run cannot change 'batch_size'", capsys, codes=(2,))
    evaluate = ["test", "--config", "run.yaml", "--ckpt_path", "last", "--allow_changes", "data.seed"]
    refused(evaluate, "--allow_changes is for fit", capsys, codes=(2,))
    Path("run.yaml").write_text(CONFIG + "allow_changes: data.seed\n")
    refused(AGAIN, "--allow_changes must be written in full, and on the command line", capsys, codes=(2,))


def test_damaged_changes_are_refused(folder, capsys):
    (RUN / "changes.jsonl").write_text("{}\n")
    refused(AGAIN, "changes.jsonl is damaged", capsys, codes=(2,))


# -------------------------------------------------------------------------------------------------- the images


@pytest.fixture(scope="module")
def trained_on_images(tmp_path_factory):
    folder = class_folders(tmp_path_factory.mktemp("images") / "images", count=8).parent
    data = "class_path: ortho_vit.data.ImageFolder\n  init_args: {root: images, image_size: 8, batch_size: 8}"
    config = CONFIG.partition("data:")[0].replace("{depth: 1}", "{depth: 1, in_chans: 3}")
    return train(folder, f"{config}data:\n  {data}\n{CONFIG.splitlines()[-1]}\n")


OTHER_IMAGES = "last.ckpt was trained on other images than ImageFolder has now"


def test_images_that_were_added_are_refused_unless_asked_for(
    trained_on_images, tmp_path, monkeypatch, capsys
):
    work_in_copy(trained_on_images, tmp_path, monkeypatch)
    image_file(Path("images/cat/another.png"))
    refused(AGAIN, OTHER_IMAGES, capsys, codes=(1,))
    assert main([*AGAIN, "--allow_changes", "data.root"]) == 0
    recorded = {"data.root": ["images", "images"], "trainer.max_epochs": [1, 2]}
    assert json.loads((RUN / "changes.jsonl").read_text())["changes"] == recorded
    assert main([*AGAIN[:-1], "3"]) == 0  # they are the run's images from now on


def test_images_may_be_moved_and_where_to_is_recorded(trained_on_images, tmp_path, monkeypatch, capsys):
    work_in_copy(trained_on_images, tmp_path, monkeypatch)
    Path("images").rename("elsewhere")
    assert main([*AGAIN, "--data.root", "elsewhere"]) == 0
    changes = json.loads((RUN / "changes.jsonl").read_text())["changes"]
    assert changes == {"data.root": ["images", "elsewhere"], "trainer.max_epochs": [1, 2]}
    last = str(RUN / "checkpoints/last.ckpt")
    # The run knows where its images are; the card does not mention it
    assert main(["export", "--ckpt_path", last, "--name", "moved", "--folder", "zoo"]) == 0
    recipe = json.loads(Path("zoo/ortho_vit_digits.moved.json").read_text())["recipe"]
    assert recipe["changes"] == [{"step": 2, "changes": {"trainer.max_epochs": [1, 2]}}]


def test_other_images_are_refused_from_python_too(tmp_path):
    make_trainer(tmp_path, max_epochs=1).fit(make_classifier(), datamodule=digits())
    last = tmp_path / "checkpoints/last.ckpt"
    with pytest.raises(ValueError, match="was trained on other images than Digits has now"):
        make_trainer(tmp_path).fit(make_classifier(), datamodule=digits(seed=1), ckpt_path=last)
    model = make_classifier()
    model.new_images = True
    make_trainer(tmp_path).fit(model, datamodule=digits(seed=1), ckpt_path=last)


# ------------------------------------------------------------------------------------------ nothing is lost


def test_an_earlier_checkpoint_does_not_overwrite_a_later_one(folder, capsys):
    best, last = RUN / "checkpoints/best.ckpt", RUN / "checkpoints/last.ckpt"
    earlier = best.read_bytes()
    assert main(AGAIN) == 0
    best.unlink()
    best.write_bytes(earlier)
    arguments = ["--config", "run.yaml", "--trainer.max_epochs", "3", "--ckpt_path", "best"]
    refused(
        arguments,
        f"best.ckpt is of step 3, and to resume it would overwrite {last} of step 6",
        capsys,
        codes=(2,),
    )
    last.unlink()
    assert main(arguments) == 0
    assert torch.load(last, weights_only=True)["global_step"] == 9


def test_from_python_neither(tmp_path):
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(make_classifier(), datamodule=digits())
    saved = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    earlier = tmp_path / "checkpoints/earlier.ckpt"
    torch.save(saved | {"global_step": 2}, earlier)
    with pytest.raises(UsageError, match=r"earlier.ckpt is of step 2, .*last.ckpt of step 8"):
        make_trainer(tmp_path, max_epochs=3).fit(make_classifier(), datamodule=digits(), ckpt_path=earlier)
    refuse_to_lose_steps(tmp_path / "checkpoints/last.ckpt", step=2)  # itself


# ------------------------------------------------------------------------------------------------- torchrun


@pytest.fixture
def torchrun(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


def test_the_processes_of_torchrun_are_the_devices(torchrun):
    assert launched_processes("auto", 1) == {"devices": 2, "num_nodes": 2}
    assert launched_processes(-1, 1) == {"devices": 2, "num_nodes": 2}
    for devices in (2, "2", [0, 1], "0,1"):
        assert launched_processes(devices, 2) == {}


@pytest.mark.parametrize("devices", ["1", "3", "[0]", "2"])
def test_other_devices_than_the_processes_of_torchrun_are_refused(folder, torchrun, capsys, devices):
    arguments = ["--config", "run.yaml", "--trainer.devices", devices]
    refused(arguments, "torchrun has started 4 processes, but trainer.devices is", capsys, codes=(2,))


def test_without_torchrun_devices_are_the_users(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")  # as Lightning sets it for the processes that it starts
    assert launched_processes("auto", 1) == {}


# ------------------------------------------------------------------------------- known before anything is trained


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("fit --test_after_fit true --trainer.limit_test_batches 0", "must be positive, got 0, or set test_after_fit to"),
        ("test --ckpt_path last --test_after_fit true --trainer.limit_test_batches 0",
         "limit_test_batches must be positive, got 0\n"),
        ("validate --ckpt_path last --trainer.limit_val_batches 0.0", "limit_val_batches must be positive, got 0"),
        ("predict --ckpt_path last --trainer.limit_predict_batches 0", "limit_predict_batches must be positive"),
    ],
)  # fmt: skip
def test_to_evaluate_nothing_is_refused(folder, capsys, command, message):
    refused([*command.split(), "--config", "run.yaml"], message, capsys, codes=(2,))


def test_a_test_at_the_end_needs_images(folder, capsys):
    class_folders(folder / "images", count=4)
    data = "--data ImageFolder --data.root images --data.image_size 32 --data.val_size 0 --data.limit 8"
    model = "--model.name ortho_vit_pico --test_after_fit true"
    arguments = ["--config", "run.yaml", *data.split(), *model.split()]
    refused(arguments, "ImageFolder has no images to test on: set data.val_size", capsys, codes=(1,))


def test_data_and_optimizer_are_built_once_and_a_checkpoint_is_read_once(folder, monkeypatch, capsys):
    built, optimizers, reads = [], [], []

    def count(owner, name, calls):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (calls.append(a), function(*a, **k))[1])

    count(Digits, "__init__", built)
    count(torch.optim.Optimizer, "__init__", optimizers)
    count(torch, "load", reads)
    assert main(AGAIN) == 0
    assert (len(built), len(optimizers), len(reads)) == (1, 1, 1)
    output = capsys.readouterr().out
    assert "Digits: 10 classes" in output
    assert " by StiefelSGD (free)" in output
    assert main(["--config", "run.yaml", "--name", "new"]) == 0
    assert (len(built), len(optimizers)) == (2, 2)
    assert "class_path: ortho_vit.data.Digits" in Path("runs/new/version_0/config.yaml").read_text()
