"""A compiled model trains as the same model does uncompiled, and is the same to whatever looks into it."""

import copy
import shutil
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from timm.models.vision_transformer import Block

from ortho_vit import create_model, orthogonality_error, stiefel_parameters
from ortho_vit.training.compile import LastBlock, UncompiledStem, compile_model
from ortho_vit.training.images import attention_maps
from tests.helpers.small_run import assert_same_bits, digits, make_classifier, make_trainer


class KeepHalf(L.Callback):
    """Keeps a copy of the last checkpoint from within the first epoch."""

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
    images = torch.rand(2, 1, 8, 8)
    expected = attention_maps(model, images)
    assert expected is not None
    torch.testing.assert_close(attention_maps(compiled[0].model, images), expected)


def test_the_last_block_computes_the_class_token_alone_and_the_same():
    kwargs = {"qkv_bias": True, "qk_norm": True, "init_values": 0.1, "reg_tokens": 2}
    model = create_model("ortho_vit_digits", depth=2, **kwargs)
    images, record = torch.rand(3, 1, 8, 8), {}

    def gradients(forward):
        model.zero_grad()
        logits = forward(images)
        logits.square().sum().backward()
        return [logits.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = gradients(model)
    LastBlock.convert(model.blocks[-1])
    model.norm.register_forward_hook(lambda *call: record.update(shape=call[-1].shape))
    found = gradients(torch.compile(model, dynamic=False, backend="aot_eager"))
    assert record["shape"] == (3, 1, 64)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(model), expected)  # uncompiled
    assert record["shape"] == (3, 7, 64)


@pytest.mark.parametrize("kwargs", [{"global_pool": "avg"}, {"global_pool": "map"}])
def test_a_classifier_that_reads_all_tokens_gets_them(kwargs, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *args, **kwargs: None)
    model = create_model("ortho_vit_digits", depth=1, **kwargs)
    compile_model(model, torch.device("cpu"))
    assert type(model.blocks[-1]) is Block


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by torch, about its own tracing
def test_on_a_cpu_a_convolutional_stem_is_not_compiled(monkeypatch):
    """A backend that only counts sees everything but the convolutions."""
    seen = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    model = create_model("ortho_vit_compact", depth=1).eval()
    images, names = torch.rand(2, 3, 32, 32), list(model.state_dict())
    expected = model(images)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "compile", lambda *args, **kwargs: None)
        compile_model(model, torch.device("cpu"))
    assert type(model.patch_embed) is UncompiledStem
    assert list(model.state_dict()) == names
    torch.testing.assert_close(torch.compile(model, dynamic=False, backend=backend)(images), expected)
    assert any("softmax" in target for target in seen)
    assert not any("conv" in target for target in seen)


def test_without_a_compiler_it_trains_uncompiled_and_says_so(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no C++ compiler\nand much more")

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.warns(UserWarning, match="is not compiled, which costs time only: no C\\+\\+ compiler$"):
        model = fit(tmp_path, compile=True)
    assert model.model._compiled_call_impl is None
