"""Configuration files that build on others, and errors about them that fit on a line.

    base: [../parts/cifar10.yaml, ../parts/sgd.yaml]     # relative to the file that says so; may name bases themselves
    model: {constraint: within}

Bases come first, in their order, then the file itself; the later wins, key by key.  LightningCLI merges several
`--config` just so, and therefore gets one for each file.
"""

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ortho_vit.errors import UsageError
from ortho_vit.resources import configs_folder

MOST_VALUES = 10_000  # of one file; ours have some fifty


def expand(arguments: list[str]) -> list[str]:
    """The arguments with each `--config FILE` replaced by one for every file it builds on, and for itself."""
    expanded: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name not in ("-c", "--config"):
            expanded.append(argument)
            continue
        if not equals:
            value = next(rest, "")
        if not value:
            raise UsageError("--config needs a file")
        for text in texts_of(find_config(value), ()):
            expanded += ["--config", text]
    return expanded


def take_option(arguments: list[str], option: str) -> tuple[str | None, list[str]]:
    """The value of `option`, the last if there are several, and the other arguments."""
    value: str | None = None
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, after = argument.partition("=")
        if name != option:
            others.append(argument)
            continue
        value = after if equals else next(rest, "")
        if not value:
            raise UsageError(f"{option} needs a value")
    return value, others


def config_files(arguments: list[str]) -> list[Path]:
    """The files that the arguments name, without what those build on."""
    files = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name in ("-c", "--config"):
            files.append(find_config(value if equals else following))
    return files


def find_config(name: str, folder: Path = Path()) -> Path:
    """The file `name` in a folder, by default the working directory, otherwise that of the package's own configurations.

    Those are found as `quickstart.yaml` and as `configs/quickstart.yaml`.
    """
    path, packaged = folder / name, configs_folder()
    if path.exists():
        return path
    return next((file for place in (packaged, packaged.parent) if (file := place / name).is_file()), path)


def texts_of(path: Path, chain: tuple[Path, ...]) -> Iterable[str]:
    """The YAML of a file and of all it builds on, bases first, without the key `base`."""
    resolved = path.resolve()
    if resolved in chain:
        raise UsageError(
            f"configurations build on each other in a circle: {' → '.join(p.name for p in (*chain, resolved))}"
        )
    named_by = f", named as a base by {chain[-1]}" if chain else ""
    if not path.is_file():
        what = ": it is a folder" if path.is_dir() else ""
        raise UsageError(f"no configuration file {path}{named_by}{what}")
    node = _read_node(path)
    for key, value in node.value:
        if key.value == "base":
            bases = [value] if isinstance(value, yaml.ScalarNode) else value.value
            if not all(isinstance(base, yaml.ScalarNode) for base in bases):
                raise UsageError(f"{path}: base must be a file or a list of files")
            for base in bases:
                yield from texts_of(find_config(base.value, path.parent), (*chain, resolved))
        elif key.value in ("model", "trainer") and not isinstance(value, yaml.MappingNode):
            raise UsageError(f"{_at(key, path)}: {key.value} must hold keys, each with its value")
    node.value = [(key, value) for key, value in node.value if key.value != "base"]
    if node.value:
        yield yaml.serialize(node, Dumper=yaml.SafeDumper)


def _read_node(path: Path) -> yaml.MappingNode:
    """The keys of a file, unparsed: plain values, no key twice, and not so many that no one can have written them."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{where} is not YAML: {getattr(error, 'problem', None) or error}") from error
    except RecursionError as error:
        raise UsageError(f"{path} is no configuration: it is nested too deeply") from error
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{path} is {'empty' if node is None else 'no configuration'}: it holds no keys")
    _count_values(node, path, {})
    return node


def _count_values(node: yaml.Node, path: Path, counts: dict[yaml.Node, int]) -> int:
    """How many values a node stands for, its aliases written out."""
    if node not in counts:
        counts[node] = 0  # until it is known
        counts[node] = 1 + sum(_count_values(value, path, counts) for value in _values(node, path))
    if not counts[node]:
        raise UsageError(f"{_at(node, path)}: a value cannot contain itself")
    if counts[node] > MOST_VALUES:
        raise UsageError(f"{path} holds more than {MOST_VALUES} values, its aliases written out")
    return counts[node]


def _values(node: yaml.Node, path: Path) -> list[yaml.Node]:
    if node.tag not in yaml.SafeLoader.yaml_constructors:
        raise UsageError(f"{_at(node, path)}: the tag {node.tag} is refused; plain values only")
    if not isinstance(node, yaml.MappingNode):
        return node.value if isinstance(node, yaml.SequenceNode) else []
    seen = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise UsageError(f"{_at(key, path)}: a key must be a word")
        if key.value in seen:
            raise UsageError(f"{_at(key, path)}: the key {key.value!r} is there twice")
        seen.add(key.value)
    return [value for _, value in node.value]


def _at(node: yaml.Node, path: Path) -> str:
    return f"{path}, line {node.start_mark.line + 1}"


# ------------------------------------------------------------------------------------------ one-line errors


def explain(message: str, options: Iterable[str]) -> str:
    """The parser's message, which may be a page, as one line that says what to type instead."""
    options = [option.removeprefix("--") for option in options]
    keys = re.findall(r'Parser key "([^"]+)":', message)  # from the outside in
    key = ".".join(keys)
    if match := re.search(r"unrecognized arguments: (\S+)", message):
        hint = _did_you_mean(match[1].removeprefix("--").split("=")[0], options, "--")
        return f"unknown argument {match[1]}{hint}"
    if match := re.search(r"does not accept option '([^']+)'", message):
        return f"unknown key {_unknown_part(match[1], options)!r}{_did_you_mean(match[1], options)}"
    if match := re.search(r"Option '([^']+)' is not accepted", message):
        path = re.search(r"class_path[ =]'([^']+)'", message)
        owner = path[1].rpartition(".")[2] if path else key
        hint = _did_you_mean(match[1], _parameters(path[1] if path else ""))
        return f"{key}: {owner} has no option {match[1]!r}{hint}"
    if match := re.search(r"the following arguments are required: (.*?)(?:\. Got value.*)?$", message, re.M):
        missing = re.sub(r"(fit|validate|test|predict)[.]", "", match[1])
        of = f" of {key}" if key else ""
        return f"missing: {missing}{of}; a --config file can give them"
    if match := re.search(r"module '([^']+)' has no attribute '([^']+)'", message):
        hint = _did_you_mean(match[2], dir(importlib.import_module(match[1])))
        return f"{key}: {match[1]} has no {match[2]!r}{hint}"
    if match := re.search(r"Problem with given class_path '([^']+)':\s+(?!Parser key)(\S.*)", message):
        kind = re.search(r"Subtypes: \[<class '[\w.]+\.(\w+)'>", message)
        where = key or ("trainer.logger" if kind and kind[1] == "Logger" else "class_path")
        return f"{where}: {match[1].rpartition('.')[2]}: {match[2]}"
    if "unhashable type" in message:
        return f"{key}: class_path must be the path of a class, a word, such as {_example(key)}"
    if match := re.search(
        r"Multiple subclasses with name (\w+)\. Give the full class path[^:]*: (\S+),", message
    ):
        return f"{key}: there are several {match[1]}; give the whole path, such as {match[2]}"
    return _explain_value(key, message.rpartition(f'Parser key "{keys[-1]}":')[2] if keys else message)


def _explain_value(key: str, problem: str) -> str:
    """What was expected of a key and what it got, from the innermost part of a message."""
    kinds = [
        *re.findall(r"<class '([^']+)'>(?=\n|\.|$)", "\n".join(re.findall(r"Expected an? (.*)", problem)))
    ]
    kinds += [kind.replace(", ", " or ") for kind in re.findall(r"Literal\[([^]]+)\]", problem)]
    given = re.search(
        r"Given value: (.*?)(?:\. Got value.*)?$|Got value: (.*?)(?:\. Got value.*)?$", problem, re.MULTILINE
    )
    unknown = re.search(r"Expected a dot import path string: (\S+)", problem)
    simple = [kind.replace("NoneType", "null") for kind in dict.fromkeys(kinds) if kind != "torch.Tensor"]
    if unknown and simple in ([], ["null"]):
        return f"{key}: {unknown[1]!r} is no known class; give its whole path, such as {_example(key)}"
    value = re.search(r"but got (.*?)\. Got value|Given value: (.*)", problem)
    if value and re.search(r"Expected an import path or a subclass spec|Subclass types expect", problem):
        return f"{key}: expected a class, such as {_example(key)}, got {value[1] or value[2]}"
    if simple and given:
        return f"{key}: expected {' or '.join(simple)}, got {given[1] or given[2]}"
    line = " ".join(problem.split())
    return f"{key}: {line}" if key else line


def _example(key: str) -> str:
    """The path of a class that may stand at a key."""
    examples = {
        "data": "ortho_vit.data.CIFAR10",
        "model.scheduler": "torch.optim.lr_scheduler.StepLR",
        "trainer.logger": "lightning.pytorch.loggers.CSVLogger",
    }
    return next(
        (path for start, path in examples.items() if key.startswith(start)), "ortho_vit.optim.StiefelSGD"
    )


def _unknown_part(key: str, options: list[str]) -> str:
    """The key up to where it stops being known."""
    parts = key.split(".")
    for n in range(1, len(parts)):
        if not any(
            option == ".".join(parts[:n]) or option.startswith(".".join(parts[:n]) + ".")
            for option in options
        ):
            return ".".join(parts[:n])
    return key


def refuse_classes(value: Any, source: str) -> None:
    """Raise UsageError where plain values that came with weights name a class: a parser would build it."""
    nested = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if isinstance(value, dict) and "class_path" in value:
        raise UsageError(f"{source} is refused: among the model's arguments it names {value['class_path']!r}")
    for item in nested:
        refuse_classes(item, source)


def _did_you_mean(word: str, words: Iterable[str], prefix: str = "") -> str:
    words = list(words)
    known = _unknown_part(word, words) if "." in word else word
    groups = {".".join(w.split(".")[: known.count(".") + 1]) for w in words}
    close = difflib.get_close_matches(known, groups, n=1) or difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def _parameters(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    try:
        return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    except (ImportError, AttributeError, ValueError):
        return []
