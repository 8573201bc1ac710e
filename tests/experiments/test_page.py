"""docs/experiments.md and the result files beside it."""

import json
import re
from pathlib import Path

from ortho_vit.experiments import eigenvalues

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "experiments.md").read_text(encoding="utf-8")


def test_every_figure_of_the_page_is_there_with_its_numbers() -> None:
    figures = re.findall(r"!\[.*?\]\((experiments/.*?)\)", PAGE)
    assert len(figures) == 11
    for figure in figures:
        path = DOCS / figure
        assert path.stat().st_size > 1000
        saved = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        assert saved["table"]
        assert saved["versions"]["torch"]


def test_every_figure_of_the_commands_is_on_the_page() -> None:
    commands = [f"python -m ortho_vit.experiments.eigenvalues {name}" for name in eigenvalues.FIGURES]
    commands += [
        f"python -m ortho_vit.experiments.transport {name}"
        for name in ("digits", "mnist", "shakespeare", "hypercube")
    ]
    assert [command for command in commands if command not in PAGE] == []
