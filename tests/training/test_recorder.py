"""What a run leaves for programs to read, however it ends."""

import json

import lightning as L
import pytest
import torch

from ortho_vit.errors import DivergedError
from ortho_vit.training.recorder import Recorder
from tests.helpers.small_run import digits, make_classifier, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")


def read(folder, name="result.json"):
    return json.loads((folder / name).read_text())


def fit(folder, model, *callbacks, resume=None, **trainer):
    data = digits(val_size=0)
    trainer = make_trainer(folder, Recorder(), *callbacks, **trainer)
    trainer.fit(model, data, ckpt_path=resume)
    trainer.test(model, data, verbose=False)


def without_time(curve):
    return [{name: value for name, value in point.items() if name != "seconds"} for point in curve]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    fit(folder, make_classifier())
    return folder


def test_the_last_point_of_the_curve_is_the_test(whole):
    result, progress = read(whole), read(whole, "progress.json")
    assert (result["status"], result["step"], len(result["curve"])) == ("finished", 8, 2)
    last = result["curve"][-1]
    assert last["test_accuracy"] == pytest.approx(result["test_accuracy"])
    assert last["test_loss"] == pytest.approx(result["test_loss"], rel=1e-5)
    assert last["orthogonality"] == result["orthogonality"] < 1e-6
    assert (progress["step"], progress["steps"], progress["epochs"]) == (8, 8, 2)
    assert 0 < result["seconds"] <= progress["seconds"] + 0.1


def test_evaluating_changes_nothing_about_the_training(tmp_path):
    with_recorder, without = make_classifier(), make_classifier()
    make_trainer(tmp_path / "a", Recorder()).fit(with_recorder, digits(val_size=0))
    make_trainer(tmp_path / "b").fit(without, digits(val_size=0))
    for one, other in zip(with_recorder.parameters(), without.parameters(), strict=True):
        assert torch.equal(one, other)


class Stop(L.Callback):
    """As a kill after the checkpoint of a step would."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            raise RuntimeError("the power failed")


@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_resumed_run_has_the_curve_of_an_uninterrupted_one(tmp_path, whole, step):
    with pytest.raises(RuntimeError, match="the power failed"):
        fit(tmp_path, make_classifier(), Stop(step), every_n_steps=2)
    assert not (tmp_path / "result.json").exists()  # an error is not a result
    fit(tmp_path, make_classifier(), resume=tmp_path / "checkpoints/last.ckpt", every_n_steps=2)
    expected, parts = read(whole), read(tmp_path)
    assert without_time(parts["curve"]) == without_time(expected["curve"])
    assert parts["test_accuracy"] == expected["test_accuracy"]


@pytest.mark.parametrize(
    "error",
    [
        DivergedError("the loss is nan at step 3 (epoch 0; batch 3 with samples 1, 2); lower the rate"),
        DivergedError("StiefelSGD: weight: the step overflowed; lower the learning rate"),
        DivergedError("weight has left the manifold at step 3: its orthogonality error is 1"),
    ],
)
def test_a_run_that_diverges_has_a_result_with_step_and_reason(tmp_path, error):
    class Diverge(Stop):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == self.step:
                raise error

    with pytest.raises(type(error)):
        fit(tmp_path, make_classifier(), Diverge(5))
    result = read(tmp_path)
    assert (result["status"], result["step"], len(result["curve"])) == ("diverged", 5, 1)
    assert result["reason"] == str(error).replace(" with samples 1, 2", "")
    assert "test_accuracy" not in result


def test_a_trial_leaves_nothing(tmp_path):
    make_trainer(tmp_path, Recorder(), fast_dev_run=True).fit(make_classifier(), digits(val_size=0))
    assert list(tmp_path.iterdir()) == []


def test_the_test_set_is_evaluated_as_often_as_asked_for(tmp_path):
    make_trainer(tmp_path, recorder := Recorder(every_n_epochs=3), max_epochs=4).fit(
        make_classifier(), digits()
    )
    assert [point["test_accuracy"] is not None for point in recorder.curve] == [False, False, True, True]
    assert all(0 <= point["val_accuracy"] <= 1 for point in recorder.curve)
    with pytest.raises(ValueError, match="every_n_epochs must be at least 1, got 0"):
        Recorder(every_n_epochs=0)


def test_epochs_without_validation_have_no_validation_accuracy(tmp_path):
    trainer = make_trainer(tmp_path, Recorder(), max_epochs=3, check_val_every_n_epoch=2)
    data = digits()
    trainer.fit(make_classifier(), data)
    curve = trainer.callbacks[[isinstance(c, Recorder) for c in trainer.callbacks].index(True)].curve
    assert [point["val_accuracy"] is not None for point in curve] == [False, True, False]


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_a_run_of_another_precision_is_recorded(tmp_path, precision):
    fit(tmp_path, make_classifier(), precision=precision)
    assert read(tmp_path)["status"] == "finished"
