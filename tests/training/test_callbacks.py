import copy
from functools import partial
from itertools import pairwise

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ortho_vit import create_model, optim, orthogonality_error, stiefel_parameters
from ortho_vit.stiefel import polar
from ortho_vit.training import AttentionImages, Checkpoints, OrthogonalityMonitor, WeightAveraging
from ortho_vit.training.checkpointing import AtomicCheckpointIO
from ortho_vit.training.images import attention_maps, draw_grams, draw_maps, gram_matrix
from ortho_vit.training.reporting import EpochLines, History, LearningRates, describe
from tests.helpers.small_run import digits, make_classifier, make_trainer

# ------------------------------------------------------------------------------------------- orthogonality


class LeaveManifold(L.Callback):
    """Multiplies one weight by a factor after the third step."""

    def __init__(self, factor):
        self.factor = factor

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            with torch.no_grad():
                next(p for _, p in stiefel_parameters(pl_module)).mul_(self.factor)


@pytest.mark.parametrize(("factor", "error"), [(1.01, r"0\.02"), (float("nan"), "nan")])
def test_the_monitor_stops_a_run_that_has_left_the_manifold(tmp_path, factor, error):
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.callbacks = [
        LeaveManifold(factor),
        OrthogonalityMonitor(every_n_steps=1, threshold=1e-4),
        *trainer.callbacks,
    ]
    message = rf"model\.blocks\.0\.attn\.qkv\.weight has left the manifold at step 3: its orthogonality error is {error}"
    with pytest.raises(RuntimeError, match=message):
        trainer.fit(make_classifier(), datamodule=digits())


def test_other_callbacks_read_the_error_of_the_last_measurement(tmp_path):
    seen = []

    class Read(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            seen.append(trainer.callback_metrics["orthogonality"].item())

        def on_train_epoch_end(self, trainer, pl_module):
            error = trainer.callback_metrics["orthogonality"].item()
            assert error == pytest.approx(orthogonality_error(pl_module))
            assert error == seen[-1]  # every step is measured, also the last

    trainer = make_trainer(tmp_path, Read())
    trainer.callbacks[0] = OrthogonalityMonitor(every_n_steps=1)
    trainer.fit(make_classifier(), datamodule=digits())
    assert len(set(seen)) > 1  # not a mean, not the first


def test_without_a_threshold_the_monitor_only_logs(tmp_path):
    model = make_classifier(partial(optim.RegularizedSGD, lr=0.5, momentum=0.9))
    trainer = make_trainer(tmp_path, max_epochs=1, threshold=None)
    trainer.fit(model, datamodule=digits())
    assert trainer.callback_metrics["orthogonality"] > 1e-3


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_the_learning_rate_has_one_name_however_many_groups_there_are(tmp_path, layer_decay):
    logger = TensorBoardLogger(tmp_path, "", "", default_hp_metric=False)
    trainer = make_trainer(tmp_path, LearningRates(), max_epochs=1, logger=logger, log_every_n_steps=2)
    trainer.fit(make_classifier(layer_decay=layer_decay), datamodule=digits())
    events = EventAccumulator(str(tmp_path)).Reload()
    groups = [tag for tag in events.Tags()["scalars"] if tag.startswith("lr/pg")]
    assert len(groups) == (5 if layer_decay < 1 else 0)
    values = {event.step: event.value for event in events.Scalars("lr")}
    assert values == pytest.approx({1: 0.0505, 3: 0.001})  # the cosine's middle and end, in the fastest group


def test_errors_of_each_layer_images_and_learning_rates_are_logged(tmp_path):
    logger = TensorBoardLogger(tmp_path, "", "", default_hp_metric=False)
    callbacks = AttentionImages(every_n_epochs=1), LearningRates()
    trainer = make_trainer(tmp_path, *callbacks, max_epochs=1, logger=logger, log_every_n_steps=1)
    trainer.fit(make_classifier(), datamodule=digits())
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    layer = "model.blocks.1.attn.qkv.weight"
    assert {"orthogonality", f"orthogonality/{layer}"} <= set(events.Tags()["scalars"])
    assert {"val/accuracy", "val/accuracy_top5", "train/loss", "train/loss_step"} <= set(
        events.Tags()["scalars"]
    )
    assert "lr" in events.Tags()["scalars"]  # whatever the optimizer
    assert {"attention/maps", "attention/gram"} <= set(events.Tags()["images"])


# -------------------------------------------------------------------------------------------------- images


def test_attention_maps_are_those_of_the_class_token_in_each_block():
    model = make_classifier().model
    maps = attention_maps(model, torch.rand(3, 1, 8, 8))
    assert maps.shape == (3, len(model.blocks), 2, 2)
    assert ((maps > 0) & (maps < 1)).all()
    assert all(
        block.attn.fused_attn == make_classifier().model.blocks[0].attn.fused_attn for block in model.blocks
    )


def test_attention_maps_need_a_class_token():
    model = make_classifier(model_kwargs={"class_token": False, "global_pool": "avg"}).model
    assert attention_maps(model, torch.rand(1, 1, 8, 8)) is None


def test_maps_are_drawn_with_captions():
    figure = draw_maps(torch.rand(2, 2, 8, 8), torch.rand(2, 3, 2, 2), ["cat", "dog"])
    assert [axis.get_title() for axis in figure.axes[:4]] == ["image", "block 1", "block 2", "block 3"]
    assert [figure.axes[i].get_ylabel() for i in (0, 4)] == ["cat", "dog"]
    many = draw_maps(torch.rand(1, 3, 8, 8), torch.rand(1, 24, 2, 2), ["cat"])
    assert [axis.get_title() for axis in many.axes[1:]][0::11] == ["block 1", "block 24"]
    assert len(many.axes) == 13


def test_the_gram_matrix_has_the_identity_in_each_block():
    _, p = next(stiefel_parameters(make_classifier()))
    gram, rows = gram_matrix(p), p.rows // p.blocks
    for i in range(0, p.rows, rows):
        torch.testing.assert_close(gram[i : i + rows, i : i + rows], torch.eye(rows), atol=1e-5, rtol=0)
    figure = draw_grams({f"model.blocks.{i}.attn.qkv.weight": gram for i in range(6)})
    assert [axis.get_title() for axis in figure.axes[:6]] == [f"blocks.{i}.attn.qkv.weight" for i in range(6)]


# ----------------------------------------------------------------------------------------------- averaging


class ByHand(L.Callback):
    """The average, computed with plain arithmetic."""

    def __init__(self, decay):
        self.decay, self.average = decay, None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        now = copy.deepcopy(pl_module.model)
        if self.average is None:
            self.average = now
            return
        with torch.no_grad():
            for mean, value in zip(self.average.parameters(), now.parameters(), strict=True):
                mean.lerp_(value, 1 - self.decay)
            for _, mean in stiefel_parameters(self.average):
                mean.matrices().copy_(polar(mean.matrices()))


def test_the_average_is_on_the_manifold_when_validated_saved_and_tested(tmp_path):
    errors = []

    class Watch(L.Callback):
        def on_validation_batch_end(self, trainer, pl_module, *args):
            errors.append(orthogonality_error(pl_module.model))

    by_hand = ByHand(0.8)
    model = make_classifier(partial(optim.StiefelSGD, lr=0.3))
    trainer = make_trainer(tmp_path, by_hand, WeightAveraging(decay=0.8), Watch())
    trainer.fit(model, datamodule=digits())
    assert max(errors) < 2e-6
    saved = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    for name, mean in by_hand.average.state_dict().items():
        torch.testing.assert_close(saved["state_dict"][f"model.{name}"], mean, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(model.model.state_dict()[name], mean, atol=1e-5, rtol=1e-4)
    raw = saved["current_model_state"]["model.head.weight"]
    assert not torch.allclose(raw, saved["state_dict"]["model.head.weight"], atol=1e-4)
    trainer.test(model, datamodule=digits(), ckpt_path=str(tmp_path / "checkpoints/last.ckpt"), verbose=False)
    assert torch.equal(model.model.head.weight, saved["state_dict"]["model.head.weight"])


def test_without_a_decay_all_updates_weigh_the_same(tmp_path):
    averaging, seen = WeightAveraging(decay=None, start_step=3), []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            seen.append(pl_module.model.head.weight.detach().clone())

    make_trainer(tmp_path, averaging, Watch(), max_epochs=2).fit(make_classifier(), datamodule=digits())
    average = averaging._average_model.module.model
    torch.testing.assert_close(average.head.weight, torch.stack(seen[3:]).mean(0), atol=1e-6, rtol=1e-5)
    assert orthogonality_error(average) < 2e-6


def test_before_its_first_update_the_average_follows_the_weights(tmp_path):
    averaging, seen = WeightAveraging(decay=0.5, start_step=3), []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            average, weights = averaging._average_model.module.model.head.weight, pl_module.model.head.weight
            seen.append((average.detach().clone(), weights.detach().clone()))

    trainer = make_trainer(tmp_path, averaging, Watch(), max_epochs=2)
    trainer.fit(make_classifier(), datamodule=digits())
    for average, weights in seen[:4]:  # the first update takes them too
        assert torch.equal(average, weights)
    for (before, _), (average, weights) in pairwise(seen[3:]):
        torch.testing.assert_close(average, (before + weights) / 2)


# --------------------------------------------------------------------------------------------- checkpoints


def test_a_save_that_is_interrupted_leaves_the_older_checkpoint_whole(tmp_path, monkeypatch):
    target = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, target)

    def half(checkpoint, file):
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"step": 2}, target)
    assert AtomicCheckpointIO().load_checkpoint(target) == {"step": 1}


def test_best_is_the_epoch_with_the_best_score(tmp_path):
    class Score(L.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            pl_module.log("score", [0.3, 0.9, 0.5][trainer.current_epoch])

    for mode, best in (("max", 1), ("min", 0)):
        folder = tmp_path / mode
        trainer = make_trainer(folder, Score(), max_epochs=3, limit_train_batches=1)
        trainer.callbacks[-1] = Checkpoints(monitor="score", mode=mode)
        trainer.fit(make_classifier(), datamodule=digits())
        assert torch.load(folder / "checkpoints/best.ckpt", weights_only=True)["epoch"] == best
        assert torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["epoch"] == 2


def test_best_is_as_it_was_measured_mid_epoch(tmp_path):
    scores = iter([0.3, 0.9, 0.5, 0.4])

    class Score(L.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            pl_module.log("score", next(scores))

    trainer = make_trainer(tmp_path, Score(), limit_train_batches=4, val_check_interval=1, max_epochs=1)
    trainer.callbacks[-1] = Checkpoints(monitor="score")
    trainer.fit(make_classifier(), datamodule=digits())
    best, last = (torch.load(tmp_path / f"checkpoints/{n}.ckpt", weights_only=True) for n in ("best", "last"))
    assert (best["global_step"], last["global_step"]) == (2, 4)
    assert trainer.callbacks[-1].best_score == pytest.approx(0.9)


def test_a_score_that_nobody_measures_is_named_and_the_epoch_kept(tmp_path):
    trainer = make_trainer(tmp_path, max_epochs=2, limit_train_batches=1)
    trainer.callbacks[-1] = Checkpoints(monitor="val/acuracy")
    with pytest.raises(ValueError, match=r"monitor 'val/acuracy' is not measured; there are .*val/accuracy"):
        trainer.fit(make_classifier(), datamodule=digits())
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["epoch"] == 0


def test_without_validation_there_is_no_best(tmp_path):
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(make_classifier(), datamodule=digits(val_size=0))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]


# ------------------------------------------------------------------------------------------------- what a run says


def test_the_line_of_an_epoch_has_the_rate_of_the_head_and_no_old_score(tmp_path, capsys):
    model = make_classifier(partial(optim.StiefelSGD, lr=0.1), layer_decay=0.5)
    kwargs = {"check_val_every_n_epoch": 2, "limit_train_batches": 1, "max_epochs": 3}
    history = History()
    trainer = make_trainer(tmp_path, history, EpochLines(history), **kwargs)
    trainer.fit(model, datamodule=digits())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert ["val accuracy" in line for line in lines] == [False, True, False]
    assert " lr 0.001 " in lines[-1]  # a hundredth of 0.1, where the schedule ends


def test_blocks_are_counted_by_shape():
    model = create_model("ortho_vit_pico", constraint="within", projections="qk+mlp", num_classes=10)
    line = describe(model, "pico")
    assert line.endswith("orthonormal blocks of 16×96, 4 of 192×96, 4 of 96×192")
    assert " in 48 orthonormal" in line
    assert describe(create_model("ortho_vit_pico", constraint="none"), "pico").endswith(" parameters")
