"""Vision Transformers with orthogonal attention, and the Stiefel optimizers that keep it exact.

Nothing is imported before it is used: `import ortho_vit.optim` needs torch and nothing else.
"""

import importlib
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

from ortho_vit._moved import MovedModules

if TYPE_CHECKING:
    from ortho_vit.models import create_model, list_models, orthogonalize
    from ortho_vit.optim.audit import audit
    from ortho_vit.parameter import StiefelParameter, constrain, project_, stiefel_parameters
    from ortho_vit.stiefel import orthogonality_error

__version__ = "0.2.0"

__all__ = [
    "StiefelParameter",
    "audit",
    "constrain",
    "create_model",
    "list_models",
    "orthogonality_error",
    "orthogonalize",
    "project_",
    "stiefel_parameters",
]

_HOMES = {
    "models": ("create_model", "list_models", "orthogonalize"),
    "optim.audit": ("audit",),
    "parameter": ("StiefelParameter", "constrain", "project_", "stiefel_parameters"),
    "stiefel": ("orthogonality_error",),
}


_MODULES = ("data", "models", "optim", "parameter", "stiefel", "training", "transport")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"ortho_vit.{name}")
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"ortho_vit.{module}"), name)
            return value
    raise AttributeError(f"module 'ortho_vit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


class _TorchvisionCheck(MetaPathFinder):
    """Runs the work-around in `_torchvision.py` before torchvision is first imported, where its build is not torch's."""

    done = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "torchvision" and not self.done:
            self.done = True
            if _build("torch") != _build("torchvision"):
                from ortho_vit import _torchvision  # noqa: F401


def _build(package: str) -> str:
    """The part of an installed version after its "+", such as "cpu"; empty for a package index's own build."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package).partition("+")[2]
    except PackageNotFoundError:
        return ""


sys.meta_path.append(MovedModules())
sys.meta_path.insert(0, _TorchvisionCheck())
