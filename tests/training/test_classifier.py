import copy
from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

from ortho_vit import orthogonality_error, stiefel_parameters
from ortho_vit.data import CIFAR100
from ortho_vit.optim import StiefelAdam, StiefelSGD
from ortho_vit.training import Classifier
from tests.helpers.small_run import digits, make_classifier, make_trainer


def test_training_reduces_the_loss_and_stays_on_the_manifold(tmp_path):
    model, trainer = make_classifier(partial(StiefelAdam, lr=3e-3)), make_trainer(tmp_path, max_epochs=4)
    trainer.fit(model, datamodule=digits(limit=512))
    history = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["callbacks"]["History"][
        "rows"
    ]
    assert history[-1]["train/loss"] < history[0]["train/loss"]
    assert orthogonality_error(model.model) < 2e-6


def test_an_optimizer_that_would_ignore_the_constraint_is_refused():
    with pytest.raises(
        ValueError, match=r"AdamW would ignore the constraint; use an optimizer of ortho_vit\.optim"
    ):
        make_classifier(partial(torch.optim.AdamW, lr=1e-3))


def test_a_class_that_is_not_an_optimizer_is_not_called(tmp_path):
    described = {"class_path": "subprocess.Popen", "init_args": {"args": ["mkdir", str(tmp_path / "ran")]}}
    with pytest.raises(ValueError, match=r"subprocess\.Popen is not an optimizer"):
        make_classifier(described)
    assert not (tmp_path / "ran").exists()


def test_any_torch_optimizer_trains_without_a_constraint(tmp_path):
    model = make_classifier(partial(torch.optim.AdamW, lr=1e-3), constraint=None)
    assert not list(stiefel_parameters(model))
    make_trainer(tmp_path, max_epochs=1, limit_train_batches=2).fit(model, datamodule=digits())


def test_a_frozen_constraint_may_go_with_any_optimizer():
    model = make_classifier(partial(torch.optim.AdamW, lr=1e-3), freeze=["blocks.*"])
    assert all(not p.requires_grad for _, p in stiefel_parameters(model))
    names = [name for group in model.make_optimizer().param_groups for name in group["param_names"]]
    assert names
    assert not any(name.startswith("blocks.") for name in names)


def test_the_optimizer_that_was_checked_is_the_one_that_trains(tmp_path):
    model, copied = make_classifier(), copy.deepcopy(make_classifier())
    (checked, _), trainer = model._prepared, make_trainer(tmp_path, max_epochs=1, limit_train_batches=1)
    trainer.fit(model, datamodule=digits())
    assert trainer.optimizers[0] is checked
    assert model._prepared is copied._prepared is None
    assert model.configure_optimizers()["optimizer"] is not checked  # it belongs to the first fit


def test_an_optimizer_is_rebuilt_where_other_parameters_are_trained_or_it_has_a_state(tmp_path):
    later, adagrad = make_classifier(), make_classifier(partial(torch.optim.Adagrad, lr=0.1), constraint=None)
    later.model.pos_embed.requires_grad_(False)
    for model in (later, adagrad):
        checked, _ = model._prepared
        trainer = make_trainer(tmp_path / type(checked).__name__, max_epochs=1, limit_train_batches=1)
        trainer.fit(model, datamodule=digits())
        assert trainer.optimizers[0] is not checked
    held = [p for group in later.make_optimizer().param_groups for p in group["params"]]
    assert not any(p is later.model.pos_embed for p in held)


def test_a_constraint_without_anything_constrained_is_an_error(monkeypatch):
    monkeypatch.setattr("ortho_vit.training.classifier.stiefel_parameters", lambda model: iter(()))
    with pytest.raises(ValueError, match="no parameter of 'ortho_vit_digits' is constrained"):
        make_classifier()


def test_a_negative_learning_rate_is_known_before_training():
    with pytest.raises(ValueError, match="lr must be finite and >= 0, got -1"):
        make_classifier(partial(StiefelSGD, lr=-1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 1}, "num_classes must be at least 2, got 1"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\), got 1.0"),
        ({"warmup_epochs": -1}, "warmup_epochs must be at least 0, got -1"),
        ({"layer_decay": 0.0}, r"layer_decay must be in \(0, 1\], got 0.0"),
        ({"freeze": ["nothing.*"]}, r"no parameter is called 'nothing\.\*'"),
        ({"freeze": ["*"]}, "leaves nothing to train"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_classifier(**arguments)


def test_the_number_of_classes_must_be_that_of_the_data(tmp_path):
    with pytest.raises(
        ValueError, match=r"num_classes is 7, but Digits has 10 classes; set model\.num_classes to 10"
    ):
        make_trainer(tmp_path).fit(make_classifier(num_classes=7), datamodule=digits())
    assert CIFAR100.classes  # any data module that says how many it has is asked


def test_the_learning_rate_follows_the_schedule_and_stiefel_lr_with_it(tmp_path):
    seen = []

    class Record(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            seen.append(optimizer.param_groups[0]["lr"])

    model = make_classifier(partial(StiefelSGD, lr=0.2, stiefel_lr=0.4), warmup_epochs=1)
    make_trainer(tmp_path, Record(), max_epochs=3, accumulate_grad_batches=2).fit(model, datamodule=digits())
    assert len(seen) == 6  # 4 batches per epoch, 2 per step
    assert seen[:2] == pytest.approx([0.1, 0.2])
    assert seen[-1] == pytest.approx(0.002)


def test_an_endless_run_has_no_schedule(tmp_path):
    with pytest.raises(ValueError, match=r"set trainer\.max_epochs or trainer\.max_steps"):
        make_trainer(tmp_path, max_epochs=-1).fit(make_classifier(), datamodule=digits())


def test_a_process_that_has_no_images_left_adds_nothing_to_the_score(tmp_path):
    torch.manual_seed(0)
    batch = torch.rand(5, 1, 8, 8), torch.arange(5)
    none = batch[0][:0], batch[1][:0]
    model, trainer = make_classifier(), make_trainer(tmp_path)
    alone, both = (
        trainer.validate(model, DataLoader(batches, batch_size=None), verbose=False)[0]
        for batches in ([batch], [batch, none])
    )
    assert both == pytest.approx(alone)


def test_layer_decay_slows_what_is_further_from_the_head():
    model = make_classifier(layer_decay=0.5)
    optimizer = model.make_optimizer()
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert rates["head.weight"] == pytest.approx(0.1)
    assert rates["blocks.2.attn.qkv.weight"] == pytest.approx(0.05)
    assert rates["blocks.0.attn.qkv.weight"] == pytest.approx(0.0125)
    assert rates["patch_embed.proj.weight"] == pytest.approx(0.00625)


def test_layer_decay_knows_the_layers_of_networks_without_blocks():
    options = {"constraint": None, "num_classes": 3, "layer_decay": 0.5}
    model = Classifier("resnet10t", partial(torch.optim.SGD, lr=1.0), **options)
    groups = model.make_optimizer().param_groups
    rates = {name: group["lr"] for group in groups for name in group["param_names"]}
    assert rates["fc.weight"] == 1
    assert rates["layer4.0.conv1.weight"] == 0.5
    assert rates["conv1.0.weight"] < rates["layer2.0.conv1.weight"] < 0.5


def test_hyper_parameters_are_plain_and_restore_the_model(tmp_path):
    model, trainer = make_classifier(), make_trainer(tmp_path, max_epochs=1)
    trainer.fit(model, datamodule=digits())
    path = tmp_path / "checkpoints/last.ckpt"
    stored = torch.load(path, weights_only=True)["hyper_parameters"]
    assert stored["optimizer"]["class_path"].endswith("StiefelSGD")
    assert stored["optimizer"]["init_args"] == {"lr": 0.1, "momentum": 0.9}
    again = Classifier.load_from_checkpoint(path, weights_only=True)
    for ours, theirs in zip(model.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_strategy_that_shards_parameters_is_refused():
    model = make_classifier()
    strategy = ModelParallelStrategy()
    strategy.parallel_devices = [torch.device("cpu")]
    model.trainer = SimpleNamespace(precision_plugin=None, precision="32-true", strategy=strategy)
    message = (
        r"ModelParallelStrategy cuts parameters apart, orthonormal blocks too; use trainer\.strategy=ddp"
    )
    with pytest.raises(ValueError, match=message):
        model.setup("fit")
    free = make_classifier(partial(torch.optim.SGD, lr=0.1), constraint=None)
    free.trainer = model.trainer
    free.setup("fit")
