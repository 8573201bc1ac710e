"""MkDocs hook: pages that are generated when the site is built, and links that leave docs/.

Generated pages cannot be out of date: the API reference lists `__all__` of each public module, the pages on the command
line and on configurations are written from the parsers, and changelog, contributing guide and list of weights are the
files of the repository.
"""

import ast
import importlib
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]

MODULES = {
    "ortho_vit": "ortho_vit/__init__.py",
    "optim": "ortho_vit/optim/__init__.py",
    "stiefel": "ortho_vit/stiefel.py",
    "models": "ortho_vit/models/__init__.py",
    "data": "ortho_vit/data/__init__.py",
    "training": "ortho_vit/training/__init__.py",
    "transport": "ortho_vit/transport/__init__.py",
    "errors": "ortho_vit/errors.py",
    "demo": "ortho_vit/demo.py",
}
COPIED = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "weights.md": "checkpoints/README.md",
}
# Their methods are those that torch and Lightning call
WITHOUT_MEMBERS = ("ortho_vit.optim", "ortho_vit.data", "ortho_vit.training")
TAGS_AND_CODE = re.compile(r"(<pre.*?</pre>|<code.*?</code>|<[^>]*>)", re.DOTALL)
SHORT_CELL = re.compile(r"(?<=<td>)[^<]{1,16}(?=</td>)")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add every generated page."""
    # Not at the top of this file: MkDocs restores sys.path after loading a hook
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    import reference

    pages = {f"reference/{page}.md": api_page(source) for page, source in MODULES.items()}
    pages |= {
        "reference/command-line.md": reference.command_line(),
        "reference/configuration.md": reference.configuration(),
    }
    pages |= {page: (ROOT / source).read_text(encoding="utf-8") for page, source in COPIED.items()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name a file outside docs/ instead of linking to it; the site does not contain it."""
    source = COPIED.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    folder = (ROOT / source).parent

    def replace(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        path = (folder / target).resolve()
        if not path.exists():
            if page.file.src_uri in COPIED:
                raise PluginError(f"{source} links to {target}, which does not exist")
            return match[0]  # perhaps a generated page: MkDocs checks it
        docs = ROOT / "docs"
        if path.is_relative_to(docs) and path.is_file():
            if page.file.src_uri not in COPIED:
                return match[0]
            return f"{image}[{text}]({path.relative_to(docs).as_posix()}{anchor or ''})"
        name = path.relative_to(ROOT).as_posix()
        return text if text.strip("`") in (name, target) else f"{text} (`{name}`)"

    return LINK.sub(replace, markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Set W^Q as W with a superscript, except in code, and keep short cells of tables, such as 61.2 ± 0.6, on one line."""
    html = SHORT_CELL.sub(lambda cell: cell[0].replace(" ", "\N{NO-BREAK SPACE}"), html)
    parts = TAGS_AND_CODE.split(html)
    parts[::2] = [re.sub(r"\bW\^([QKVO])(?=ᵀ|\b)", r"W<sup>\1</sup>", text) for text in parts[::2]]
    return "".join(parts)


def public_names(source: str) -> list[str]:
    """`__all__` of a module; without one, its public classes and functions."""
    body = ast.parse((ROOT / source).read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    defined = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [name for name in defined if not name.startswith("_")]


def documented_path(module: str, name: str) -> str:
    """Where mkdocstrings finds a public name: its definition, where a module of the same name would be taken for it."""
    home = getattr(importlib.import_module(module), name).__module__
    return f"{home}.{name}" if home.endswith(f".{name}") else f"{module}.{name}"


def api_page(source: str) -> str:
    """The reference of one module: its docstring's first paragraph, and every public name."""
    module = source.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
    docstring = ast.get_docstring(ast.parse((ROOT / source).read_text(encoding="utf-8"))) or ""
    options = "\n    options: {members: false}" if module in WITHOUT_MEMBERS else ""
    names = sorted(public_names(source), key=str.lower)
    entries = "\n\n".join(f"::: {documented_path(module, name)}{options}" for name in names)
    return f"# {module}\n\n{docstring.split(chr(10) * 2)[0]}\n\n{entries}\n"
