"""python -m ortho_vit.models [FOLDER]     writes a page about the weights in a folder, README.md, into that folder.

The default is `checkpoints/` of the clone, or `./checkpoints` without a clone: an installed package is not modified.
"""

import sys
from pathlib import Path

from ortho_vit.models.card import Card
from ortho_vit.models.weights import available, find_checkpoint
from ortho_vit.resources import output_folder

HEAD = """\
# Trained weights

`create_model(NAME, pretrained=True)` builds and loads them, and so does `timm.create_model` once `ortho_vit.models` is
imported.  Each `.safetensors` file has a card beside it, `.json`, that says how it was trained and which logits it must
give for eight images.

| name | constraint | optimizer | data | test accuracy | max \\|WWᵀ − I\\| | parameters |
| --- | --- | --- | --- | --- | --- | --- |
"""
FOOT = """
One run each; on the digits one test image is 0.28 %.  Every accuracy is measured by the command on its card:

```bash
{commands}
```

They were trained with the files in `configs/pretrained/`, whose names end as theirs do, and exported by
`python train.py export`.  This page is written by `python -m ortho_vit.models`.
"""


def catalogue(folder: Path) -> str:
    """The page about all weights in a folder."""
    cards = [find_checkpoint(name, folder).card for name in available(folder)]
    commands = "\n".join(card.command for card in cards)
    return HEAD + "\n".join(map(_row, cards)) + "\n" + FOOT.format(commands=commands)


def _row(card: Card) -> str:
    error = f"{card.orthogonality_error:.1e}" if card.constraint else "–"
    grouped = isinstance(card.constraint, int)
    constraint = f"{card.constraint} heads per block" if grouped else str(card.constraint or "none")
    tested = card.accuracy.get("test/accuracy")
    accuracy = f"{card.accuracy['val/accuracy']:.2%} (validation)" if tested is None else f"{tested:.2%}"
    cells = [f"`{card.name}`", constraint, card.optimizer_name, card.data, accuracy, error]
    return f"| {' | '.join(cells)} | {card.parameters:,} |"


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else output_folder()
    if not available(folder):
        print(f"error: no checkpoints in {folder}", file=sys.stderr)
        return 1
    (folder / "README.md").write_text(catalogue(folder), encoding="utf-8")
    print(folder / "README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
