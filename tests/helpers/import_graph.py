"""Which part of the package imports which, read from the source without running it.

    python -m tests.helpers.import_graph            print the graph
    python -m tests.helpers.import_graph --write    and put it into CONTRIBUTING.md

A part is a module or a package directly below `ortho_vit`.  Imports inside functions and under TYPE_CHECKING count too.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "ortho_vit"
PAGE = ROOT / "CONTRIBUTING.md"
BLOCK = re.compile(r"(<!-- import graph -->\n```\n).*?(```)", re.DOTALL)

# Each part may import those to the right of it, and no others; a private module imports none.
ALLOWED = {
    "errors": "",
    "files": "errors",
    "resources": "",
    "pixels": "",
    "stiefel": "",
    "parameter": "errors stiefel",
    "optim": "errors parameter stiefel",
    "transport": "errors optim parameter stiefel",
    "models": "errors files parameter pixels resources stiefel",
    "data": "errors files pixels resources",
    "training": "data errors files models optim parameter pixels resources stiefel",
    "demo": "data models training",
    "cli": "data demo errors files models optim parameter pixels resources stiefel training",
    "experiments": "cli data errors files models optim parameter pixels resources stiefel training transport",
}
# Packages that only these parts may import.
CONFINED = {"lightning": "data training cli experiments", "einops": "models"}


def imports(path: Path) -> Iterator[str]:
    """The full name of everything that a file imports: modules, and names that may be modules."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path}, line {node.lineno}: imports in the package are absolute")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private_names(path: Path) -> set[str]:
    """The private names of other libraries that a file uses: `x._name`, and imports of such modules or names."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    used: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith(PACKAGE):
            used |= {*str(node.module).split("."), *(alias.name for alias in node.names)}
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    documented = {"_exit", "_replace"}
    return {name for name in used - own - documented if re.match("_[a-z]", name)}


def files_of_parts() -> dict[str, list[Path]]:
    """The source files of each part.  `ortho_vit/__init__.py` is left out: it imports the others only when asked."""
    parts: dict[str, list[Path]] = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        part = path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")
        if part != "__init__":
            parts.setdefault(part, []).append(path)
    return parts


def arrows() -> dict[str, dict[str, set[Path]]]:
    """For each part, the other parts it imports, and the files that do so."""
    parts = files_of_parts()
    found: dict[str, dict[str, set[Path]]] = {part: {} for part in parts}
    for part, files in parts.items():
        for path in files:
            for name in imports(path):
                package, _, rest = name.partition(".")
                target = rest.partition(".")[0]
                if package == PACKAGE and target in parts and target != part:
                    found[part].setdefault(target, set()).add(path.relative_to(ROOT))
    return found


def third_party() -> dict[str, set[str]]:
    """For each part, the packages it imports that are neither ours nor Python's."""
    return {
        part: {name.partition(".")[0] for path in files for name in imports(path)}
        - sys.stdlib_module_names
        - {PACKAGE}
        for part, files in files_of_parts().items()
    }


def violations() -> list[str]:
    """What the rules at the top of this file do not allow, one line each."""
    wrong = []
    for part, targets in arrows().items():
        if part not in ALLOWED and not part.startswith("_"):
            wrong.append(f"{part} is not in the list of parts")
            continue
        for target, files in sorted(targets.items()):
            if target not in ALLOWED.get(part, "").split():
                wrong.append(f"{part} imports {target}: {', '.join(sorted(map(str, files)))}")
    for part, packages in third_party().items():
        wrong += [
            f"{part} imports {p}" for p in packages & CONFINED.keys() if part not in CONFINED[p].split()
        ]
    return wrong


def draw() -> str:
    """One line per part, those that import nothing first: the part, then all it imports."""
    found = {part: set(targets) for part, targets in arrows().items() if not part.startswith("_")}
    width, lines, drawn = max(map(len, found)), [], set[str]()
    while left := sorted(found.keys() - drawn):
        ready = [part for part in left if found[part] <= drawn] or left  # in a cycle: all that are left
        lines += [f"{part:{width}} → {', '.join(sorted(found[part])) or '·'}" for part in ready]
        drawn.update(ready)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(draw(), end="")
    if "--write" in sys.argv:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(BLOCK.sub(lambda match: match[1] + draw() + match[2], text), encoding="utf-8")
    print(*violations(), sep="\n")
