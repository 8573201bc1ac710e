"""Every private name of LightningCLI and argparse that the command line uses, under public names.

`tests/training/test_lightning_internals.py` tests those of LightningCLI, `tests/cli/test_bad_inputs.py` that of argparse.
"""

import argparse
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI


class DeferredCLI(LightningCLI):
    """A LightningCLI whose constructor parses and instantiates, and whose `run_subcommand` runs the sub-command.

    The constructor of LightningCLI runs the sub-command too.  It also reads the hyper-parameters of a checkpoint, which our
    `parse_arguments` does instead.
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


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """All options that a parser knows, such as --config; argparse lists them only as a help text."""
    return [option for action in parser._actions for option in action.option_strings]
