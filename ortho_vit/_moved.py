"""Modules that were renamed: their old names keep working, with one warning each.

Run checkpoints, cards and YAML files name classes by path, so a module's old name is part of what users have stored.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "ortho_vit.data.archive": "ortho_vit.data.cifar",
    "ortho_vit.data.base": "ortho_vit.data.datamodule",
    "ortho_vit.data.cifar_pickle": "ortho_vit.data.cifar",
    "ortho_vit.data.loader": "ortho_vit.data.sampling",
    "ortho_vit.data.noise": "ortho_vit.data.rng",
    "ortho_vit.models.catalogue": "ortho_vit.models.__main__",
    "ortho_vit.models.core": "ortho_vit.models.orthogonalize",
    "ortho_vit.data.picture": "ortho_vit.data.decode",
    "ortho_vit.data.pictures": "ortho_vit.data.folder",
    "ortho_vit.models.export": "ortho_vit.models.hub",
    "ortho_vit.models.pretrained": "ortho_vit.models.weights",
    "ortho_vit.models.registry": "ortho_vit.models.zoo",
    "ortho_vit.optim.momentum_stiefel": "ortho_vit.optim.momentum",
    "ortho_vit.optim.stack": "ortho_vit.optim.batching",
    "ortho_vit.training.callbacks": "ortho_vit.training.measuring",
    "ortho_vit.training.cards": "ortho_vit.cli.compose",
    "ortho_vit.training.checkpoints": "ortho_vit.training.checkpointing",
    "ortho_vit.training.cli": "ortho_vit.cli.main",
    "ortho_vit.training.compilation": "ortho_vit.training.compile",
    "ortho_vit.training.compose": "ortho_vit.cli.compose",
    "ortho_vit.training.export": "ortho_vit.cli.export",
    "ortho_vit.training.memory": "ortho_vit.cli.entry",
    "ortho_vit.training.means": "ortho_vit.training.metrics",
    "ortho_vit.training.module": "ortho_vit.training.classifier",
    "ortho_vit.training.nonfinite": "ortho_vit.training.finite_steps",
    "ortho_vit.training.report": "ortho_vit.training.reporting",
    "ortho_vit.training.run": "ortho_vit.cli.run_folder",
    "ortho_vit.training.weights": "ortho_vit.models.weights",
}


class MovedModules(MetaPathFinder, Loader):
    """Imports a module under its old name; it is the last finder, so a file of that name would be found first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, MOVED[module.__name__]
        warnings.warn(f"{old} is now {new}; the old name keeps working", FutureWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)  # importlib returns what stands here afterwards
