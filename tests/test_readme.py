"""Every snippet of the README runs: Python is executed, commands are parsed by what they call."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image

from ortho_vit.training.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [
    line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines() if line.strip()
]


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """A folder `pictures/<class>/` in the working directory."""
    monkeypatch.chdir(tmp_path)
    for label in ("cat", "dog"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for i in range(8):
            pixels = torch.randint(0, 255, (40, 40, 3), dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(tmp_path / "pictures" / label / f"{i}.png")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's advice about loggers and workers
@pytest.mark.parametrize("snippet", blocks("python"), ids=lambda s: s.splitlines()[0])
def test_python_snippets_run(snippet, pictures):
    exec(
        compile(snippet.replace("pretrained=True", "pretrained=False"), "README.md", "exec"), {}
    )  # no network here


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", [c for c in COMMANDS if "train.py" in c])
def test_training_commands_are_understood(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    arguments = [w for w in words[words.index("train.py") + 1 :] if w not in ("--ckpt_path", "last")]
    with pytest.raises(SystemExit) as stop:
        main(["fit", *arguments, "--print_config"])
    assert stop.value.code == 0
    assert "ortho_vit" in capsys.readouterr().out


def test_make_targets_and_links_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z]+)", README)) <= targets
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
    for path in re.findall(r"configs/[\w/]+\.yaml", README):
        assert (ROOT / path).exists(), path


def test_the_table_of_the_zoo_is_true():
    from ortho_vit import create_model

    rows = re.findall(r"^\| `(ortho_vit_\w+)` \|.*\| ([\d,]+) \|$", README, re.MULTILINE)
    assert len(rows) == 7
    for name, count in rows:
        with torch.device("meta"):
            model = create_model(name, constraint=None)
        assert sum(p.numel() for p in model.parameters()) == int(count.replace(",", ""))
