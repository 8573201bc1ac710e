"""The data modules under Lightning's trainer: training, evaluation, prediction, and resuming exactly."""

import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from PIL import Image

from ortho_vit.data import Digits, ImageFolder
from tests.helpers.small_run import assert_same_bits, make_classifier, make_trainer

# A warning of Lightning with a newer torch
pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated")


class Net(L.LightningModule):
    def __init__(self, pixels=64):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(pixels, 10)
        self.seen = []
        self.validated = 0

    def forward(self, images):
        return self.linear(images.flatten(1))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        self.seen.append((self.current_epoch, batch_idx, images.double().sum().item()))
        return torch.nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch, batch_idx):
        self.validated += len(batch[0])

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean(), batch_size=len(images))

    def predict_step(self, batch, batch_idx):
        images, names = batch
        return list(zip(names, self(images).argmax(1).tolist(), strict=True))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class SaveAlways(L.Callback):
    """A checkpoint at every place where one is commonly written, and in the middle of each step."""

    def __init__(self, folder):
        self.folder = folder
        self.done = {}  # batches learned from, by checkpoint

    def save(self, trainer, place, unfinished=0):
        if not trainer.sanity_checking:
            path = self.folder / f"{len(self.done)}-{place}.ckpt"
            trainer.save_checkpoint(path)
            self.done[path] = len(trainer.lightning_module.seen) - unfinished

    def on_before_optimizer_step(self, trainer, *_):
        self.save(trainer, "in-step", unfinished=1)

    def on_train_batch_end(self, trainer, *_):
        self.save(trainer, "batch-end")

    def on_validation_end(self, trainer, *_):
        self.save(trainer, "validation-end")

    def on_train_epoch_end(self, trainer, *_):
        self.save(trainer, "epoch-end")


def trainer(*callbacks, **kwargs):
    return L.Trainer(
        **{"max_epochs": 2, **kwargs},
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )


def fit(*callbacks, ckpt_path=None, num_workers=0, val_size=50, **kwargs):
    net = Net()
    data = Digits(batch_size=100, limit=350, num_workers=num_workers, val_size=val_size, seed=3)
    trainer(*callbacks, **kwargs).fit(net, data, ckpt_path=ckpt_path)
    return net


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"val_size": 0},
        {"val_check_interval": 2},
        {"limit_train_batches": 3},
        pytest.param({"num_workers": 2}, marks=pytest.mark.slow),
    ],
    ids=["plain", "no validation", "validation in mid-epoch", "limited epochs", "workers"],
)
def test_a_run_resumed_from_any_checkpoint_sees_the_batches_that_were_left(tmp_path, kwargs):
    saver = SaveAlways(tmp_path)
    whole = fit(saver, **kwargs)
    assert len(set(whole.seen)) == len(whole.seen)
    for path, done in saver.done.items():
        resumed = fit(ckpt_path=path, **kwargs)
        assert resumed.seen == whole.seen[done:], path.name
        assert torch.equal(resumed.linear.weight, whole.linear.weight), path.name


def test_digits_train_and_test_with_a_linear_model():
    net, data = Net(), Digits(batch_size=32, crop=False)
    runner = trainer(max_epochs=3)
    runner.fit(net, data)
    (result,) = runner.test(net, data, verbose=False)
    assert result["accuracy"] > 0.9
    assert net.validated > 0


def test_without_a_validation_set_training_goes_on_and_validation_says_why_not():
    net, data = Net(), Digits(val_size=0)
    runner = trainer(max_epochs=1)
    runner.fit(net, data)
    assert net.validated == 0
    assert runner.limit_val_batches == 1.0
    with pytest.raises(ValueError, match="Digits: nothing to validate on with val_size=0"):
        runner.validate(net, data, verbose=False)


def test_a_prediction_names_every_image():
    data = Digits(batch_size=100)
    rows = [row for batch in trainer().predict(Net(), data) for row in batch]
    assert [name for name, _ in rows] == [f"test/{i:05d}" for i in range(359)]


def test_a_prediction_skips_bad_images(tmp_path):
    for name in "abcdefg":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    for name in "abf":
        (tmp_path / f"{name}.png").write_bytes(b"")
    data = ImageFolder("nowhere", predict_root=str(tmp_path), image_size=8, batch_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = trainer().predict(Net(3 * 64), data)
    assert [name for batch in batches for name, _ in batch] == ["c.png", "d.png", "e.png", "g.png"]
    messages = [str(warning.message) for warning in caught]
    assert sum("the file is empty; skipped" in message for message in messages) == 3
    assert "ImageFolder: skipped 3 of 7 images" in messages


def mixed_fit(folder, ckpt_path=None, **kwargs):
    """A run with everything random in its data, through the classifier of the package."""
    seen = SeenBatches()
    data = Digits(
        batch_size=100, limit=300, augment="randaugment", random_erasing=0.5, mixup=0.8, cutmix=1.0, **kwargs
    )
    model = make_classifier()
    make_trainer(folder, seen, every_n_steps=1).fit(model, data, ckpt_path=ckpt_path)
    return seen, model


class SeenBatches(L.Callback):
    def __init__(self):
        self.batches, self.checkpoint = [], None

    def on_train_batch_start(self, runner, net, batch, batch_idx):
        self.batches.append(batch)

    def on_train_batch_end(self, runner, net, *_):
        if runner.global_step == 2:  # in the middle of an epoch of three batches
            self.checkpoint = Path(runner.default_root_dir) / "middle.ckpt"
            runner.save_checkpoint(self.checkpoint)


def test_mixed_labels_train_a_classifier_and_resume_to_the_bit(tmp_path):
    whole, model = mixed_fit(tmp_path / "whole")
    assert [labels.shape for _, labels in whole.batches] == [(100, 10)] * 6
    assert 0 <= model.trainer.callback_metrics["train/accuracy"] <= 1
    rest, resumed = mixed_fit(tmp_path / "resumed", ckpt_path=whole.checkpoint)
    assert_same_bits(rest.batches, whole.batches[2:])
    assert_same_bits(resumed.state_dict(), model.state_dict())


def two_ranks(folder):
    runner = trainer(Report(folder), max_epochs=1, num_sanity_val_steps=0, devices=2, strategy="ddp_fork")
    runner.fit(Net(), Digits(batch_size=100, limit=350, val_size=51))


class Report(L.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_start(self, runner, net, batch, batch_idx):
        rows = runner.train_dataloader.sampler
        keys = list(rows)[batch_idx].samples
        torch.save(torch.from_numpy(keys), self.folder / f"{runner.global_rank}-{batch_idx}.pt")

    def on_train_end(self, runner, net):
        torch.save(torch.tensor(net.validated), self.folder / f"validated-{runner.global_rank}.pt")


@pytest.mark.slow
def test_two_processes_share_the_training_set_and_validate_each_image_once(tmp_path):
    two_ranks(tmp_path)
    shares = [torch.cat([torch.load(tmp_path / f"{rank}-{i}.pt") for i in range(2)]) for rank in range(2)]
    assert torch.cat(shares).sort().values.tolist() == list(range(350))
    assert sum(torch.load(tmp_path / f"validated-{rank}.pt").item() for rank in range(2)) == 51
