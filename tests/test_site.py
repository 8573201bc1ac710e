"""The scripts of the documentation: the link check finds what is broken, generated pages list everything."""

import importlib
import importlib.util
import inspect
import re
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

import ortho_vit.data
import ortho_vit.optim

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "docs" / "scripts"


def script(name: str):
    """A module of docs/scripts, loaded once."""
    if f"docs_{name}" in sys.modules:
        return sys.modules[f"docs_{name}"]
    spec = importlib.util.spec_from_file_location(f"docs_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"docs_{name}"] = module
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


def test_without_a_browser_the_check_fails_with_one_line(site, monkeypatch, capsys):
    (site / "index.html").write_text("")
    monkeypatch.setenv("PATH", str(site))
    check = script("check_site")
    monkeypatch.setattr(check, "SCREENSHOTS", site / "screenshots")
    assert check.main([str(site), "--browser"]) == 1
    assert capsys.readouterr().err == "error: chromium is not installed: apt install chromium\n"


@pytest.fixture(scope="module")
def browser():
    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed")
    with script("browser").Browser() as browser:
        yield browser


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ('<a href="page.html">x</a> <script>console.log("all is well")</script>', None),
        ('<script>console.error("it broke", 7)</script>', "console: it broke 7"),
        ("<script>undefined.x</script>", "console: TypeError: Cannot read properties of undefined"),
        ('<img src="gone.png">', "gone.png: status 404|gone.png is not drawn"),
        ('<img src="page.html">', "page.html is not drawn"),
        ('<script src="http://example.invalid/a.js"></script>', "from a network|ERR_NAME_NOT_RESOLVED"),
        ('<article><p style="width: 3000px">much</p></article>', r'p "much" is wider than the window'),
    ],
)
def test_what_is_wrong_with_a_page_is_found_in_the_browser(browser, site, html, problem):
    (site / "index.html").write_text(f'<link rel="icon" href="data:,">{html}')
    check = script("check_site")
    with check.served(site) as address, browser.open(f"{address}/index.html") as page:
        problems = check.page_problems(page)
        page.screenshot(site / "shot.png")
    with Image.open(site / "shot.png") as image:
        assert image.width >= 1280
    expected = problem.split("|") if problem else []
    assert len(problems) == len(expected)
    for line, part in zip(problems, expected, strict=True):
        assert part in line


def test_a_page_knows_the_window_and_nothing_of_earlier_pages(browser, site):
    (site / "index.html").write_text(
        "<script>dark = matchMedia('(prefers-color-scheme: dark)').matches</script>"
    )
    Window = script("browser").Window
    with script("check_site").served(site) as address:
        for window in (Window("dark", scheme="dark", width=700), Window("light")):
            with browser.open(f"{address}/index.html", window) as page:
                assert page.evaluate("[innerWidth, dark, localStorage.seen ?? null]") == [
                    window.width,
                    window.scheme == "dark",
                    None,
                ]
                page.evaluate("localStorage.seen = 'yes'")


def test_superscripts_are_set_except_in_code():
    html = '<p>W^Qᵀ and <code>W^Q</code> <img alt="W^K"> W^Kx</p><pre>W^V</pre>'
    found = script("hooks").on_page_content(html, page=None, config=None, files=None)
    assert found == html.replace("<p>W^Q", "<p>W<sup>Q</sup>")


def test_short_cells_of_tables_stay_on_one_line():
    html = "<td>61.2 ± 0.6</td><td>a sentence that may be broken</td>"
    found = script("hooks").on_page_content(html, page=None, config=None, files=None)
    assert found == html.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


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
    for heading in (
        "predict",
        "export",
        "models",
        "verify",
        "onnx",
        "demo",
        "python -m ortho_vit.experiments.table1",
    ):
        assert f"## {heading}\n" in page
    assert "--pictures" in page
    for command in ("export", "models", "onnx", "demo"):
        assert f"usage: ortho-vit {command}" in page
    assert "pytest" not in page


def test_every_page_is_in_the_navigation():
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))


def test_the_api_reference_has_every_public_name():
    hooks = script("hooks")
    for source in hooks.MODULES.values():
        name = source.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
        module = importlib.import_module(name)
        entries = re.findall(r"^::: ([\w.]+)\.(\w+)$", hooks.api_page(source), re.MULTILINE)
        assert {public for _, public in entries} >= set(getattr(module, "__all__", []))
        for home, public in entries:
            assert not (hooks.ROOT / home.replace(".", "/") / f"{public}.py").exists(), (
                "a module of the same name hides it"
            )
            assert getattr(importlib.import_module(home), public) is getattr(module, public)
    packages = {path.parent.name for path in (ROOT / "ortho_vit").glob("*/__init__.py")}
    assert packages - {"cli", "experiments"} <= set(hooks.MODULES)
    documented = {name for source in hooks.MODULES.values() for name in hooks.public_names(source)}
    for path in (ROOT / "ortho_vit").glob("[a-z]*.py"):
        if "\n__all__ =" in path.read_text():
            assert set(hooks.public_names(f"ortho_vit/{path.name}")) <= documented, path.name
