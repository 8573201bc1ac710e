"""`orthogonalize` on the models of `transformers`, small and random, and the optimizers inside its Trainer."""

import copy

import pytest
import torch
from torch import nn

from ortho_vit import orthogonality_error, stiefel_parameters
from ortho_vit.models import conv1d_to_linear, orthogonalize, release
from ortho_vit.models.orthogonalize import CoredLinear
from ortho_vit.optim import StiefelAdam, StiefelSGD

transformers = pytest.importorskip("transformers")

MANIFOLD = 2e-6  # float32; measured 5e-8, and 4e-7 after training
OUTPUT = 5e-5  # float32, of outputs up to 6; measured 4e-6
SIZES = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = {**SIZES, "image_size": 8, "patch_size": 2}
TEXT = {**SIZES, "vocab_size": 50, "max_position_embeddings": 32}
GROUPED = {**TEXT, "num_key_value_heads": 2}
GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 32}

CONFIGS = {
    "vit": ("ViTConfig", VISION),
    "dinov2": ("Dinov2Config", VISION),
    "dinov3": ("DINOv3ViTConfig", VISION),
    "clip_vision": ("CLIPVisionConfig", VISION),
    "clip_text": ("CLIPTextConfig", TEXT),
    "bert": ("BertConfig", TEXT),
    "gpt2": ("GPT2Config", GPT2),
    "llama": ("LlamaConfig", GROUPED),
    "mistral": ("MistralConfig", GROUPED),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {**GROUPED, "head_dim": 16}),
    "t5": (
        "T5Config",
        {"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 50},
    ),
}
GROUPED_QUERIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3"]
LAYERS = {"t5": 6}  # two of the encoder, and two with two attentions each of the decoder


def configuration(name, **changes):
    kind, options = CONFIGS[name]
    return getattr(transformers, kind)(**{**options, **changes})


def build(name, **changes):
    """A random model, with weights and biases large enough that attention matters."""
    model = transformers.AutoModel.from_config(configuration(name, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return conv1d_to_linear(model)


def output(model):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 50, (2, 16), generator=generator)
    inputs = {"input_ids": tokens}
    if model.main_input_name == "pixel_values":
        inputs = {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        return model(**inputs).last_hidden_state


@pytest.mark.parametrize("name", CONFIGS)
def test_each_head_of_q_and_k_is_orthonormal(name):
    model = orthogonalize(build(name), "within")
    layers, d_k = LAYERS.get(name, 2), getattr(model.config, "head_dim", 12)
    heads = 4 + (2 if name in GROUPED_QUERIES else 4)
    parameters = [parameter for _, parameter in stiefel_parameters(model)]
    assert sum(p.blocks for p in parameters) == layers * heads
    assert {p.matrices().shape[1:] for p in parameters} == {(d_k, 48)}
    assert orthogonality_error(model) < MANIFOLD
    assert output(model).isfinite().all()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("projections", ["qk", "qkv"])
def test_preserve_keeps_the_function_behind_rotations_and_norms_too(name, projections):
    model = build(name)
    expected, other = output(model), orthogonalize(copy.deepcopy(model), "within")
    orthogonalize(model, "within", projections=projections, preserve=True)
    assert orthogonality_error(model) < MANIFOLD
    assert (output(model) - expected).abs().max() < OUTPUT
    assert (output(other) - expected).abs().max() > 5 * OUTPUT
    assert (output(release(model)) - expected).abs().max() < OUTPUT


def test_grouped_queries_have_blocks_by_the_heads_of_each_projection():
    attention = orthogonalize(build("llama"), "within").layers[0].self_attn
    assert attention.q_proj.weight.matrices().shape == (4, 12, 48)
    assert attention.k_proj.weight.matrices().shape == (2, 12, 48)
    attention = orthogonalize(build("llama"), "across").layers[0].self_attn
    assert attention.q_proj.weight.matrices().shape == (1, 48, 48)
    assert attention.k_proj.weight.matrices().shape == (1, 24, 48)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_scale_multiplies_the_logits_behind_a_rotation_too(name):
    model = orthogonalize(build(name), "within", scale=True)
    before = output(model)
    layer = next(module for module in model.modules() if isinstance(module, CoredLinear))
    with torch.no_grad():
        layer.core.mul_(3)
    assert (output(model) - before).abs().max() > 5 * OUTPUT


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_scale_that_a_norm_would_cancel_is_refused(name):
    with pytest.raises(ValueError, match=r"scale=True would have no effect on .*q_proj.weight: .*RMSNorm"):
        orthogonalize(build(name), "within", scale=True)


def test_both_towers_of_clip_are_constrained():
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=32)
    model = orthogonalize(transformers.AutoModel.from_config(config), "within")
    names = [name for name, _ in stiefel_parameters(model)]
    assert len(names) == 8
    assert {name.partition(".")[0] for name in names} == {"text_model", "vision_model"}


class GatedQuery(nn.Module):
    """q and a gate share q_proj, head by head, as in Qwen3-Next."""

    def __init__(self):
        super().__init__()
        self.config, self.head_dim = configuration("llama"), 12
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(48, 96), nn.Linear(48, 24), nn.Linear(48, 24)


def test_a_query_with_more_rows_than_heads_is_refused():
    with pytest.raises(ValueError, match=r"q_proj of GatedQuery has 96 rows for 4 heads of d_k = 12"):
        orthogonalize(GatedQuery(), "within")


@pytest.mark.parametrize("kind", ["Phi3Config", "GPTNeoXConfig"])
def test_fused_layers_of_another_order_are_refused(kind):
    config = getattr(transformers, kind)(**TEXT, pad_token_id=0)
    with pytest.raises(ValueError, match="holds q and k in an order that is not known"):
        orthogonalize(transformers.AutoModel.from_config(config), "within")


# ------------------------------------------------------------------------------------------------------- GPT-2


def gpt2(**changes):
    return transformers.AutoModel.from_config(configuration("gpt2", **changes)).eval()


def test_conv1d_is_refused_with_what_to_do():
    model = gpt2()
    with pytest.raises(
        ValueError, match=r"h.0.attn.c_attn .* Conv1D, .* call .*conv1d_to_linear\(model\) first"
    ):
        orthogonalize(model, "within")
    assert not list(stiefel_parameters(model))


def test_conv1d_to_linear_keeps_function_and_state_dict():
    model, original = gpt2(), gpt2()
    original.load_state_dict(model.state_dict())
    expected, before = output(model), copy.deepcopy(model.state_dict())
    assert conv1d_to_linear(model) is model
    assert isinstance(model.h[0].attn.c_attn, nn.Linear)
    assert torch.allclose(output(model), expected, atol=1e-5)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    orthogonalize(model, "within")
    original.load_state_dict(model.state_dict())  # an unconverted model takes the weights
    assert torch.allclose(output(original), output(model), atol=1e-5)
    other = conv1d_to_linear(gpt2())
    other.load_state_dict(original.state_dict())
    assert torch.equal(other.h[1].attn.c_attn.weight, model.h[1].attn.c_attn.weight)


def test_cross_attention_of_gpt2_keeps_q_apart():
    model = orthogonalize(conv1d_to_linear(gpt2(add_cross_attention=True)), "within")
    crossed = model.h[0].crossattention
    assert crossed.q_attn.weight.matrices().shape == (4, 12, 48)
    assert (crossed.c_attn.weight.blocks, crossed.c_attn.weight.rows) == (4, 48)
    assert model.h[0].attn.c_attn.weight.blocks == 8


# ------------------------------------------------------------------------------------------------- the Trainer


def causal(name):
    return conv1d_to_linear(transformers.AutoModelForCausalLM.from_config(configuration(name)))


def trainer(model, optimizer, folder):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 50, (32, 16), generator=generator)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=12, save_steps=10, per_device_train_batch_size=4, report_to=[],
        use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    examples = [{"input_ids": row, "labels": row} for row in tokens]
    return transformers.Trainer(model, arguments, train_dataset=examples, optimizers=(optimizer, None))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("optimizer", [StiefelSGD, StiefelAdam])
def test_trainer_keeps_the_constraint_and_continues_from_its_checkpoint(name, optimizer, tmp_path):
    pytest.importorskip("accelerate")
    model = orthogonalize(causal(name), "within")
    start = {key: x.detach().clone() for key, x in stiefel_parameters(model)}
    trainer(model, optimizer(model.parameters(), lr=0.01), tmp_path).train()
    assert orthogonality_error(model) < MANIFOLD
    assert all((x - start[key]).abs().max() > 1e-4 for key, x in stiefel_parameters(model))

    other = orthogonalize(causal(name), "within")
    run = trainer(other, optimizer(other.parameters(), lr=0.01), tmp_path)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[key], value, rtol=0, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_saved_weights_load_as_those_of_any_model(name, tmp_path):
    model = orthogonalize(causal(name), "within").eval()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.arange(3, 19)[None]
    assert torch.allclose(loaded(tokens).logits, model(tokens).logits, atol=1e-5)
    orthogonalize(conv1d_to_linear(loaded), "within", init="keep")
    assert orthogonality_error(loaded) < MANIFOLD
