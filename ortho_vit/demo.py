"""`ortho-vit demo`: classify an image in the browser, and see where each head looks and how orthogonal its weights are.

    pip install gradio
    ortho-vit demo --port 7860

What is computed is in plain functions of tensors; `build_app` arranges it with Gradio, which only that function imports.
A Hugging Face Space needs one line: `build_app().launch()`.  Nothing is fetched or reported over a network.
"""

import argparse
import os
import signal
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from ortho_vit.data.decode import as_tensor, central_square, decode
from ortho_vit.models import Card, find_checkpoint, list_models, load_checkpoint
from ortho_vit.models.attention import find_attention
from ortho_vit.models.card import golden_logits
from ortho_vit.models.weights import free_counterpart
from ortho_vit.training.images import recorded_attention

__all__ = ["attention_maps", "build_app", "class_probabilities", "gram_matrices", "main", "read_image"]

MISSING = "the demo needs gradio: pip install gradio"
TITLE = "Vision Transformers with orthogonal attention"
SIDE = 192  # pixels of an image on the page
Pixels = NDArray[np.uint8]
Captioned = list[tuple[Pixels, str]]


# ------------------------------------------------------------------------------------------- what is computed


def read_image(path: Path, card: Card) -> Tensor:
    """The image as the model sees it, uint8 (channels, height, width); ValueError says why a file cannot be read."""
    _, channels, height, _ = card.golden.shape
    return as_tensor(central_square(decode(path), height, card.crop_pct), channels)


def class_probabilities(model: nn.Module, card: Card, pixels: Tensor) -> dict[str, float]:
    """The probability of each class for one image, uint8 (channels, height, width)."""
    logits = golden_logits(model, pixels[None], card.mean, card.std)[0]
    return dict(zip(card.classes, logits.softmax(-1).tolist(), strict=True))


def attention_maps(model: nn.Module, card: Card, pixels: Tensor) -> list[Tensor]:
    """For each block, how much each head attends to each patch: (heads, rows, columns), sums of at most 1.

    It is the attention of the class token, or the average over all patches where the model has no class token.
    """
    with recorded_attention(model) as record:
        golden_logits(model, pixels[None], card.mean, card.std)
    prefix = int(getattr(model, "num_prefix_tokens", 0))
    maps = []
    for attention in record:  # (1, heads, queries, keys)
        queries = attention[0, :, :1] if prefix else attention[0]
        looks = queries.mean(1)[:, prefix:]
        side = round(looks.shape[-1] ** 0.5)
        if side * side != looks.shape[-1]:
            raise ValueError(f"attention to {looks.shape[-1]} patches, which are not a square of patches")
        maps.append(looks.unflatten(-1, (side, side)))
    return maps


def gram_matrices(model: nn.Module, block: int) -> dict[str, Tensor]:
    """|W Wᵀ| of W^Q and W^K, all heads of a block together, divided by the mean of its diagonal: 1 if orthonormal."""
    grams = {}
    for projection in find_attention(model)[block].projections:
        for part, W in zip(projection.parts, projection.weight.detach().split(projection.dim), strict=True):
            gram = (W @ W.mT).abs()
            grams[f"W^{part.upper()}"] = gram / gram.diagonal().mean()
    return {name: grams[name] for name in ("W^Q", "W^K")}


@lru_cache(maxsize=8)
def loaded(name: str) -> tuple[nn.Module, Card]:
    checkpoint = find_checkpoint(name)
    return load_checkpoint(checkpoint).eval(), checkpoint.card


# --------------------------------------------------------------------------------------------- what is drawn


def shown_image(pixels: Tensor) -> Pixels:
    """uint8 (channels, height, width) as RGB of SIDE × SIDE pixels."""
    array = pixels.expand(3, -1, -1).permute(1, 2, 0).numpy()
    return np.asarray(
        Image.fromarray(np.ascontiguousarray(array)).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    )


def shown_map(pixels: Tensor, looks: Tensor) -> Pixels:
    """A head's attention (rows, columns) as colours over the image, the brightest where it is largest."""
    heat = F.interpolate(looks[None, None].float() / looks.max().clamp_min(1e-12), (SIDE, SIDE))[0, 0]
    return (0.35 * shown_image(pixels) + 0.65 * _coloured(heat)).astype(np.uint8)


def shown_gram(gram: Tensor) -> Pixels:
    return _coloured(F.interpolate(gram[None, None].float().clamp(max=1), (SIDE, SIDE))[0, 0])


def _coloured(values: Tensor) -> Pixels:
    colours = matplotlib.colormaps["viridis"](values.cpu().numpy())[..., :3]
    return (255 * colours).astype(np.uint8)


def examples(name: str) -> Captioned:
    """The images of the card, with what they show."""
    card = loaded(name)[1]
    labels = [card.classes[label] for label in card.golden.labels] or [""] * card.golden.shape[0]
    return [(shown_image(pixels), label) for pixels, label in zip(card.golden.images(), labels, strict=True)]


def drawn_heads(name: str, pixels: Tensor, block: int) -> Captioned:
    maps = attention_maps(*loaded(name), pixels)[block]
    return [(shown_map(pixels, looks), f"head {head}") for head, looks in enumerate(maps, start=1)]


def drawn_grams(name: str, block: int) -> Captioned:
    """W^Q and W^K of a model, then those of the same network trained without a constraint."""
    model, card = loaded(name)
    pairs = [(shown_gram(gram), part) for part, gram in gram_matrices(model, block).items()]
    free = free_counterpart(card)
    if free and free != name:
        grams = gram_matrices(loaded(free)[0], block)
        pairs += [(shown_gram(gram), f"{part}, unconstrained") for part, gram in grams.items()]
    return pairs


# ------------------------------------------------------------------------------------------------- the page


def build_app() -> Any:
    """The page, as a `gradio.Blocks`; ModuleNotFoundError without Gradio."""
    # Read when Gradio is imported: no network is used
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    import gradio as gr

    names = list_models(pretrained=True)

    def read(name: str, path: str) -> Tensor:
        try:
            return read_image(Path(path), loaded(name)[1])
        except ValueError as error:
            sentence = str(error).replace(f"{Path(path).parent}/", "")
            raise gr.Error(sentence, print_exception=False) from None

    def choose(name: str, path: str | None) -> list[Any]:
        model, card = loaded(name)
        blocks = len(find_attention(model))
        slider = gr.Slider(1, blocks, value=blocks, step=1)
        pixels = read(name, path) if path else card.golden.images()[0]
        return [examples(name), slider, *show(name, pixels, blocks), drawn_grams(name, blocks - 1)]

    def show(name: str, pixels: Tensor, block: int) -> list[Any]:
        probabilities = class_probabilities(*loaded(name), pixels)
        return [pixels, shown_image(pixels), probabilities, drawn_heads(name, pixels, int(block) - 1)]

    def upload(name: str, path: str, block: int) -> list[Any]:
        return show(name, read(name, path), block)

    def pick(name: str, block: int, event: gr.SelectData) -> list[Any]:
        return [None, *show(name, loaded(name)[1].golden.images()[event.index], block)]

    def move(name: str, pixels: Tensor | None, block: int) -> list[Any]:
        heads = [] if pixels is None else drawn_heads(name, pixels, int(block) - 1)
        return [heads, drawn_grams(name, int(block) - 1)]

    gallery: Any = {
        "show_label": False,
        "object_fit": "contain",
        "height": "fit-content",
        "buttons": [],
        "interactive": False,
    }
    with gr.Blocks(title=TITLE, analytics_enabled=False) as app:
        gr.Markdown(f"# {TITLE}")
        pixels = gr.State(None)
        with gr.Row():
            with gr.Column():
                name = gr.Dropdown(names, value=names[0], label="model", elem_id="model")
                file = gr.File(label="your image", type="filepath", height=140, elem_id="file")
                gr.Markdown("or one of these:")
                cards = gr.Gallery(columns=4, allow_preview=False, elem_id="examples", **gallery)
            with gr.Column():
                image = gr.Image(
                    label="what the model sees", interactive=False, height=240, buttons=[], elem_id="image"
                )
                classes = gr.Label(label="classes", num_top_classes=5, show_heading=False, elem_id="classes")
        block = gr.Slider(1, 2, value=1, step=1, label="block", elem_id="block")
        gr.Markdown(
            "Where each head of the block looks: bright patches get most of the attention, of the class token or, in a "
            "model without one, of all patches on average."
        )
        heads = gr.Gallery(columns=6, elem_id="heads", **gallery)
        gr.Markdown(
            "|W Wᵀ| of the block's queries and keys, all heads together: the identity within each block of orthonormal "
            "rows.  Beside it, where there is one, the same network trained without a constraint."
        )
        grams = gr.Gallery(columns=4, elem_id="grams", **gallery)
        seen = [pixels, image, classes, heads]
        chosen = [cards, block, *seen, grams]
        # Attention is recorded with hooks on a shared model
        one: Any = {"concurrency_id": "model", "concurrency_limit": 1, "show_progress": "hidden"}
        app.load(choose, [name, file], chosen, **one)
        name.change(choose, [name, file], chosen, **one)
        file.upload(upload, [name, file, block], seen, **one)
        cards.select(pick, [name, block], [file, *seen], **one)
        block.input(move, [name, pixels, block], [heads, grams], **one)
    return app


def main(arguments: list[str], program: str = "ortho-vit demo") -> int:
    """Serve the page until Ctrl-C; the exit code."""
    parser = argparse.ArgumentParser(program, description="Trained weights in the browser.")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    parser.add_argument("--port", type=int, default=7860, help="port to listen on (default: 7860)")
    options = parser.parse_args(arguments)
    try:
        app = build_app()
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        print(f"error: {MISSING}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app.launch(
            server_name=options.host, server_port=options.port, share=False, quiet=True, footer_links=[],
            prevent_thread_lock=True,
        )  # fmt: skip
        print(f"the demo is at http://{options.host}:{options.port}; Ctrl-C ends it", flush=True)
        threading.Event().wait()
    except OSError:  # Gradio's message names its own options
        where = f"{options.host}, port {options.port}"
        print(f"error: cannot listen on {where}; try another --port", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        app.close(verbose=False)
        print("\nthe demo has ended", file=sys.stderr)
    return 128 + signal.SIGINT
