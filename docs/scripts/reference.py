"""The reference of commands and configurations, as Markdown, from the parsers themselves."""

import argparse
import contextlib
import importlib
import inspect
import io
import re
from typing import Any
from unittest import mock

from jsonargparse import ArgumentParser

import ortho_vit.data
import ortho_vit.optim
from ortho_vit import demo
from ortho_vit.cli import export, zoo
from ortho_vit.cli.entry import HELP
from ortho_vit.cli.main import CommandLine

EXPERIMENTS = ("table1", "eigenvalues", "transport", "finetuning", "rates", "attention")
# Lightning's options that the commands set themselves
UNUSED = ("", "--weights_only", "--return_predictions")
PREAMBLE = """\
# Configuration

A configuration is a YAML file.  Its keys are the names of constructor arguments, so the tables below are also the
reference of the classes behind them.  Every key is an option of the command line as well: `model: {constraint: across}`
is `--model.constraint across`.  A class is named, and its arguments follow it:

```yaml
base: [parts/cifar10.yaml]        # other files that this one builds on; what is here wins
model:
  name: ortho_vit_cifar
  optimizer:
    class_path: ortho_vit.optim.StiefelSGD
    init_args: {lr: 0.15, momentum: 0.9, weight_decay: 5.0e-5}
trainer: {max_epochs: 200}
```

Several `--config` compose in their order, then the options of the command line.  `--print_config` shows the result.
This page is written from the parsers when the site is built.
"""


def command_line() -> str:
    """The page on the commands: help pages, and the options that only some sub-commands have."""
    common = {name for _, actions in groups("fit") for name, *_ in actions}
    parts = ["# Command line", "```text\n" + HELP.format(program="ortho-vit").strip() + "\n```"]
    parts.append(
        "In a clone, `python train.py` stands for `ortho-vit`.  The options that all sub-commands share are on the page "
        "[Configuration](configuration.md)."
    )
    for subcommand in ("validate", "test", "predict"):
        rows = [row for _, actions in groups(subcommand) for row in actions if row[0] not in common]
        if rows:
            parts += [
                f"## {subcommand}",
                f"Besides the shared ones, `ortho-vit {subcommand}` has",
                table(rows),
            ]
    parts += ["## export", f"```text\n{help_of(export.parse, 'ortho-vit export')}\n```"]
    for name in ("models", "info", "verify", "onnx"):
        text = help_of(lambda arguments, name=name: zoo.Zoo([name, *arguments]), f"ortho-vit {name}")
        parts += [f"## {name}", f"```text\n{text}\n```"]
    parts += ["## demo", f"```text\n{help_of(demo.main, 'ortho-vit demo')}\n```"]
    for name in EXPERIMENTS:
        module = f"ortho_vit.experiments.{name}"
        text = help_of(main_of(module), f"python -m {module}")
        parts += [f"## python -m ortho_vit.experiments.{name}", f"```text\n{text}\n```"]
    parts += [
        "## Exit codes",
        "0: done.  1: something went wrong in a run.  2: the command line or a configuration is wrong, and nothing was "
        "written.  130 and 143: stopped by Ctrl-C or SIGTERM.  Errors are one line; `ORTHO_VIT_TRACEBACK=1` shows where "
        "one came from.",
    ]
    return "\n\n".join(parts) + "\n"


def configuration() -> str:
    """The page on configurations: every key of a training run, data modules and optimizers included."""
    parts = [PREAMBLE]
    for title, rows in groups("fit"):
        if rows:
            parts += [f"## {title}", table(rows)]
    for heading, module, key in (
        ("Data modules", ortho_vit.data, "data"),
        ("Optimizers", ortho_vit.optim, "model.optimizer"),
    ):
        parts.append(f"## {heading}")
        for name in module.__all__:
            cls = getattr(module, name)
            if inspect.isclass(cls) and cls.__name__ == name:
                parts += [
                    f"### {module.__name__}.{name}",
                    first_sentence(cls.__doc__),
                    table(arguments_of(cls, key)),
                ]
    return "\n\n".join(parts) + "\n"


# ------------------------------------------------------------------------------------------------------ parsers


class ParsersMade(Exception):
    """Raised once the parsers are there, before anything is parsed."""


class ParserMaker(CommandLine):
    def parse_arguments(self, parser: Any, args: Any) -> None:
        raise ParsersMade


def groups(subcommand: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """(heading, rows) for each group of options of a sub-command; a row is option, default, meaning."""
    maker = ParserMaker.__new__(ParserMaker)
    with contextlib.suppress(ParsersMade):
        maker.__init__([subcommand])  # type: ignore[misc]
    parser = maker.parser
    result = []
    for group in parser._action_groups:
        rows = rows_of(group._group_actions)
        prefix = rows[0][0].strip("`").removeprefix("--").partition(".")[0] if rows else ""
        titled = all(row[0].strip("`").startswith((f"--{prefix}.", f"--{prefix}`")) for row in rows)
        result.append((prefix if titled and len(rows) > 1 else "The run" if rows else "", rows))
    return merged(result)


def merged(
    found: list[tuple[str, list[tuple[str, str, str]]]],
) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Groups of one heading joined, in the order of their first."""
    together: dict[str, list[tuple[str, str, str]]] = {}
    for title, rows in found:
        together.setdefault(title, []).extend(rows)
    return list(together.items())


def arguments_of(cls: type, key: str) -> list[tuple[str, str, str]]:
    parser = ArgumentParser(exit_on_error=False)
    skip = {"params"} if key.endswith("optimizer") else set()
    parser.add_class_arguments(cls, key, skip=skip)
    return rows_of(parser._actions)


def rows_of(actions: list[argparse.Action]) -> list[tuple[str, str, str]]:
    rows = []
    for action in actions:
        option = next((o for o in action.option_strings if o.startswith("--")), "")
        hidden = action.help == argparse.SUPPRESS or option in UNUSED or option.endswith(("help", "verbose"))
        if hidden or type(action).__name__ == "_ActionConfigLoad":
            continue
        rows.append((f"`{option}`", default_of(action), first_sentence(action.help)))
    return rows


def default_of(action: argparse.Action) -> str:
    value = action.default
    if value == argparse.SUPPRESS or value is None or type(value).__name__ == "UnknownDefault":
        return "" if getattr(action, "required", False) else "null" if value is None else ""
    if value is inspect.Parameter.empty:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def first_sentence(text: str | None) -> str:
    """The first sentence of a help text, on one line and safe inside a table."""
    line = " ".join((text or "").split()).replace("``", "`").replace("|", "\\|")
    line = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", line)
    return re.split(r"(?<=[.])\s+(?=[A-Z])", line, maxsplit=1)[0]


def table(rows: list[tuple[str, str, str]]) -> str:
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def main_of(module: str) -> Any:
    """The `main` that `python -m MODULE` calls."""
    is_package = hasattr(importlib.import_module(module), "__path__")
    return importlib.import_module(f"{module}.__main__" if is_package else module).main


def help_of(main: Any, program: str) -> str:
    """What a command prints for --help."""
    output = io.StringIO()
    with (
        mock.patch("sys.argv", [program]),
        mock.patch.dict("os.environ", COLUMNS="100"),
        contextlib.redirect_stdout(output),
        contextlib.suppress(SystemExit),
    ):
        main(["--help"])
    return output.getvalue().replace("python train.py", "ortho-vit").strip()
