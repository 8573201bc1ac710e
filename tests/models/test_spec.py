"""One description of a model: the same from options, from a card, and from files of version 0.1."""

import dataclasses
from functools import partial

import pytest

from ortho_vit.models import ModelSpec, create_model, find_checkpoint
from ortho_vit.optim import StiefelSGD
from ortho_vit.training import Classifier
from tests.helpers.small_run import make_classifier

SPEC = ModelSpec("ortho_vit_digits", "across", "qkv", True, False, 10, {"depth": 1})


def test_options_read_back_as_they_were_written():
    assert ModelSpec.from_options(SPEC.options()) == SPEC
    assert ModelSpec.from_options(SPEC.options() | {"optimizer": {}, "label_smoothing": 0.1}) == SPEC
    assert set(SPEC.options()) == {f.name for f in dataclasses.fields(SPEC)} - {"arguments"} | {
        "model_kwargs"
    }


def test_every_option_of_the_model_is_an_option_of_the_classifier():
    options = make_classifier(projections="qkv", scale=True).hparams
    assert set(SPEC.options()) <= set(options)
    assert (options["projections"], options["scale"], options["preserve"]) == ("qkv", True, False)


def test_options_among_the_arguments_are_taken_out_of_them():
    earlier = {
        "name": "x",
        "constraint": "within",
        "model_kwargs": {"projections": "q", "preserve": True, "depth": 1},
    }
    assert ModelSpec.from_options(earlier) == ModelSpec("x", "within", "q", True, arguments={"depth": 1})
    assert earlier["model_kwargs"] == {"projections": "q", "preserve": True, "depth": 1}


def test_a_classifier_of_version_0_1_is_the_same_as_one_of_today():
    old = make_classifier(model_kwargs={"projections": "qkv", "preserve": True, "depth": 1})
    new = make_classifier(projections="qkv", preserve=True, model_kwargs={"depth": 1})
    assert dict(old.hparams) == dict(new.hparams)
    assert old.model.orthogonal["projections"] == "qkv"
    assert old.model.blocks[0].attn.qkv.core.shape == new.model.blocks[0].attn.qkv.core.shape


def test_what_contradicts_itself_or_is_not_an_argument_is_refused():
    with pytest.raises(ValueError, match=r"projections is 'qkv', but 'q' in model_kwargs; give it once"):
        ModelSpec.from_options({"name": "x", "projections": "qkv", "model_kwargs": {"projections": "q"}})
    with pytest.raises(
        ValueError, match=r"arguments must be the architecture's own, got checkpoint_path, pretrained"
    ):
        ModelSpec("x", arguments={"pretrained": True, "checkpoint_path": "y", "depth": 1})
    with pytest.raises(ValueError, match=r"Classifier: model_kwargs: .* got pretrained"):
        Classifier(
            "ortho_vit_digits", partial(StiefelSGD, lr=0.1), num_classes=10, model_kwargs={"pretrained": True}
        )
    with pytest.raises(ValueError, match=r"x: constraint must be 'within'"):
        ModelSpec("x", "both")


def test_a_card_has_the_description_of_its_model():
    checkpoint = find_checkpoint("ortho_vit_digits.digits_across_stiefel_sgd")
    assert checkpoint.card.spec == ModelSpec("ortho_vit_digits", "across", num_classes=10)


def test_heads_in_groups_and_scales_are_options_of_a_classifier():
    model = make_classifier(constraint=2, scale=True)
    assert {p.blocks for n, p in model.model.named_parameters() if hasattr(p, "blocks")} == {4}
    assert create_model("ortho_vit_digits", constraint=2, scale=True).blocks[0].attn.qkv.core.shape == (4,)
