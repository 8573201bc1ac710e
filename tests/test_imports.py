"""What importing the package costs, and which of its parts may import which."""

import json
import subprocess
import sys
import tomllib

import pytest

from tests.helpers.import_graph import BLOCK, PAGE, ROOT, draw, private_names, third_party, violations

SCRIPT = """
import json, sys
import ortho_vit
from ortho_vit.cli.entry import main
main(["--help"])
main(["--version"])
light = sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names)

import torch
before, touched = set(sys.modules), []
sys.addaudithook(lambda event, args: touched.append(str(args[0])) if event in ("open", "os.listdir", "os.scandir") else None)
import ortho_vit.optim, ortho_vit.transport
added = sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)
by_optimizers = list(touched)
import ortho_vit.experiments.table1.__main__
lightning = [name for name in sys.modules if name.startswith("lightning")]
import ortho_vit.cli.main
loaded = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"light": light, "added": added, "touched": by_optimizers, "table1": lightning, "loaded": loaded}))
"""
NOT_FOR_ALL = {"sklearn", "tensorboard", "onnx", "onnxruntime", "gradio", "optuna", "gensim"}
DISTRIBUTIONS = {"PIL": "Pillow", "sklearn": "scikit-learn", "yaml": "PyYAML"}  # where the names differ

# The only files that use private names of other libraries.  Those of `torch._foreach_*`, which torch's own optimizers are
# written in, count as one.
PRIVATE = {
    "data/sampling.py": {"_shutdown_workers"},
    "models/zoo.py": {"_optim_factory"},
    "optim/base.py": {"_foreach", "_guards"},
    "optim/batching.py": {"_base", "_foreach"},
    "optim/free.py": {"_foreach", "_get_capturable_supported_devices"},
    "optim/momentum.py": {"_foreach"},
    "parameter.py": {"_make_subclass", "_parameters"},
    "training/lightning_internals.py": {
        "_average_model", "_batches_that_stepped", "_data_fetcher", "_opt_called", "_restart_stage",
        "_should_check_val_fx", "_signal_connector",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def fresh() -> dict[str, list[str]]:
    """What a fresh process has loaded and read: before torch, after the optimizers, and after the command line."""
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SCRIPT}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]) | {"printed": done.stdout.splitlines()}


def test_help_and_version_import_nothing_but_the_package(fresh):
    loaded = [name for name in fresh["light"] if not name.startswith(("_", "__editable__", "distutils"))]
    assert loaded == ["ortho_vit"]
    assert fresh["printed"][0].startswith("Train, evaluate and use")


def test_the_optimizers_import_torch_and_nothing_else(fresh):
    assert set(fresh["added"]) - {"torch"} == {"ortho_vit"}


def test_the_optimizers_read_no_file_but_their_source(fresh):
    for path in fresh["touched"]:
        assert "checkpoints" not in path, path
        assert "configs" not in path, path
        assert ".dist-info" not in path, path


def test_the_status_of_table_1_needs_no_lightning(fresh):
    assert fresh["table1"] == []


def test_the_command_line_leaves_packages_that_few_commands_need_for_later(fresh):
    assert {"lightning", "timm"} <= set(fresh["loaded"])
    assert not NOT_FOR_ALL & set(fresh["loaded"])
    # torchmetrics loads transformers where it is installed; the package never does.
    assert "transformers" not in set().union(*third_party().values())


def test_the_arrows_of_the_design_hold():
    assert violations() == []


def test_private_names_of_other_libraries_are_used_in_few_files():
    package = ROOT / "ortho_vit"
    found = {str(path.relative_to(package)): private_names(path) for path in package.rglob("*.py")}
    used = {
        path: {"_foreach" if name.startswith("_foreach_") else name for name in names}
        for path, names in found.items()
    }
    assert {path: names for path, names in used.items() if names} == PRIVATE


def test_the_graph_in_contributing_is_the_packages():
    block = BLOCK.search(PAGE.read_text(encoding="utf-8"))
    assert block is not None
    assert block[0] == block[1] + draw() + block[2], "python -m tests.helpers.import_graph --write"


def test_every_import_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {requirement.partition(">=")[0].partition("[")[0] for group in groups for requirement in group}
    imported = {DISTRIBUTIONS.get(name, name) for names in third_party().values() for name in names}
    assert imported <= declared


def test_parts_of_the_package_are_attributes_without_an_import_of_their_own():
    code = (
        "import ortho_vit; ortho_vit.optim.StiefelSGD; ortho_vit.transport.sinkhorn; ortho_vit.models.release"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
