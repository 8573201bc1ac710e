"""Every private name of LightningCLI that the command line uses, under public names.

The tests are those of `ortho_vit.training.lightning_internals`, which has the names that training uses.
"""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI


class DeferredCLI(LightningCLI):
    """LightningCLI that parses and instantiates when it is made, and runs its sub-command when `run_subcommand` is called.

    LightningCLI runs at once, unless it has no sub-commands.  What its own reading of a checkpoint's hyper-parameters does,
    our `parse_arguments` does itself.
    """

    def run_subcommand(self) -> None:
        super()._run_subcommand(str(self.subcommand))

    def last_callbacks(self, config: dict[str, Any]) -> list[Callback]:
        """The callbacks that run after all others; LightningCLI has options for those that run first."""
        return []

    def parser_of(self, subcommand: str) -> LightningArgumentParser:
        return self._parser(subcommand)

    def _run_subcommand(self, subcommand: str) -> None:
        pass

    def _parse_ckpt_path(self) -> None:
        pass

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        return super()._instantiate_trainer(config, [*callbacks, *self.last_callbacks(config)])
