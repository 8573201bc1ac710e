"""The README.md of trained weights on the Hugging Face hub: a YAML header that the hub reads, and a page for people."""

import re
from typing import Any

import yaml

from ortho_vit.models.card import Card

__all__ = ["hub_readme"]

DATASETS = {"CIFAR10": "uoft-cs/cifar10", "CIFAR100": "uoft-cs/cifar100"}  # their names on the hub
LICENCE = re.compile("[a-z0-9.-]+")  # an identifier, as the hub lists them: mit, cc-by-4.0, unknown
PAGE = """\
---
{header}---

# {name}

A Vision Transformer for image classification, {attention}.
The weights were trained with {optimizer} on {data}.

| | |
| --- | --- |
{rows}

## Usage

```python
{usage}
```

The classes, in the order of the logits, are `label_names` in config.json.
"""
USAGE = """\
import timm
from PIL import Image

model = timm.create_model("hf-hub:USER/NAME", pretrained=True).eval()  # or local-dir:FOLDER
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
image = Image.open("image.png").convert("{mode}")
probabilities = model(transform(image)[None]).softmax(-1)"""


def hub_readme(card: Card) -> str:
    """The text of README.md for a card."""
    header = yaml.safe_dump(_header(card), sort_keys=False, allow_unicode=True)
    rows = {
        **{_in_words(key): f"{value:.2%}" for key, value in card.accuracy.items()},
        "parameters": f"{card.parameters:,}",
        "images": "{1} channels, {2} × {3} pixels".format(*card.golden.shape),
        "licence": card.licence,
    }
    if card.constraint:
        rows["max \\|WWᵀ − I\\|"] = f"{card.orthogonality_error:.1e}"
    usage = USAGE.format(mode="L" if card.golden.shape[1] == 1 else "RGB")
    if card.architecture == "ortho_vit_compact":
        usage = f"import ortho_vit.models  # timm does not have this architecture\n{usage}"
    return PAGE.format(
        header=header,
        name=card.name,
        attention=_attention(card),
        optimizer=card.optimizer_name or "an optimizer",
        data=card.data,
        rows="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
        usage=usage,
    )


def _header(card: Card) -> dict[str, Any]:
    """The hub's metadata: https://huggingface.co/docs/hub/model-cards."""
    dataset = DATASETS.get(card.data, card.data.lower())
    metrics = [
        {"type": "accuracy", "name": _in_words(key), "value": round(value, 6)}
        for key, value in card.accuracy.items()
    ]
    task = {"task": {"type": "image-classification"}}
    result = task | {"dataset": {"name": card.data, "type": dataset}, "metrics": metrics}
    licence = card.licence.lower()
    listed = LICENCE.fullmatch(licence)
    return {
        **({"license": licence} if listed else {"license": "other", "license_name": card.licence}),
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "timm", "vision-transformer", "orthogonal-attention"],
        "datasets": [dataset],
        "metrics": ["accuracy"],
        "model-index": [{"name": card.name, "results": [result]}],
    }


def _attention(card: Card) -> str:
    if card.constraint is None:
        return "with unconstrained attention"
    which = {"within": "within each head", "across": "across all heads of a projection"}
    how = which.get(str(card.constraint), f"in blocks of {card.constraint} heads")
    paper = "[Kong, Wang and Tao (2022)](https://arxiv.org/abs/2205.14173)"
    return f"whose attention projections ({card.projections}) are orthonormal {how}, as in {paper}"


def _in_words(key: str) -> str:
    """The name of a metric as text: "test accuracy (top 5)" for "test/accuracy_top5"."""
    return key.replace("/", " ").replace("_top5", " (top 5)").replace("_", " ")
