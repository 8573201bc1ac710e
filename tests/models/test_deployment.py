"""A constrained model goes wherever timm's does: torch.compile, torch.export, ONNX, copies and files."""

import copy
import io
import pickle
import warnings

import pytest
import torch

from ortho_vit import orthogonality_error, stiefel_parameters
from ortho_vit.models import create_model

# Other kernels round otherwise: measured below 1e-6.
LOGITS = 1e-5


def build(options):
    torch.manual_seed(0)
    model = create_model("vit_tiny_patch16_224", constraint="within", **options, **SIZE)
    return model.eval()


SIZE = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))

every = pytest.mark.parametrize(
    "options", [{}, {"preserve": True}, {"scale": True}], ids=["plain", "cores", "scales"]
)


@every
def test_copies_keep_the_constraint(options):
    model = build(options)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(IMAGES), model(IMAGES))
        kinds = [[(n, p.blocks, p.rows) for n, p in stiefel_parameters(m)] for m in (twin, model)]
        assert kinds[0] == kinds[1]
        assert twin.orthogonal == model.orthogonal


@every
def test_a_state_dict_goes_through_a_file(options):
    model, other, file = build(options), build(options), io.BytesIO()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(IMAGES), model(IMAGES))
    assert orthogonality_error(other) < 2e-6


@every
def test_torch_compile_gives_the_same_logits_and_gradients(options):
    model = build(options)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    outputs = [m(IMAGES) for m in (model, compiled)]
    torch.testing.assert_close(outputs[1], outputs[0], atol=LOGITS, rtol=0)
    for output in outputs:
        output.square().sum().backward()
    for p, q in zip(model.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, atol=1e-4, rtol=1e-4)


@every
def test_torch_export_gives_the_same_logits(options):
    model = build(options)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (IMAGES,), dynamic_shapes=({0: batch},))
    images = torch.randn(5, 3, 16, 16)
    torch.testing.assert_close(program.module()(images), model(images), atol=LOGITS, rtol=0)


@every
def test_onnx_gives_the_same_logits(options, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, path = build(options), tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        torch.onnx.export(model, (IMAGES,), path, dynamo=True, input_names=["images"], verbose=False)
    session = onnxruntime.InferenceSession(path)
    (logits,) = session.run(None, {"images": IMAGES.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(IMAGES).detach(), atol=LOGITS, rtol=0)


@every
def test_half_precision_and_autocast_run(options):
    model = build(options)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(IMAGES)
    assert (logits - model(IMAGES)).abs().max() < 0.05
    assert model.to(torch.bfloat16)(IMAGES.bfloat16()).isfinite().all()
    assert len(list(stiefel_parameters(model))) == 2
