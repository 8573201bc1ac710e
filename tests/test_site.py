"""The scripts of the documentation: the link check finds what is broken, generated pages list everything."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import ortho_vit.data
import ortho_vit.optim

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "docs" / "scripts"


def script(name: str):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def site(tmp_path):
    (tmp_path / "page.html").write_text('<h2 id="there">x</h2>')
    return tmp_path


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ('<a href="page.html#there">x</a> <a href="#here">x</a> <p id="here">', None),
        ('<a href="https://example.org">elsewhere</a>', None),
        ('<a href="gone.html">x</a>', "gone.html does not exist"),
        ('<a href="page.html#gone">x</a>', "page.html#gone has no such anchor"),
        ('<img src="gone.png">', "gone.png does not exist"),
        ('<script src="https://example.org/a.js"></script>', "from a network"),
        ('<link rel="stylesheet" href="//example.org/a.css">', "from a network"),
    ],
)
def test_broken_links_and_files_from_a_network_are_found(site, html, problem):
    (site / "index.html").write_text(html)
    problems = script("check_site").check_links(site)
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


@pytest.mark.parametrize(
    ("line", "draws", "count"),
    [
        ("nothing of note", True, 0),
        ("[1:2:ERROR:CONSOLE(1)] Uncaught TypeError: x", True, 1),
        ("nothing of note", False, 1),
    ],
)
def test_errors_on_a_console_and_missing_screenshots_are_found(tmp_path, line, draws, count):
    """With a stand-in for the browser."""
    browser = tmp_path / "chromium"
    draw = (
        'for a in "$@"; do case $a in --screenshot=*) touch "${a#--screenshot=}";; esac; done'
        if draws
        else ""
    )
    browser.write_text(f"#!/bin/sh\necho '{line}' >&2\n{draw}\n")
    browser.chmod(0o755)
    errors = script("check_site").screenshot(str(browser), tmp_path / "a.html", tmp_path / "a.png", "dark")
    assert len(errors) == count


def test_the_configuration_page_has_every_option_of_every_data_module_and_optimizer():
    page = script("reference").configuration()
    for module in (ortho_vit.data, ortho_vit.optim):
        for name in module.__all__:
            cls = getattr(module, name)
            if cls.__name__ != name:  # an old name
                continue
            section = re.search(rf"### {module.__name__}\.{name}\n(.*?)(?=\n##|\Z)", page, re.DOTALL)[1]
            for argument, parameter in inspect.signature(cls).parameters.items():
                if argument != "params" and parameter.kind is not parameter.VAR_KEYWORD:
                    assert f".{argument}`" in section, (name, argument)


def test_the_command_line_page_has_the_commands_and_no_program_of_the_builder():
    page = script("reference").command_line()
    for heading in ("predict", "export", "python -m ortho_vit.experiments.table1"):
        assert f"## {heading}\n" in page
    assert "--pictures" in page
    assert "usage: ortho-vit export" in page
    assert "pytest" not in page


def test_every_page_is_in_the_navigation():
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))


def test_the_api_reference_has_every_public_name():
    hooks = script("hooks")
    for source in hooks.MODULES.values():
        name = source.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
        module = importlib.import_module(name)
        page = hooks.api_page(source)
        for public in getattr(module, "__all__", []):
            assert f"::: {name}.{public}\n" in page
    packages = {path.parent.name for path in (ROOT / "ortho_vit").glob("*/__init__.py")}
    assert packages - {"cli", "experiments"} <= set(hooks.MODULES)
