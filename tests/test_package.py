"""What is installed: the wheel, built from the source distribution, and the versions that its files name."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import ortho_vit
from ortho_vit import resources
from ortho_vit.cli import entry
from ortho_vit.cli.compose import expand, find_config
from ortho_vit.data import CIFAR10
from ortho_vit.models.__main__ import main as write_page
from ortho_vit.models.weights import export_folder
from tests.helpers.cifar_files import place

ROOT = Path(__file__).parent.parent
SOURCES = ("ortho_vit", "configs", "checkpoints", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirement: str) -> str:
    return re.split(r"[\[<>=~!]", requirement)[0].lower()


def release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the sdist as a package index's users would, in a copy of the sources."""
    folder = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        source, target = ROOT / name, folder / "source" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    script = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=folder / "source", capture_output=True, check=True)
    (sdist,) = folder.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--no-index", "-w", folder, sdist], capture_output=True, check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_every_module_configuration_and_weight(wheel):
    assert wheel.name == f"ortho_vit-{ortho_vit.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        (points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "ortho-vit = ortho_vit.cli.entry:main" in archive.read(points).decode()
    tree = [path for pattern in ("ortho_vit/**/*.py", "ortho_vit/py.typed") for path in ROOT.glob(pattern)]
    expected = {str(path.relative_to(ROOT)) for path in tree}
    for pattern in ("configs/**/*.yaml", "checkpoints/*.*"):
        expected |= {f"ortho_vit/{path.relative_to(ROOT)}" for path in ROOT.glob(pattern)}
    assert packed == expected


def test_an_installed_package_finds_its_configurations_and_weights_from_any_folder(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    script = """
import json, ortho_vit
from ortho_vit.cli.compose import config_files, expand
from ortho_vit.resources import output_folder
arguments = ["--config", "paper/cifar10/none_sgd.yaml"]
model = ortho_vit.create_model("ortho_vit_digits.digits_within_stiefel_sgd", pretrained=True)
print(json.dumps({
    "config": str(config_files(arguments)[0]),
    "composed": len(expand(arguments)),
    "error": ortho_vit.orthogonality_error(model),
    "output": str(output_folder()),
}))"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["config"] == str(site / "ortho_vit/configs/paper/cifar10/none_sgd.yaml")
    assert found["composed"] > 2
    assert found["error"] < 1e-5  # measured: 7e-8
    assert found["output"] == "checkpoints"
    assert list(empty.iterdir()) == []


@pytest.mark.slow
def test_table_1_runs_where_the_package_is_installed(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    installed = sorted(site.rglob("*"))
    place(tmp_path / "data", CIFAR10, "binary folder")
    command = [
        sys.executable,
        "-m",
        "ortho_vit.experiments.table1",
        "run",
        "--preset",
        "reduced",
        "--rows",
        "none_sgd",
    ]
    command += ["--seeds", "1", "--", "--trainer.max_epochs", "1", "--model.compile", "false"]
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs/table1/reduced-cifar10/none_sgd/seed0"
    assert json.loads((folder / "result.json").read_text())["status"] == "finished"
    started = json.loads((folder / "run.json").read_text())
    assert started["arguments"][:2] == ["--config", "configs/paper/cifar10/none_sgd.yaml"]
    assert started["commit"] is None
    assert sorted(site.rglob("*")) == installed


def test_nothing_is_written_into_an_installed_package(monkeypatch, tmp_path):
    monkeypatch.delenv("ORTHO_VIT_CHECKPOINTS", raising=False)
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(resources, "PACKAGE", tmp_path)
    assert export_folder() == Path("checkpoints")
    monkeypatch.chdir(tmp_path / "checkpoints")
    assert write_page([]) == 1  # for there are no weights in ./checkpoints
    assert not any((tmp_path / "checkpoints").iterdir())
    monkeypatch.undo()
    assert export_folder() == ROOT / "checkpoints"


def test_a_configuration_of_the_working_directory_goes_before_the_packages(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart.yaml", "configs/quickstart.yaml"):
        assert find_config(name) == ROOT / "configs/quickstart.yaml"
    Path("quickstart.yaml").write_text("base: [parts/sgd.yaml]\nseed_everything: 3\n")
    assert find_config("quickstart.yaml") == Path("quickstart.yaml")
    own = [text for text in expand(["--config", "quickstart.yaml"]) if text != "--config"]
    assert [yaml.safe_load(text) for text in own] == [
        yaml.safe_load((ROOT / "configs/parts/sgd.yaml").read_text()),
        {"seed_everything": 3},
    ]


@pytest.mark.parametrize(
    ("script", "typed"), [("bin/ortho-vit", "ortho-vit"), ("train.py", "python train.py")]
)
def test_help_names_the_command_that_was_typed(script, typed, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    assert entry.main() == 0
    assert f"Start with   {typed} --config quickstart.yaml" in capsys.readouterr().out


def test_pins_are_within_the_declared_bounds():
    pins = dict(
        line.split("==") for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line
    )
    pins = {names(name): version for name, version in pins.items()}
    for requirement in PROJECT["dependencies"]:
        assert release(pins[names(requirement)]) >= release(requirement.partition(">=")[2]), requirement


def test_the_hooks_run_the_pinned_ruff():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (ruff,) = (repo for repo in hooks["repos"] if repo["repo"].endswith("/ruff-pre-commit"))
    assert (
        f"ruff=={ruff['rev'].removeprefix('v')}" in (ROOT / "requirements-dev.txt").read_text().splitlines()
    )


def test_continuous_integration_runs_make_check():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = [step.get("run") for job in workflow["jobs"].values() for step in job["steps"]]
    assert "make check" in steps
    assert "make check" in (ROOT / ".ci/run").read_text()


def test_the_citation_names_this_version_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == ortho_vit.__version__
    assert citation["license"] == PROJECT["license"]
    (paper,) = citation["references"]
    assert [author["family-names"] for author in paper["authors"]] == ["Kong", "Wang", "Tao"]


def test_targets_that_the_pages_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets >= {"quickstart", "test", "lint", "check", "check-lowest", "bench", "wheel", "clean"}
    assert set(re.findall(r"`make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text())) <= targets
