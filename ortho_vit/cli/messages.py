"""The parser's errors on one line: what is wrong, and what to type instead.

jsonargparse reports an error as text, up to a page long, without exception types that tell the cases apart.  `RULES` has its
wording (4.52 and later) for the mistakes that users make most.  Any other message is shown whole, on one line.
"""

import argparse
import importlib
import inspect
import re
from typing import NoReturn

from ortho_vit.errors import UsageError, did_you_mean

CLASSES = {  # for each option that takes a class, one that it accepts
    "data": "ortho_vit.data.CIFAR10",
    "model.optimizer": "ortho_vit.optim.StiefelSGD",
    "model.scheduler": "torch.optim.lr_scheduler.StepLR",
    "trainer.callbacks": "lightning.pytorch.callbacks.EarlyStopping",
    "trainer.logger": "lightning.pytorch.loggers.CSVLogger",
}
OTHER_NAMES = {  # of options, in other libraries
    "lr_scheduler": "model.scheduler",
    "scheduler": "model.scheduler",
    "optimizer": "model.optimizer",
    "lr": "model.optimizer.lr",
    "learning_rate": "model.optimizer.lr",
    "weight_decay": "model.optimizer.weight_decay",
    "batch_size": "data.batch_size",
    "epochs": "trainer.max_epochs",
    "devices": "trainer.devices",
    "seed": "seed_everything",
}
# jsonargparse's words, and ours: {0} and {1} are the groups of the pattern.  The first pattern that is found is used; one
# whose sentence has an {example} only for the options in CLASSES.
RULES = (
    (r"unrecognized arguments: ([^\s=]+)", "unknown argument {0}{hint}"),
    (r"^Option '([^']+)'", "unknown key {0!r}{hint}"),
    (r"Option '([^']+)' is not accepted", "{key}: {owner} has no option {0!r}{hint}"),
    (r"module '([\w.]+)' has no attribute '(\w+)'", "{key}: {0} has no {1!r}{hint}"),
    (r"^the following arguments are required: (model.*)", "missing: {0}; a --config file can give them"),
    (r"^the following arguments are required: (.*)", "missing: {0}"),
    (r"arguments are required: (\w+)", "{key} needs {0}: give --{key}.{0} VALUE, or init_args in a --config file"),
    (r"subclasses with name (\w+)\. Give the full class path[^:]*: ([^,]+)",
     "{key}: there are several {0}; give the whole path, such as {1}"),
    (r"unhashable type|is not iterable", "{key}: class_path must be the path of a class, a word, such as {example}"),
    (r"Problem with given class_path '[^']+':\s+(\S.*)", "{key}: {owner}: {0}"),
    (r"Expected a dot import path string: (\S+)",
     "{key}: {0!r} is not a known class; give its whole path, such as {example}"),
    (r"(?:to be|correspond to) a subclass of (?:<class ')?(\w+)",
     "{key}: {path!r} cannot be used here: not a subclass of {0}; give a class such as {example}"),
    (r"Expected an import path or a subclass spec|Subclass types expect",
     "{key}: expected a class, such as {example}, got {value}"),
    (r"expects a function or a callable class: (.+?)\.? Got value",
     "{key}: {path!r} cannot be used here: {0}; give a class such as {example}"),
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Python's own parser, with errors in the same words."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(explain(ValueError(message), self))


def explain(error: Exception, parser: argparse.ArgumentParser) -> str:
    """An error of a parser on one line."""
    message = re.sub(r"^Group '([^']+)' does not accept option '", r"Option '\1.", str(error))
    options = re.findall(r"--[\w.]*\w", parser.format_help())
    keys = re.findall(r'Parser key "([^"]+)":', message)  # from the outside in
    if "Unable to load config" in message:  # a value for a whole group of options
        example = next((option for option in options if option.startswith(f"--{keys[0]}.")), "")
        images = "; images to predict are given by --pictures FOLDER" if keys[0] == "images" else ""
        return f"--{keys[0]} is a group of options, such as {example}{images}"
    problem = message.rpartition(f'Parser key "{keys[-1]}":')[2] if keys else message
    got = re.search(r"(?:Given|Got) value: (.*?)(?:\. Got value.*)?$", problem, re.MULTILINE)
    value = got[1] if got else ""
    # the class that the error is about, before the others that the message lists
    paths = re.findall(r"(?:given class_path '|Import path )([\w.]+)", message)
    paths += re.findall(r"class_path'?[ =:]+'([^']+)'", message)
    path = paths[0] if paths else value
    owner = path.rpartition(".")[2]
    key = ".".join(keys) or ("trainer.logger" if owner.endswith("Logger") else "class_path")
    for pattern, sentence in RULES:
        match = re.search(pattern, problem)
        if match and (key in CLASSES or "{example}" not in sentence):
            hint = _hint(match.groups()[-1], message, path, options) if "{hint}" in sentence else ""
            words = {"key": key, "value": value, "path": path, "owner": owner, "hint": hint}
            return sentence.format(*match.groups(), **words, example=CLASSES.get(key))
    expected = re.split(r"(?:Given|Got) value", problem)[0]
    types = re.findall(r"Expected (?:a )?<class '([^']+)'>", expected)
    literals = re.findall(r"Expected (?:a )?typing.Literal\[(.+)\]", expected)
    types += [words.replace(", ", " or ") for words in literals]
    if types:
        return f"{key}: expected {' or '.join(types).replace('NoneType', 'null')}, got {value}"
    line = " ".join(problem.split())
    return f"{key}: {line}" if keys else line


def _hint(word: str, message: str, path: str, options: list[str]) -> str:
    """What may have been meant: the name that an option has here, or the closest word that is known."""
    name, dot, rest = re.sub(r"^--((model|data)\.)?", "", word).partition(".")
    if word.startswith("--") and name in OTHER_NAMES:
        return f"; did you mean --{OTHER_NAMES[name]}{dot}{rest}?"
    known = [*options, *(option.removeprefix("--") for option in options)]
    if match := re.search(r"module '([\w.]+)' has no attribute", message):
        known = dir(importlib.import_module(match[1]))
    elif path:
        module, _, name = path.rpartition(".")
        known = list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    return did_you_mean(word, known) or did_you_mean(word.partition(".")[0], known)
