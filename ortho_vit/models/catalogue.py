"""The page about a folder of checkpoints, from their cards.

python -m ortho_vit.models.catalogue [FOLDER]     writes README.md into it
"""

import sys
from pathlib import Path

from ortho_vit.models.card import Card
from ortho_vit.models.weights import FOLDER, available, find_checkpoint
from ortho_vit.resources import output_folder

HEAD = """\
# Trained weights

`create_model(NAME, pretrained=True)` builds and loads them, `timm.create_model` too once `ortho_vit` is imported.  Each
`.safetensors` file has a card beside it, `.json`, that says how it was trained and what it must answer to eight pictures.

| name | constraint | optimizer | data | test accuracy | max \\|WWᵀ − I\\| | parameters |
| --- | --- | --- | --- | --- | --- | --- |
"""
FOOT = """
One run each; on the digits one test picture is 0.28 %.  Every accuracy is measured by the command on its card:

```bash
{commands}
```

They were trained with the files in `configs/pretrained/`, whose names end as theirs do, and turned into what they are by
`python train.py export`.  This page is written by `python -m ortho_vit.models.catalogue`.
"""


def row(card: Card) -> str:
    optimizer = str(card.optimizer.get("class_path", "")).rpartition(".")[2]
    error = f"{card.orthogonality_error:.1e}" if card.constraint else "–"
    cells = [f"`{card.name}`", card.constraint or "none", optimizer, card.data]
    tested = card.accuracy.get("test/accuracy")
    accuracy = f"{card.accuracy['val/accuracy']:.2%} (validation)" if tested is None else f"{tested:.2%}"
    cells += [accuracy, error, f"{card.parameters:,}"]
    return f"| {' | '.join(cells)} |"


def catalogue(folder: Path = FOLDER) -> str:
    """The page about all checkpoints in a folder."""
    cards = [find_checkpoint(name, folder).card for name in available(folder)]
    commands = "\n".join(card.command for card in cards)
    return HEAD + "\n".join(map(row, cards)) + "\n" + FOOT.format(commands=commands)


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
