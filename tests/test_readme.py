"""Every snippet of the README runs: Python is executed, commands are parsed by what they call."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from benchmarks import sharding_model
from ortho_vit import demo, list_models
from ortho_vit.cli.export import parse
from ortho_vit.cli.main import main
from ortho_vit.cli.zoo import Zoo

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TUTORIALS = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("**/*.md")))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text: str) -> list[str]:
    """Every command of the blocks of a page, one per line; a backslash continues a line."""
    scripts = [block.replace("\\\n", " ") for block in blocks(text, "bash")]
    lines = [line.split("#")[0].strip() for script in scripts for line in script.splitlines()]
    return [line for line in lines if line]


COMMANDS = list(dict.fromkeys(commands(README) + commands(TUTORIALS)))


def skip_without_weights(text: str) -> None:
    """Names of weights that are not in checkpoints/ cannot be tried; those of the zoo's table are tested elsewhere."""
    for name in re.findall(r"ortho_vit_\w+\.\w+", text):
        if name not in list_models(pretrained=True):
            pytest.skip(f"{name} is not in checkpoints/")


@pytest.fixture
def images(tmp_path, monkeypatch):
    """A folder `images/<class>/` in the working directory."""
    monkeypatch.chdir(tmp_path)
    for label in ("cat", "dog"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for i in range(8):
            pixels = torch.randint(0, 255, (40, 40, 3), dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(tmp_path / "images" / label / f"{i}.png")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's advice about loggers and workers
@pytest.mark.parametrize(
    "snippet",
    list(dict.fromkeys(blocks(README, "python") + blocks(TUTORIALS, "python"))),
    ids=lambda s: s.splitlines()[0],
)
def test_python_snippets_run(snippet, images):
    skip_without_weights(snippet)
    if "import transformers" in snippet:
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    offline = snippet.replace('_224", pretrained=True', '_224", pretrained=False')  # no network here
    exec(compile(offline, "README.md", "exec"), {})


def test_every_head_of_the_fused_layouts_is_orthonormal():
    (snippet,) = [block for block in blocks(TUTORIALS, "python") if "# Grouped queries" in block]
    torch.manual_seed(0)
    names = {}
    exec(compile(snippet, "plain-pytorch.md", "exec"), names)
    for layout, constrained, free in (("stacked", 8, 4), ("interleaved", 8, 4), ("grouped", 6, 2)):
        heads = names[layout].weight.detach().unflatten(0, (-1, 16))  # queries, keys, values
        errors = (heads @ heads.mT - torch.eye(16)).abs().amax((1, 2))
        assert (len(errors), (errors[:constrained] < 2e-6).all()) == (constrained + free, True)
        assert (errors[constrained:] > 0.1).all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", [c for c in COMMANDS if "train.py" in c])
def test_training_commands_are_understood(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    skip_without_weights(command)
    words = shlex.split(command)
    arguments = words[words.index("train.py") + 1 :]
    if arguments[0] == "export":
        assert parse(arguments[1:]).name == "my_images"
        return
    if arguments[0] in ("models", "info", "verify", "onnx"):
        assert Zoo(arguments).options
        return
    if arguments[0] == "demo":
        with pytest.raises(SystemExit, match="0"):
            demo.main([*arguments[1:], "--help"])
        return
    # The run of a page does not exist: the configuration of the quick start stands for its own.
    text = " ".join(arguments).replace("--ckpt_path RUN", "--config configs/quickstart.yaml")
    arguments = text.replace("--ckpt_path last", "").split()
    with pytest.raises(SystemExit) as stop:
        main([*(["fit"] if arguments[0].startswith("-") else []), *arguments, "--print_config"])
    assert stop.value.code == 0
    assert "ortho_vit" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "text", dict.fromkeys(blocks(TUTORIALS, "yaml")), ids=lambda text: text.splitlines()[1]
)
def test_configurations_are_understood(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (tmp_path / "part.yaml").write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "fit",
                "--config",
                "configs/quickstart.yaml",
                "--config",
                str(tmp_path / "part.yaml"),
                "--print_config",
            ]
        )
    assert stop.value.code == 0
    assert str(yaml.safe_load(text)["model"]["param_groups"][0]["match"]) in capsys.readouterr().out


def test_make_targets_and_links_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)) <= targets
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
    for path in re.findall(r"configs/[\w/]+\.yaml", README):
        assert (ROOT / path).exists(), path


def test_the_table_of_the_zoo_is_true():
    from ortho_vit import create_model

    rows = re.findall(r"^\| `(ortho_vit_\w+)`[^|]*\|.*\| ([\d,]+) \|$", README, re.MULTILINE)
    assert len(rows) == 8
    for name, count in rows:
        with torch.device("meta"):
            model = create_model(name, constraint=None)
        assert sum(p.numel() for p in model.parameters()) == int(count.replace(",", ""))


def test_the_readme_is_short_and_narrow():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 120


def table_after(mark: str, text: str) -> list[list[str]]:
    """The cells of the table between a mark and the end of its block: the header, then the rows."""
    lines = re.findall(rf"<!-- {mark} -->\n(.*?)<!-- end -->", text, re.DOTALL)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells[0], *cells[2:]]


def test_the_contrasts_of_the_readme_are_those_of_table_1():
    header, *rows = table_after("few-cifar10: contrasts", (ROOT / "docs/table1.md").read_text())
    shown = table_after("contrasts", README)
    chosen = [header.index(name) for name in shown[0]]
    assert shown[1:] == [[row[i] for i in chosen] for row in rows]


def test_the_sweep_of_the_page_on_choosing_is_that_of_table_1():
    table = (ROOT / "docs/table1.md").read_text()
    rows = re.findall(
        r"^\| (?:integrator|isometric) \|.*$", (ROOT / "docs/choosing.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 2
    for row in rows:
        assert f"\n{row}\n" in table, row


def test_experiments_have_the_options_they_are_given(monkeypatch, capsys):
    for module, options in re.findall(r"python -m (ortho_vit\.experiments\.\w+)(.*)", "\n".join(COMMANDS)):
        package = hasattr(importlib.import_module(module), "__path__")
        main_module = importlib.import_module(f"{module}.__main__" if package else module)
        with pytest.raises(SystemExit) as stop:
            main_module.main([*shlex.split(options), "--help"])
        assert stop.value.code == 0


def test_the_page_on_sharding_has_the_table_its_script_prints():
    assert sharding_model.table(sharding_model.Machine()) in (ROOT / "docs/sharding.md").read_text()
