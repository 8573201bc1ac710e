"""Schedulers of torch and timm in place of warm-up and cosine, and options for some of the parameters."""

from functools import partial

import lightning as L
import pytest
import torch
from timm.scheduler import CosineLRScheduler, PlateauLRScheduler
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR

from ortho_vit.optim import StiefelSGD
from ortho_vit.training import Classifier
from tests.helpers.small_run import assert_same_bits, digits, make_classifier, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")


class Rates(L.Callback):
    """The learning rate of every step."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(optimizer.param_groups[0]["lr"])


def rates(folder, scheduler, **kwargs):
    record = Rates()
    model = make_classifier(scheduler=scheduler, **kwargs)
    make_trainer(folder, record, max_epochs=3).fit(model, datamodule=digits(limit=64))  # two steps per epoch
    return record.seen


def reference(scheduler, steps):
    """The rates of a bare scheduler of torch that starts at 0.1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    made, seen = scheduler(optimizer), []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return seen


def test_a_scheduler_of_torch_advances_by_epoch(tmp_path):
    step = partial(StepLR, step_size=1, gamma=0.5)
    assert rates(tmp_path, step) == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])


def test_a_scheduler_of_torch_may_advance_by_step(tmp_path):
    cosine = {"class_path": "torch.optim.lr_scheduler.CosineAnnealingLR", "init_args": {"T_max": 6}}
    seen = rates(tmp_path, cosine, scheduler_interval="step")
    assert seen == pytest.approx(reference(partial(CosineAnnealingLR, T_max=6), 6))


def test_one_cycle_advances_by_step_without_being_told(tmp_path):
    cycle = partial(OneCycleLR, max_lr=0.1, total_steps=6)
    assert rates(tmp_path, cycle) == pytest.approx(reference(cycle, 6))


def test_a_scheduler_of_timm_advances_by_epoch_or_by_update(tmp_path):
    by_epoch = partial(CosineLRScheduler, t_initial=3, warmup_t=1, warmup_lr_init=0.01)
    # timm scales what has `lr_scale` by itself: the groups of layer_decay must not be scaled twice
    seen = rates(tmp_path / "epoch", by_epoch, layer_decay=0.5)
    scale = 0.5**4  # of the embeddings, the first group
    assert seen[0] == 0.01
    assert seen[2:4] == pytest.approx([0.1 * scale * 0.75] * 2)
    seen = rates(tmp_path / "step", partial(CosineLRScheduler, t_initial=6, t_in_epochs=False))
    assert seen == pytest.approx(reference(partial(CosineAnnealingLR, T_max=6), 6))


@pytest.mark.parametrize(
    "scheduler",
    [
        partial(ReduceLROnPlateau, patience=0, threshold=10.0, threshold_mode="abs"),
        partial(PlateauLRScheduler, patience_t=0, threshold=10.0, decay_rate=0.1),
    ],
    ids=["torch", "timm"],
)
def test_a_plateau_is_watched_in_validation(tmp_path, scheduler):
    seen = rates(tmp_path, scheduler)
    assert seen[0] == 0.1
    assert seen[-1] == pytest.approx(0.01)


@pytest.mark.parametrize(
    "scheduler",
    [
        partial(ExponentialLR, gamma=0.7),
        partial(CosineLRScheduler, t_initial=8, t_in_epochs=False, noise_range_t=2),
        partial(ReduceLROnPlateau, patience=1, threshold=10.0, threshold_mode="abs"),
        partial(PlateauLRScheduler, patience_t=1, threshold=10.0, noise_range_t=1),
    ],
    ids=["torch", "timm", "torch's plateau", "timm's plateau"],
)
def test_a_run_is_resumed_to_the_bit(tmp_path, scheduler):
    def fit(folder, epochs, ckpt_path=None):
        model, record = make_classifier(scheduler=scheduler), Rates()
        trainer = make_trainer(folder, record, max_epochs=epochs)
        trainer.fit(model, datamodule=digits(limit=64), ckpt_path=ckpt_path, weights_only=True)
        return model.state_dict(), record.seen

    whole, rates_whole = fit(tmp_path / "whole", 4)
    _, first = fit(tmp_path / "parts", 2)
    resumed, second = fit(tmp_path / "parts", 4, str(tmp_path / "parts/checkpoints/last.ckpt"))
    assert first + second == rates_whole
    assert_same_bits(whole, resumed)


def test_a_plateau_needs_validation(tmp_path):
    model = make_classifier(scheduler=ReduceLROnPlateau)
    with pytest.raises(ValueError, match="the scheduler watches val/loss, and there is no validation"):
        make_trainer(tmp_path, limit_val_batches=0).fit(model, datamodule=digits())


def test_the_scheduler_is_kept_as_plain_values():
    model = make_classifier(scheduler=partial(StepLR, step_size=2))
    plain = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 2}}
    assert model.hparams["scheduler"] == plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheduler": StepLR}, r"scheduler: .*step_size"),
        (
            {"scheduler": partial(StepLR, step_size=1), "warmup_epochs": 2},
            "warmup_epochs is 2, .* set it to 0",
        ),
        ({"scheduler_interval": "step"}, "there is no scheduler; give one, or leave it out"),
        ({"scheduler": {"class_path": "os.path.join"}}, "os.path.join is not a scheduler of torch or timm"),
        (
            {"scheduler": partial(CosineLRScheduler, t_initial=6), "scheduler_interval": "step"},
            "CosineLRScheduler advances by epoch, and scheduler_interval is 'step'; leave it out",
        ),
        ({"param_groups": [{"lr": 0.1}]}, "needs `match`, a name of parameters"),
        ({"param_groups": [{"match": 3}]}, "needs `match`, a name of parameters"),
        ({"param_groups": [{"match": [["*.bias"]]}]}, "needs `match`, a name of parameters"),
        ({"param_groups": [{"match": "*.qvk.*"}]}, r"no parameter is called '\*\.qvk\.\*'"),
        ({"param_groups": [{"match": "*.bias", "decay": 0}]}, "StiefelSGD has no option 'decay'; it has lr"),
        ({"param_groups": [{"match": "*.bias", "lr": -1}]}, "lr must be finite"),
    ],
)
def test_what_is_wrong_is_known_before_training(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_classifier(**arguments)


# ------------------------------------------------------------------------------------------------ groups


def options_by_name(model, *keys):
    groups = model.make_optimizer().param_groups
    return {name: tuple(group[key] for key in keys) for group in groups for name in group["param_names"]}


def test_the_first_of_the_groups_that_matches_decides():
    model = make_classifier(
        partial(StiefelSGD, lr=0.1, weight_decay=0.01),
        param_groups=[
            {"match": "blocks.0.*.qkv.weight", "stiefel_lr": 0.5},
            {"match": "*.qkv.weight", "lr": 0.02},
            {"match": ["*.bias", "*norm*"], "weight_decay": 0.0},
        ],
    )
    options = options_by_name(model, "lr", "stiefel_lr", "weight_decay")
    assert set(options) == {name for name, _ in model.model.named_parameters()}
    assert options["blocks.0.attn.qkv.weight"] == (0.1, 0.5, 0.01)
    assert options["blocks.1.attn.qkv.weight"] == (0.02, None, 0.01)
    assert options["blocks.1.attn.proj.bias"] == (0.1, None, 0.0)
    assert options["norm.weight"] == (0.1, None, 0.0)
    assert options["head.weight"] == (0.1, None, 0.01)


def test_layer_decay_scales_the_rate_of_a_group():
    model = make_classifier(layer_decay=0.5, param_groups=[{"match": "*.qkv.weight", "lr": 0.02}])
    options = options_by_name(model, "lr")
    assert options["blocks.2.attn.qkv.weight"] == pytest.approx((0.01,))
    assert options["blocks.2.attn.proj.weight"] == pytest.approx((0.05,))


def test_groups_follow_the_schedule_and_come_from_a_checkpoint(tmp_path):
    model = make_classifier(param_groups=[{"match": "*.qkv.weight", "lr": 0.02}])
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(model, datamodule=digits())
    lrs = sorted(group["lr"] for group in trainer.optimizers[0].param_groups)
    assert lrs == pytest.approx([0.0002, 0.001])
    again = Classifier.load_from_checkpoint(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert options_by_name(again, "lr") == options_by_name(model, "lr")
