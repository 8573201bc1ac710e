"""What a run prints, and that it continues where its log cannot be written."""

import shutil
import sys
from functools import partial

import pytest
from lightning.pytorch.callbacks import Callback

from ortho_vit.optim import StiefelSGD
from ortho_vit.training.reporting import (
    Bar,
    EpochLines,
    History,
    StartLines,
    TensorBoard,
    progress_bar,
    quiet_writer,
)
from tests.helpers.small_run import digits, make_classifier, make_trainer


class Look(Callback):
    """Keeps what the bar shows after each step."""

    def __init__(self, bar):
        self.bar, self.shown = bar, []

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.shown.append(self.bar.get_metrics(trainer, pl_module))


def test_the_bar_shows_loss_and_accuracy_and_no_version(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(Bar, "SECONDS", 0.0)
    bar = progress_bar(History())
    look = Look(bar)
    logger = TensorBoard(tmp_path, default_hp_metric=False)
    make_trainer(tmp_path, bar, look, logger=logger).fit(make_classifier(), datamodule=digits())
    assert set(look.shown[0]) == {"loss"}
    assert set(look.shown[-1]) == {"loss", "val accuracy"}
    assert 0 < float(look.shown[-1]["loss"]) < 10
    assert look.shown[-1]["val accuracy"].endswith("%")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert isinstance(progress_bar(History()), EpochLines)


class RemoveFolder(Callback):
    def on_train_epoch_start(self, trainer, *args):
        if trainer.current_epoch == 1:
            trainer.logger.experiment.flush()
            shutil.rmtree(trainer.log_dir)


def test_a_run_goes_on_without_its_log(tmp_path, capsys):
    logger = TensorBoard(tmp_path, "logs", default_hp_metric=False)
    trainer = make_trainer(tmp_path, RemoveFolder(), logger=logger, max_epochs=3, log_every_n_steps=1)
    with (
        quiet_writer(),
        pytest.warns(UserWarning, match="goes on without TensorBoard: .*No such file") as warned,
    ):
        trainer.fit(make_classifier(), datamodule=digits())
    assert len([w for w in warned if "TensorBoard" in str(w.message)]) == 1
    assert trainer.current_epoch == 3
    assert "Traceback" not in capsys.readouterr().err


def test_a_log_that_fails_within_a_metric_is_left_alone_but_no_other_error(tmp_path, monkeypatch):
    logger = TensorBoard(tmp_path, "logs", default_hp_metric=False)
    with pytest.raises(ValueError, match="you tried to log"):
        logger.log_metrics({"loss": "text"})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logger.experiment, "add_scalar", full)
    with pytest.warns(UserWarning, match=r"goes on without TensorBoard: .* \(No space left on device\)"):
        logger.log_metrics({"loss": 1.0})
    logger.log_metrics({"loss": 1.0})


def test_the_data_is_described_once(tmp_path, capsys):
    trainer, data = make_trainer(tmp_path, StartLines(), max_epochs=1), digits()
    trainer.fit(make_classifier(), datamodule=data)
    trainer.test(make_classifier(), datamodule=data, verbose=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Digits: ")]
    assert len(lines) == 1
    assert "10 classes" in lines[0]
    assert "128 training" in lines[0]


def test_a_line_says_what_moves_by_which_rule(tmp_path, capsys):
    classifier = make_classifier(partial(StiefelSGD, lr=0.1), model_kwargs={"depth": 2}, freeze=["pos_embed"])
    make_trainer(tmp_path, StartLines(), max_steps=1).fit(classifier, datamodule=digits())
    line = "30 parameters, 2 of them constrained: 2 by StiefelSGD, 27 by StiefelSGD (free), 1 frozen"
    assert capsys.readouterr().out.splitlines().count(line) == 1
