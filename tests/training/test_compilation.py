"""A compiled model trains as the same model does uncompiled, and is the same to whatever looks into it."""

import ortho_vit  # noqa: F401  (before anything imports torchvision)

# isort: split
import copy
import shutil
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from small_run import assert_same_bits, digits, make_classifier, make_trainer

from ortho_vit import orthogonality_error, stiefel_parameters
from ortho_vit.training.images import attention_images


class KeepHalf(L.Callback):
    """Keeps a copy of the last checkpoint from amid the first epoch."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            folder = Path(trainer.default_root_dir)
            shutil.copy(folder / "checkpoints/last.ckpt", folder / "half.ckpt")


def fit(folder, *callbacks, ckpt_path=None, **kwargs):
    model = make_classifier(model_kwargs={"depth": 1}, **kwargs)
    trainer = make_trainer(folder, *callbacks, every_n_steps=1)
    trainer.fit(model, datamodule=digits(), ckpt_path=ckpt_path)
    return model


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A run of a compiled model, and its folder."""
    folder = tmp_path_factory.mktemp("compiled")
    with warnings.catch_warnings(record=True, action="always") as warned:
        model = fit(folder, KeepHalf(), compile=True)
    for warning in warned:
        if "is not compiled" in str(warning.message):
            pytest.skip(str(warning.message))
    return model, folder


def test_a_compiled_model_trains_as_the_same_model_does_uncompiled(compiled, tmp_path):
    model, plain = compiled[0].model, fit(tmp_path).model
    assert model._compiled_call_impl is not None
    assert plain._compiled_call_impl is None
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-3, atol=1e-4, msg=name)
    assert max(orthogonality_error(p) for _, p in stiefel_parameters(model)) < 1e-6


def test_its_run_resumes_with_the_same_bits(compiled, tmp_path):
    whole, folder = compiled
    resumed = fit(tmp_path, ckpt_path=folder / "half.ckpt", compile=True)
    assert_same_bits(resumed.state_dict(), whole.state_dict())


def test_what_looks_into_it_sees_its_attention(compiled):
    model = copy.deepcopy(compiled[0].model)
    pictures = torch.rand(2, 1, 8, 8)
    expected = attention_images(model, pictures)
    assert expected is not None
    torch.testing.assert_close(attention_images(compiled[0].model, pictures), expected)


def test_without_a_compiler_it_trains_uncompiled_and_says_so(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no C++ compiler\nand much more")

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.warns(UserWarning, match="is not compiled, which costs time only: no C\\+\\+ compiler$"):
        model = fit(tmp_path, compile=True)
    assert model.model._compiled_call_impl is None
