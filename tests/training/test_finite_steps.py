"""A loss or gradient that is not finite stops the run, or the step is skipped."""

import re
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ortho_vit.cli.main import main
from ortho_vit.optim import ProjectedStiefelSGD, StiefelAdam, StiefelSGD, base
from ortho_vit.optim.base import norms_of
from ortho_vit.training import Classifier, finite_steps
from ortho_vit.training.schedule import warmup_cosine
from tests.helpers.command_line import ONE_EPOCH
from tests.helpers.small_run import BadImage, assert_same_bits, digits, make_classifier, make_trainer

NAN, INF = float("nan"), float("inf")
SKIPPED = r"step skipped, \d+ so far: "


class BadGradient(L.Callback):
    """Replaces one gradient of some batches; the loss stays finite."""

    def __init__(self, *where, name="blocks.1.mlp.fc1.weight", value=INF):
        self.where, self.name, self.value = where, name, value

    def on_after_backward(self, trainer, pl_module):
        if (trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx) in self.where:
            dict(pl_module.model.named_parameters())[self.name].grad[0, 0] = self.value


class Watch(L.Callback):
    """Remembers weights, optimizer state and rate after each step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        state = trainer.optimizers[0].state_dict()["state"]
        weights = {name: p.detach().clone() for name, p in pl_module.model.state_dict().items()}
        copied = {
            i: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items() if k != "free"}
            for i, s in state.items()
        }
        self.steps.append((weights, copied, trainer.optimizers[0].param_groups[0]["lr"]))


def samples_of(epoch, batch, **kwargs):
    data = digits(**kwargs)
    data.setup("fit")
    return data.train_dataloader().samples(epoch, batch)


def listed(samples):
    return re.escape(", ".join(map(str, samples)))


# ------------------------------------------------------------------------------------------------ stopping


def test_a_loss_that_is_not_finite_stops_the_run_and_names_its_samples(tmp_path):
    trainer = make_trainer(tmp_path, BadImage((1, 1)), every_n_steps=1)
    samples = samples_of(1, 1)
    assert len(samples) == 32
    message = rf"the loss is nan at step 5 \(epoch 1; batch 1 because of {samples[1]} with samples {listed(samples)}\)"
    with pytest.raises(FloatingPointError, match=message) as caught:
        trainer.fit(make_classifier(), datamodule=digits())
    assert "\n" not in str(caught.value)
    last = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 5
    assert all(value.isfinite().all() for value in last["state_dict"].values())


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(
    "options",
    [{"optimizer": partial(torch.optim.AdamW, lr=1e-3), "constraint": None}, {}],
    ids=["torch's optimizer", "ours"],
)
def test_a_gradient_that_is_not_finite_stops_the_run_and_is_named(tmp_path, options, clip):
    trainer = make_trainer(tmp_path, BadGradient((0, 2)), every_n_steps=1, gradient_clip_val=clip)
    model = make_classifier(**options)
    message = (
        r"the gradient of model\.blocks\.1\.mlp\.fc1\.weight is not finite at step 2 "
        rf"\(epoch 0; batch 2 with samples {listed(samples_of(0, 2))}\)"
    )
    with pytest.raises(FloatingPointError, match=message):
        trainer.fit(model, datamodule=digits())
    last = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 2
    assert_same_bits(
        last["state_dict"], {f"model.{name}": value for name, value in model.model.state_dict().items()}
    )


def test_all_batches_of_an_accumulated_gradient_are_named(tmp_path):
    trainer = make_trainer(tmp_path, BadGradient((0, 2)), accumulate_grad_batches=2)
    both = samples_of(0, 2) + samples_of(0, 3)
    with pytest.raises(
        FloatingPointError, match=rf"step 1 \(epoch 0; batch 2, 3 with samples {listed(both)}\)"
    ):
        trainer.fit(make_classifier(), datamodule=digits())


def test_other_data_is_named_by_the_number_of_its_batch(tmp_path):
    loader = DataLoader(TensorDataset(torch.rand(8, 1, 8, 8), torch.arange(8)), batch_size=4)
    trainer = make_trainer(tmp_path, BadImage((0, 1)))
    with pytest.raises(FloatingPointError, match=r"the loss is nan at step 1 \(epoch 0; batch 1\);"):
        trainer.fit(make_classifier(), train_dataloaders=loader, val_dataloaders=loader)


def test_weights_that_overflowed_never_replace_a_good_checkpoint(tmp_path):
    class Overflow(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 3:
                with torch.no_grad():
                    pl_module.model.head.weight[0, 0] = INF

    trainer = make_trainer(tmp_path, Overflow(), every_n_steps=1)
    with pytest.raises(
        FloatingPointError, match=r"model\.head\.weight is not finite after step 3, so no checkpoint"
    ):
        trainer.fit(make_classifier(), datamodule=digits())
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 2


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("optimizer", [StiefelSGD, StiefelAdam])
def test_gradients_are_looked_at_once_per_step_with_the_same_bits(tmp_path, monkeypatch, clip, optimizer):
    looks = []

    def counted(tensors):
        looks.append(len(tensors))
        return norms_of(tensors)

    def trained(folder):
        looks.clear()
        model = make_classifier(partial(optimizer, lr=0.1))
        trainer = make_trainer(tmp_path / folder, gradient_clip_val=clip)
        trainer.callbacks.pop()  # the checkpoints, which look at the weights
        trainer.fit(model, datamodule=digits())
        assert set(looks) <= {parameters, parameters + 1}  # the gradients, and the loss
        return model.state_dict(), len(looks)

    parameters = sum(1 for _ in make_classifier().parameters())
    monkeypatch.setattr(finite_steps, "norms_of", counted)
    monkeypatch.setattr(base, "norms_of", counted)
    weights, count = trained("once")
    assert count == 8
    monkeypatch.setattr(
        optimizer, "known_norms", property(lambda self: {}, lambda self, norms: None), raising=False
    )
    again, count = trained("twice")
    assert count == 16
    assert_same_bits(weights, again)


def test_a_gradient_that_clipping_makes_small_enough_is_not_refused(tmp_path):
    bad = BadGradient((0, 1), name="blocks.0.attn.qkv.weight", value=1e18)
    projected = partial(ProjectedStiefelSGD, lr=0.1)
    with pytest.raises(FloatingPointError, match="too large to be squared"):
        make_trainer(tmp_path / "refused", bad).fit(make_classifier(projected), datamodule=digits())
    trainer = make_trainer(tmp_path / "clipped", bad, gradient_clip_val=1.0)
    trainer.fit(make_classifier(projected), datamodule=digits())


# ------------------------------------------------------------------------------------------------ skipping


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (BadImage((0, 0), (1, 1)), "the loss is nan"),
        (BadGradient((0, 0), (1, 1)), "the gradient of .*fc1.weight"),
    ],
    ids=["loss", "gradient"],
)
def test_a_step_that_is_skipped_changes_nothing_but_its_number(tmp_path, bad, problem):
    watch, model = Watch(), make_classifier(skip_nonfinite=True)
    before = {name: p.clone() for name, p in model.model.state_dict().items()}
    trainer = make_trainer(tmp_path, bad, watch, gradient_clip_val=1.0)
    with pytest.warns(UserWarning, match=SKIPPED + problem):
        trainer.fit(model, datamodule=digits())
    assert_same_bits(watch.steps[0][0], before)
    assert watch.steps[0][1] == {}
    assert_same_bits(watch.steps[5][:2], watch.steps[4][:2])
    assert not torch.equal(watch.steps[6][0]["head.weight"], watch.steps[5][0]["head.weight"])
    assert [rate for *_, rate in watch.steps] == [
        0.1 * warmup_cosine(step, warmup=0, total=8) for step in range(1, 9)
    ]
    assert model.steps.skipped == 2
    assert trainer.callback_metrics["train/skipped_steps"] == 2
    assert trainer.callback_metrics["train/loss"].isfinite()


def test_a_step_is_skipped_as_a_whole_where_batches_are_accumulated(tmp_path):
    watch, model = Watch(), make_classifier(skip_nonfinite=True)
    bad = BadImage((0, 2))  # the first of the two that make step 1
    trainer = make_trainer(tmp_path, bad, watch, accumulate_grad_batches=2, max_epochs=1)
    with pytest.warns(
        UserWarning, match=SKIPPED + r"the loss is nan at step 1 \(epoch 0; batch 2 because of"
    ):
        trainer.fit(model, datamodule=digits())
    assert_same_bits(watch.steps[3][:2], watch.steps[1][:2])
    assert (model.steps.skipped, trainer.global_step) == (1, 2)


def test_a_skipped_batch_does_not_reach_the_statistics_of_the_model(tmp_path):
    class Normed(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.norm, self.model = nn.BatchNorm2d(1), model

        def forward(self, images):
            return self.model(self.norm(images))

    model = make_classifier(partial(torch.optim.SGD, lr=0.1), constraint=None, skip_nonfinite=True)
    model.model = Normed(model.model)
    with pytest.warns(UserWarning, match=SKIPPED):
        make_trainer(tmp_path, BadImage((1, 3)), max_epochs=2).fit(model, datamodule=digits())
    assert model.model.norm.running_mean.isfinite().all()
    assert model.model.norm.num_batches_tracked == 7


def test_skipping_without_end_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(finite_steps, "PATIENCE", 3)
    bad = BadImage((0, 0), (0, 2), (0, 3), (1, 0))
    model = make_classifier(skip_nonfinite=True)
    with (
        pytest.warns(UserWarning, match=SKIPPED),
        pytest.raises(
            FloatingPointError,
            match=r"step 4 .* as in all of the last 3 steps, so skipping them does not help",
        ),
    ):
        make_trainer(tmp_path, bad).fit(model, datamodule=digits())


# ---------------------------------------------------------------------------------------- 16-mixed precision


def half(folder, *callbacks, model=None, **kwargs):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)  # the trainer's own would be bf16-mixed on a CPU
    watch, model = Watch(), model or make_classifier()
    make_trainer(folder, *callbacks, watch, plugins=[plugin], **kwargs).fit(model, datamodule=digits())
    return model, watch.steps, scaler.get_scale()


def test_an_infinite_gradient_is_left_to_the_scaler(tmp_path):
    model, steps, scale = half(tmp_path, BadGradient((0, 0), (0, 2)), gradient_clip_val=1.0)
    assert scale == 2.0**8
    assert_same_bits(steps[2][:2], steps[1][:2])
    assert model.steps.skipped == 0


def test_a_loss_that_is_not_finite_is_not(tmp_path):
    with pytest.raises(FloatingPointError, match="the loss is nan at step 2"):
        half(tmp_path / "stopped", BadImage((0, 2)))
    with pytest.warns(UserWarning, match=SKIPPED + "the loss is nan at step 2"):
        model, steps, scale = half(
            tmp_path / "skipped", BadImage((0, 2)), model=make_classifier(skip_nonfinite=True)
        )
    assert_same_bits(steps[2][:2], steps[1][:2])
    assert (model.steps.skipped, scale) == (1, 2.0**10)


def test_a_scale_that_only_falls_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(finite_steps, "PATIENCE", 3)
    bad = BadGradient(*((0, batch) for batch in range(4)), value=NAN)
    message = (
        r"the gradient is not finite at a scale of 256 at step 2 \(epoch 0\), as in all of the last 3 steps"
    )
    with pytest.raises(FloatingPointError, match=message):
        half(tmp_path, bad)


# ------------------------------------------------------------------------------------------ the command line


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_a_run_that_stopped_goes_on_with_the_step_skipped(tmp_path, monkeypatch, capsys):
    start = Classifier.on_train_batch_start

    def with_bad_image(self, batch, batch_idx):
        BadImage((0, 2)).on_train_batch_start(self.trainer, self, batch, batch_idx)
        start(self, batch, batch_idx)

    monkeypatch.setattr(Classifier, "on_train_batch_start", with_bad_image)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(ONE_EPOCH)
    arguments = ["fit", "--config", "run.yaml", "--checkpoints.every_n_steps", "1"]
    assert main(arguments) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: the loss is nan at step 2 (epoch 0; batch 2 because of ")
    assert error.endswith("or skip such steps with --model.skip_nonfinite true")
    with pytest.warns(UserWarning, match=SKIPPED):
        assert main([*arguments, "--ckpt_path", "last", "--model.skip_nonfinite", "true"]) == 0
    assert re.search(r"steps skipped +│ 1, not finite", capsys.readouterr().out)
