"""Expands arguments: a configuration into the files that it builds on, a run or trained weights into theirs.

    base: [../parts/cifar10.yaml, ../parts/sgd.yaml]     # relative to the file that says so; may name bases themselves
    model: {constraint: within}

Bases come first, in their order, then the file itself; the later wins, key by key.  LightningCLI merges several `--config`
in this way, so it gets one for each file.

    python train.py test    --weights NAME                       the data set that the weights were trained on
    python train.py predict --weights NAME --pictures FOLDER     the user's own images

`--weights` becomes the configuration that the card of the weights describes.  A card may have been downloaded, so only data
modules of this package are built from it.

    python train.py test --ckpt_path runs/quickstart/version_0    the run's best checkpoint, on the run's data
    python train.py test --ckpt_path best                         that of the newest run below runs/

A command that names no data itself is configured as the run was; its other options win.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ortho_vit.cli.changes import current_config
from ortho_vit.cli.run_folder import ROOT, locate_checkpoint, run_of
from ortho_vit.errors import CheckpointError, UsageError
from ortho_vit.models import Card, find_checkpoint
from ortho_vit.resources import configs_folder

CONFIG = ("-c", "--config")
MAX_VALUES = 10_000  # in one file; ours have about fifty
UNUSED = {"class_path": "ortho_vit.optim.StiefelSGD", "init_args": {"lr": 0.0}}  # evaluation takes no step


def expand(arguments: list[str]) -> list[str]:
    """The arguments with each `--config FILE` replaced by one for every file that it builds on, and one for itself."""
    expanded: list[str] = []
    for argument, value in _with_values(arguments, *CONFIG):
        if value is None:
            expanded.append(argument)
        else:
            for text in texts_of(find_config(value), ()):
                expanded += ["--config", text]
    return expanded


def take_option(arguments: list[str], option: str) -> tuple[str | None, list[str]]:
    """The value of `option`, the last if there are several, and the other arguments."""
    pairs = list(_with_values(arguments, option))
    values = [value for _, value in pairs if value is not None]
    return values[-1] if values else None, [argument for argument, value in pairs if value is None]


def config_files(arguments: list[str]) -> list[Path]:
    """The configuration files that the arguments name, without the files that those build on."""
    return [find_config(value) for _, value in _with_values(arguments, *CONFIG) if value is not None]


def _with_values(arguments: list[str], *options: str) -> Iterator[tuple[str, str | None]]:
    """Each argument, with its value if it is one of `options`, written `--option value` or `--option=value`."""
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name not in options:
            yield argument, None
            continue
        value = value if equals else next(rest, "")
        if not value:
            raise UsageError(f"{name} needs a value")
        yield name, value


def find_config(name: str, folder: Path = Path()) -> Path:
    """The file `name` in a folder, by default the working directory; if it is not there, the package's file of that name.

    The package's files are found as `quickstart.yaml` and as `configs/quickstart.yaml`.
    """
    path, packaged = folder / name, configs_folder()
    if path.exists():
        return path
    return next((file for place in (packaged, packaged.parent) if (file := place / name).is_file()), path)


def texts_of(path: Path, chain: tuple[Path, ...]) -> Iterator[str]:
    """The YAML of the files that a file builds on, and its own, all without the key `base`."""
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
            raise UsageError(f"{_at(key, path)}: {key.value} must have keys, each with its value")
    node.value = [(key, value) for key, value in node.value if key.value != "base"]
    if node.value:
        yield yaml.serialize(node, Dumper=yaml.SafeDumper)


def _read_node(path: Path) -> yaml.MappingNode:
    """The keys and values of a file, not yet parsed: plain values, no key twice, and at most `MAX_VALUES` of them."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{where} is not YAML: {getattr(error, 'problem', None) or error}") from error
    except RecursionError as error:
        raise UsageError(f"{path} is not a configuration: it is nested too deeply") from error
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{path} is {'empty' if node is None else 'not a configuration'}: it has no keys")
    _check_values(node, path)
    return node


def _check_values(root: yaml.Node, path: Path) -> None:
    """Raise UsageError for a tag, a key given twice, or too many values with the aliases written out.

    By aliases of aliases, nine lines of a file can stand for a billion values, all of which the parser would write out.
    """
    nodes, count = [root], 0
    while nodes:
        node, count = nodes.pop(), count + 1
        if count > MAX_VALUES:
            raise UsageError(
                f"{path} has more than {MAX_VALUES} values, with its aliases written out; a value cannot contain itself"
            )
        if node.tag not in yaml.SafeLoader.yaml_constructors:
            raise UsageError(f"{_at(node, path)}: the tag {node.tag} is refused; use plain values")
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise UsageError(f"{_at(key, path)}: a key must be a word")
                if key.value in seen:
                    raise UsageError(
                        f"{_at(key, path)}: the key {key.value!r} occurs twice; keep one of them"
                    )
                seen.add(key.value)
                nodes.append(value)


def _at(node: yaml.Node, path: Path) -> str:
    return f"{path}, line {node.start_mark.line + 1}"


# ----------------------------------------------------------------------------- from a run, or from a card


def expand_run(arguments: list[str], subcommand: str) -> list[str]:
    """The arguments with the configuration of the run that `--ckpt_path` names, where they name no data themselves."""
    path, others = take_option(arguments, "--ckpt_path")
    if path is None or any(argument.partition("=")[0] in (*CONFIG, "--data") for argument in arguments):
        return arguments
    root, _ = take_option(arguments, "--trainer.default_root_dir")
    name, _ = take_option(arguments, "--name")
    runs = "version_*" if name else "**"
    checkpoint = locate_checkpoint(path, Path(root or ROOT, name or ""), subcommand, runs)
    run = run_of(checkpoint) if checkpoint else None
    if run is None:
        return arguments
    config = current_config(run)
    refuse_classes((config.get("model") or {}).get("model_kwargs"), str(run / "config.yaml"))
    return ["--config", _as_text(config), *others, "--ckpt_path", str(checkpoint)]


def expand_card(arguments: list[str], subcommand: str) -> list[str]:
    """The arguments with `--weights NAME` and `--pictures FOLDER` replaced by the configuration they stand for."""
    weights, arguments = take_option(arguments, "--weights")
    pictures, arguments = take_option(arguments, "--pictures")
    if weights is None and pictures is None:
        return arguments
    if pictures is not None and subcommand != "predict":
        raise UsageError(f"--pictures is for predict: {subcommand} needs images with labels, given by --data")
    if subcommand == "fit":
        raise UsageError(
            "fit starts from weights with --model.weights; --weights is for validate, test, predict"
        )
    if weights is None:
        raise UsageError(
            "--pictures needs --weights NAME, whose card knows the classes and the size; with --ckpt_path of a run on an "
            "ImageFolder, --data.predict_root FOLDER names images"
        )
    try:
        checkpoint = find_checkpoint(weights)
    except CheckpointError as error:
        raise UsageError(f"weights: {error}") from error
    card = checkpoint.card
    refuse_classes(card.arguments, f"weights: the card of {card.name}")
    model = card.spec.options() | {"weights": str(checkpoint.weights), "optimizer": UNUSED}
    return ["--config", _as_text({"model": model, "data": _data(card, pictures)}), *arguments]


def _as_text(config: dict[str, Any]) -> str:
    return yaml.safe_dump(config, allow_unicode=True)


def _data(card: Card, pictures: str | None) -> dict[str, Any] | None:
    """The data module of images in a folder, or the one of this package that the weights were trained on."""
    if pictures is not None:
        arguments = {
            "folder": pictures,
            "classes": card.classes,
            "image_size": card.golden.shape[-1],
            "mean": card.mean,
            "std": card.std,
            "crop_pct": card.crop_pct,
        }
        return {"class_path": "ortho_vit.data.UnlabelledImages", "init_args": arguments}
    data = card.recipe.get("data")
    known = isinstance(data, dict) and str(data.get("class_path")).startswith("ortho_vit.data.")
    return data if known else None


def refuse_classes(value: Any, source: str) -> None:
    """Raise UsageError where plain values that came with weights name a class: a parser would build it."""
    if isinstance(value, dict) and "class_path" in value:
        raise UsageError(f"{source} is refused: among the model's arguments it names {value['class_path']!r}")
    nested = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for item in nested:
        refuse_classes(item, source)
