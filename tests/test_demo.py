"""What the demo computes and draws, without Gradio; and its page, where Gradio is installed."""

import asyncio
import gc
import signal
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from ortho_vit import demo
from ortho_vit.cli import entry

WITHIN = "ortho_vit_digits.digits_within_stiefel_sgd"
FREE = "ortho_vit_digits.digits_none_adamw"
COLOUR = "ortho_vit_nano.cifar10_across_stiefel_sgd"
HEADS = {WITHIN: (3, 4, 2), COLOUR: (4, 6, 8)}  # blocks, heads, patches along a side


@pytest.mark.parametrize("name", [WITHIN, COLOUR])
def test_the_classes_of_the_cards_images_are_found(name):
    model, card = demo.loaded(name)
    probabilities = demo.class_probabilities(model, card, card.golden.images()[0])
    assert list(probabilities) == card.classes
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    expected = torch.tensor(card.golden.logits[0]).softmax(-1)
    assert list(probabilities.values()) == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", [WITHIN, COLOUR])
def test_every_head_of_every_block_has_a_map(name):
    model, card = demo.loaded(name)
    maps = demo.attention_maps(model, card, card.golden.images()[0])
    blocks, heads, side = HEADS[name]
    assert [tuple(m.shape) for m in maps] == [(heads, side, side)] * blocks
    total = torch.stack(maps).sum((-2, -1))
    assert ((total > 0) & (total < 1)).all()  # the class token attends to itself, too
    assert all(not hasattr(m, "_forward_pre_hooks") or not m._forward_pre_hooks for m in model.modules())


def test_a_map_is_the_attention_of_the_class_token():
    model, card = demo.loaded(WITHIN)
    pixels = card.golden.images()[0]
    x = (pixels[None] / 255 - card.mean[0]) / card.std[0]
    block = model.blocks[0]
    with torch.no_grad():
        tokens = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
        # (N, heads, d_k)
        q, k, _ = block.attn.qkv(block.norm1(tokens))[0].unflatten(-1, (3, 4, 16)).unbind(1)
        expected = (torch.einsum("hd,nhd->hn", q[0], k) / 4).softmax(-1)[:, 1:]
    found = demo.attention_maps(model, card, pixels)[0].flatten(1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_gram_matrices_are_identities_where_the_rows_are_orthonormal():
    heads = {name: demo.gram_matrices(demo.loaded(name)[0], 0) for name in (WITHIN, FREE)}
    assert list(heads[WITHIN]) == ["W^Q", "W^K"]
    for name, grams in heads.items():
        for gram in grams.values():
            blocks = torch.stack([gram[i : i + 16, i : i + 16] for i in range(0, 64, 16)])
            error = (blocks - torch.eye(16)).abs().max()
            assert error < 1e-4 if name == WITHIN else error > 0.1
            assert gram.diagonal().mean().item() == pytest.approx(1, abs=1e-5)


def test_the_unconstrained_network_is_drawn_beside_a_constrained_one():
    captions = [caption for _, caption in demo.drawn_grams(WITHIN, 0)]
    assert captions == ["W^Q", "W^K", "W^Q, unconstrained", "W^K, unconstrained"]
    assert [caption for _, caption in demo.drawn_grams(FREE, 0)] == ["W^Q", "W^K"]


def test_an_image_of_any_shape_becomes_what_the_model_sees(tmp_path):
    Image.new("RGB", (50, 31), (255, 0, 0)).save(tmp_path / "red.png")
    colour = demo.read_image(tmp_path / "red.png", demo.loaded(COLOUR)[1])
    assert colour.shape == (3, 32, 32)
    assert colour.flatten(1).unique(dim=1).tolist() == [[255], [0], [0]]
    assert demo.read_image(tmp_path / "red.png", demo.loaded(WITHIN)[1]).shape == (1, 8, 8)


def test_a_file_that_is_not_an_image_is_refused_with_a_sentence(tmp_path):
    (tmp_path / "notes.png").write_text("not an image")
    with pytest.raises(ValueError, match=r"cannot read .*notes.png: not an image in a known format"):
        demo.read_image(tmp_path / "notes.png", demo.loaded(WITHIN)[1])


def test_drawings_are_images_in_colour():
    pixels = demo.loaded(WITHIN)[1].golden.images()[0]
    drawn = [*demo.examples(WITHIN), *demo.drawn_heads(WITHIN, pixels, 2), *demo.drawn_grams(WITHIN, 2)]
    assert {(image.shape, image.dtype) for image, _ in drawn} == {((192, 192, 3), np.dtype("uint8"))}
    assert [caption for _, caption in drawn[:3]] == ["0", "7", "5"]
    assert [caption for _, caption in drawn[8:12]] == ["head 1", "head 2", "head 3", "head 4"]
    bright = demo.shown_map(torch.zeros_like(pixels), torch.tensor([[0.0, 0.0], [0.0, 0.5]])).sum(-1)
    assert bright[-1, -1] == bright.max() > bright[0, 0]


def test_without_gradio_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert entry.main(["demo"]) == 1
    assert capsys.readouterr().err == "error: the demo needs gradio: pip install gradio\n"


@pytest.fixture
def gradio():
    """Gradio leaves an event loop open, which is collected while warnings are ignored."""
    yield pytest.importorskip("gradio")
    asyncio.set_event_loop(None)
    gc.collect()


@pytest.mark.filterwarnings("ignore")  # of Gradio's own dependencies
def test_the_page_answers_with_gradio(gradio, tmp_path):
    functions = {f.fn.__name__: f.fn for f in demo.build_app().fns.values()}
    Image.new("L", (9, 9)).save(tmp_path / "black.png")
    shown, _, first, *_ = functions["choose"](WITHIN, None)
    assert len(shown) == 8
    assert first.equal(demo.loaded(WITHIN)[1].golden.images()[0])
    # The uploaded image is kept
    assert functions["choose"](WITHIN, str(tmp_path / "black.png"))[2].sum() == 0
    _, image, probabilities, heads = functions["upload"](WITHIN, str(tmp_path / "black.png"), 1)
    assert (image.shape, len(probabilities), len(heads)) == ((192, 192, 3), 10, 4)
    (tmp_path / "notes.png").write_text("not an image")
    with pytest.raises(gradio.Error, match=r"cannot read notes.png: not an image in a known format"):
        functions["upload"](WITHIN, str(tmp_path / "notes.png"), 1)


def test_ctrl_c_ends_the_demo_with_a_line(monkeypatch, capsys):
    class Interrupted:
        closed = False

        def launch(self, **options):
            assert options["share"] is False
            assert options["server_name"] == "127.0.0.1"
            signal.raise_signal(signal.SIGINT)

        def close(self, **_):
            Interrupted.closed = True

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(demo, "build_app", Interrupted)
    try:
        assert demo.main([]) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    assert Interrupted.closed
    assert capsys.readouterr().err == "\nthe demo has ended\n"


def test_a_port_in_use_is_one_line(monkeypatch, capsys):
    class Busy:
        def launch(self, **_):
            raise OSError("Cannot find empty port")

    monkeypatch.setattr(demo, "build_app", Busy)
    assert demo.main(["--port", "7861"]) == 1
    assert capsys.readouterr().err == "error: cannot listen on 127.0.0.1, port 7861; try another --port\n"
