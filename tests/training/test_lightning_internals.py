"""What training relies on in Lightning and torch beyond their documentation: each fact in one test."""

import signal
import warnings
from functools import partial
from itertools import pairwise

import lightning as L
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from ortho_vit.optim import StiefelSGD
from ortho_vit.training import Checkpoints, Classifier, WeightAveraging, classifier
from ortho_vit.training.lightning_internals import (
    after_signal_handlers,
    averaged_model,
    batches_per_epoch,
    count_finished_epoch_once,
    expect_no_first_step,
    is_accumulating,
    validation_is_due,
)
from ortho_vit.training.stopping import Stopped
from tests.helpers.small_run import digits, make_classifier, make_trainer


class Probe(L.Callback):
    """Records what a function returns at the end of every training batch."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(self.look(trainer))


def fit(folder, *callbacks, model=None, ckpt_path=None, **kwargs):
    """Four batches in each epoch."""
    trainer = make_trainer(folder, *callbacks, **kwargs)
    trainer.fit(model or make_classifier(), datamodule=digits(), ckpt_path=ckpt_path)
    return trainer


def test_the_length_of_an_epoch_is_known_before_training(tmp_path):
    lengths = []

    class Early(Classifier):
        def configure_optimizers(self):
            lengths.append((self.trainer.num_training_batches, batches_per_epoch(self.trainer)))
            return super().configure_optimizers()

    model = Early("ortho_vit_digits", partial(StiefelSGD, lr=0.1), num_classes=10)
    fit(tmp_path, model=model, max_epochs=-1, max_steps=3, limit_train_batches=3)
    assert lengths == [(float("inf"), 3)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [False, False, False, True] * 2),
        ({"val_check_interval": 2}, [False, True] * 4),
        ({"check_val_every_n_epoch": 2}, [False] * 7 + [True]),
        ({"limit_val_batches": 0}, [False] * 8),
    ],
)
def test_it_is_known_whether_validation_follows_a_batch(tmp_path, options, expected):
    validated = []

    def look(trainer):
        before, answers = trainer.should_stop, []
        for stopping in (False, True):  # which makes no difference, and is not changed
            trainer.should_stop = stopping
            answers.append(validation_is_due(trainer))
            assert trainer.should_stop == stopping
        trainer.should_stop = before
        assert answers[0] == answers[1]
        return answers[0]

    class Validated(L.Callback):
        def on_validation_start(self, trainer, pl_module):
            validated.append(trainer.global_step)

    probe = Probe(look)
    fit(tmp_path, probe, Validated(), **options)
    assert probe.seen == expected
    assert validated == [step for step, due in enumerate(expected, 1) if due]


def test_an_epoch_that_was_finished_is_counted_once_after_resuming(tmp_path, monkeypatch):
    corrected = []
    monkeypatch.setattr(
        classifier,
        "count_finished_epoch_once",
        lambda trainer: corrected.append(
            (trainer.fit_loop.restarted_on_epoch_end, count_finished_epoch_once(trainer))
        ),
    )

    def counts(**kwargs):
        trainer = fit(tmp_path, max_epochs=-1, **kwargs)
        loop = trainer.fit_loop
        return (
            trainer.current_epoch,
            loop.epoch_progress.total.processed,
            loop.epoch_loop._batches_that_stepped,
        )

    assert counts(max_steps=4) == (1, 1, 4)
    assert counts(max_steps=8, ckpt_path=tmp_path / "checkpoints/last.ckpt") == (2, 2, 8)
    assert [restarted for restarted, _ in corrected] == [False, True]


def test_a_run_that_was_stopped_within_validation_begins_with_it(tmp_path):
    class Record(L.Callback):
        """Records batches, and stops the first run in the second batch of the validation after four steps."""

        def __init__(self):
            self.batches = []

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.batches.append(f"train {batch_idx}")

        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.batches.append(f"validate {batch_idx}")
            if trainer.ckpt_path is None and batch_idx == 1:
                signal.raise_signal(signal.SIGTERM)

    validation = [f"validate {number}" for number in range(4)]
    first, second = Record(), Record()
    with pytest.raises(Stopped):
        fit(tmp_path, first)
    assert first.batches[4:] == validation[:2]
    fit(tmp_path, second, ckpt_path=tmp_path / "checkpoints/last.ckpt")
    assert second.batches == [*validation, *first.batches[:4], *validation]


def test_handlers_are_installed_after_those_of_lightning(tmp_path):
    installed = []

    class Install(L.Callback):
        def setup(self, trainer, pl_module, stage):
            after_signal_handlers(trainer, lambda: installed.append(signal.getsignal(signal.SIGTERM)))

        def on_fit_start(self, trainer, pl_module):
            installed.append("on_fit_start")

    model = make_classifier()
    model.configure_callbacks = list  # without the handler of ours
    fit(tmp_path, Install(), model=model, max_epochs=1)
    (handler,) = [entry for entry in installed if entry != "on_fit_start"]
    assert type(handler).__module__.startswith("lightning.")


def test_the_average_of_the_weights_is_found(tmp_path):
    averaging = WeightAveraging(decay=0.5)
    probe = Probe(lambda trainer: int(averaged_model(averaging).n_averaged))
    trainer = fit(tmp_path, averaging, probe, max_epochs=1)
    assert probe.seen == [1, 2, 3, 4]
    average, weights = averaged_model(averaging).module, trainer.lightning_module
    assert average.state_dict().keys() == weights.state_dict().keys()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_is_known_which_batches_made_no_step(tmp_path, accumulate):
    probe = Probe(lambda trainer: (trainer.global_step, is_accumulating(trainer)))
    fit(tmp_path, probe, accumulate_grad_batches=accumulate, max_epochs=1)
    steps = [0, *(step for step, _ in probe.seen)]
    made = [after > before for before, after in pairwise(steps)]
    assert made == [not accumulating for _, accumulating in probe.seen]


def test_a_checkpoint_is_never_written_between_accumulated_batches(tmp_path):
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 2  # the first of the two batches of a step

    trainer = make_trainer(tmp_path, Stop(), accumulate_grad_batches=2, max_epochs=1)
    trainer.fit(make_classifier(), datamodule=digits())
    checkpoints = next(c for c in trainer.callbacks if isinstance(c, Checkpoints))
    assert checkpoints.last_path is None


def test_the_data_module_reads_how_many_batches_are_done(tmp_path):
    probe = Probe(lambda trainer: trainer.fit_loop.batch_idx + 1)
    fit(tmp_path, probe)
    assert probe.seen == [1, 2, 3, 4] * 2


def test_a_schedule_may_advance_before_the_first_step_of_its_optimizer():
    def advance(prepare):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = LambdaLR(optimizer, lambda step: 1.0)
        prepare(optimizer)
        with warnings.catch_warnings(record=True, action="always") as warned:
            schedule.step()
        return [str(warning.message) for warning in warned]

    assert "before `optimizer.step()`" in advance(lambda optimizer: None)[0]  # without it, torch warns
    assert advance(expect_no_first_step) == []
