"""The parser's errors on one line: what is wrong, and what to type instead.

jsonargparse reports an error as text, up to a page long, without exception types that tell the cases apart.  This file earns
its length by the mistakes that users make most: each has one pattern of jsonargparse's wording (4.52 and later).  Any other
message is shown whole, on one line.
"""

import importlib
import inspect
import re
from collections.abc import Iterable

from ortho_vit.errors import did_you_mean

GOT = re.compile(r"(?:Given value|Got value): (.*?)(?:\. Got value.*)?$", re.MULTILINE)
EXAMPLES = {
    "data": "ortho_vit.data.CIFAR10",
    "model.scheduler": "torch.optim.lr_scheduler.StepLR",
    "trainer.logger": "lightning.pytorch.loggers.CSVLogger",
    "trainer.callbacks": "lightning.pytorch.callbacks.EarlyStopping",
    "": "ortho_vit.optim.StiefelSGD",
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


def explain(message: str, options: Iterable[str]) -> str:
    """A message of the parser on one line; `options` are those that the parser knows, such as "--model.name"."""
    keys = re.findall(r'Parser key "([^"]+)":', message)  # from the outside in
    key, options = ".".join(keys), list(options)
    if match := re.search(r"unrecognized arguments: (\S+)", message):
        name = match[1].partition("=")[0]
        return f"unknown argument {match[1]}{_other_name(name) or _hint(name, options)}"
    if match := re.search(r"does not accept option '([^']+)'", message):
        return f"unknown key {match[1]!r}{_hint(match[1], [o.removeprefix('--') for o in options])}"
    if match := re.search(r"Option '([^']+)' is not accepted", message):
        path = re.search(r"class_path[ =]'([^']+)'", message)
        owner = path[1].rpartition(".")[2] if path else key
        hint = did_you_mean(match[1], _parameters(path[1] if path else ""))
        return f"{key}: {owner} has no option {match[1]!r}{hint}"
    if match := re.search(r"the following arguments are required: (.*?)(?:\. Got value.*)?$", message, re.M):
        missing = re.sub(r"(fit|validate|test|predict)[.]", "", match[1])
        if key:
            return f"{key} needs {missing}: give --{key}.{missing.split(',')[0]} VALUE, or init_args in a --config file"
        return f"missing: {missing}; a --config file can give them"
    if match := re.search(r"module '([^']+)' has no attribute '([^']+)'", message):
        hint = did_you_mean(match[2], dir(importlib.import_module(match[1])))
        return f"{key}: {match[1]} has no {match[2]!r}{hint}"
    if match := re.search(r"Problem with given class_path '([^']+)':\s+(?!Parser key)(\S.*)", message):
        is_logger = re.search(r"Subtypes: \[<class '[\w.]+\.Logger'>", message)
        where = key or ("trainer.logger" if is_logger else "class_path")
        return f"{where}: {match[1].rpartition('.')[2]}: {match[2]}"
    if "unhashable type" in message:
        return f"{key}: class_path must be the path of a class, a word, such as {_example(key)}"
    if match := re.search(r"subclasses with name (\w+)\. Give the full class path[^:]*: (\S+),", message):
        return f"{key}: there are several {match[1]}; give the whole path, such as {match[2]}"
    if "Unable to load config" in message:
        group = f"--{keys[0]}" if keys else ""
        images = "; images to predict are given by --pictures FOLDER" if group == "--images" else ""
        example = next((option for option in options if option.startswith(f"{group}.")), group)
        return f"{group} is a group of options, such as {example}{images}"
    return _explain_value(key, message.rpartition(f'Parser key "{keys[-1]}":')[2] if keys else message)


def _explain_value(key: str, problem: str) -> str:
    """What a key expects and what it got, from the innermost part of a message."""
    expected = "\n".join(re.findall(r"Expected an? (.*)", problem))
    types = re.findall(r"<class '([^']+)'>(?=\n|\.|$)", expected)
    types = [name.replace("NoneType", "null") for name in types if name != "torch.Tensor"]
    types += [words.replace(", ", " or ") for words in re.findall(r"Literal\[([^]]+)\]", problem)]
    unknown = re.search(r"Expected a dot import path string: (\S+)", problem)
    if unknown and not set(types) - {"null"}:
        return f"{key}: {unknown[1]!r} is not a known class; give its whole path, such as {_example(key)}"
    value = re.search(r"but got (.*?)\. Got value|Given value: (.*)", problem)
    if value and re.search(r"Expected an import path or a subclass spec|Subclass types expect", problem):
        return f"{key}: expected a class, such as {_example(key)}, got {value[1] or value[2]}"
    got = GOT.search(problem)
    callable_class = r"callable class: (.+?)\.? Got value: (?:Namespace\(class_path=')?([^',)\s]+)"
    if match := re.search(callable_class, problem, re.DOTALL):
        return _wrong_class(key, match[2], match[1])
    if got and (match := re.search(r"does not correspond to a (subclass of .*)", problem)):
        return _wrong_class(key, got[1], match[1])
    if types and got:
        return f"{key}: expected {' or '.join(dict.fromkeys(types))}, got {got[1]}"
    line = " ".join(problem.split())
    return f"{key}: {line}" if key else line


def _wrong_class(key: str, path: str, problem: str) -> str:
    path = next(iter(re.findall(r"'class_path': '([^']+)'", path)), path)
    kind = re.search(r"subclass of (?:<class ')?(?:\w+\.)*(\w+)", problem)
    reason = f"not a subclass of {kind[1]}" if kind else " ".join(problem.split()).rstrip(".")
    return f"{key}: {path!r} cannot be used here: {reason}; give a class such as {_example(key)}"


def _other_name(option: str) -> str:
    """A hint for an option that other libraries call by this name."""
    word = option.removeprefix("--").removeprefix("model.").removeprefix("data.")
    name, dot, rest = word.partition(".")
    return f"; did you mean --{OTHER_NAMES[name]}{dot}{rest}?" if name in OTHER_NAMES else ""


def _hint(word: str, known: list[str]) -> str:
    """The closest option; where there is none, the closest group of options."""
    return did_you_mean(word, known) or did_you_mean(word.partition(".")[0], known)


def _example(key: str) -> str:
    """The path of a class that a key accepts."""
    return next(path for start, path in EXAMPLES.items() if key.startswith(start))


def _parameters(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    try:
        return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    except (ImportError, AttributeError, ValueError):
        return []
