"""Changes of a run that is resumed: other data, another seed or precision must be allowed by name; the model stays.

The run's `config.yaml` says how it began.  Each change that was allowed, and each change of its length, which needs no
permission, is one line of `changes.jsonl` beside it.  Together they say how the run was trained at any step.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import lightning as L

from ortho_vit.cli.run_folder import read_config
from ortho_vit.errors import UsageError, did_you_mean
from ortho_vit.training.optimizer import class_at

FILE = "changes.jsonl"
Changes = dict[str, tuple[Any, Any]]  # by key, as it is typed: the values before and now

# Options of a data module that may change: they say how fast the data is read, not what it is.
FREE = ("download", "num_workers", "device_resident", "predict_root")
# Options of the trainer that define a run, with the value that null stands for.
TRAINER = {
    "precision": "32-true",
    "accumulate_grad_batches": 1,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": "norm",
    "limit_train_batches": 1.0,
    "overfit_batches": 0.0,
    "max_epochs": None,
    "max_steps": None,
}
# Options of the model that may change
MODEL = ("weights", "skip_nonfinite", "compile", "optimizer.init_args.shard_stiefel")
# Changes that need no permission and are recorded: a longer run, and images, which are compared, in another place
RECORDED = {"trainer.max_epochs", "trainer.max_steps", "data.root", "data.class_names"}
# Options that decide which images a run trains and validates on
SPLITTING = {"data", *(f"data.{key}" for key in ("root", "val_size", "limit", "seed", "skip_unreadable"))}
PRECISIONS = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}


def current_config(run: Path) -> dict[str, Any]:
    """The configuration of a run with the changes that were made since it began."""
    return changed(read_config(run / "config.yaml"), read_changes(run))


def changed(config: dict[str, Any], changes: list[dict[str, Any]]) -> dict[str, Any]:
    """The configuration, which is changed in place as `read_changes` says."""
    for line in changes:
        for key, (_, value) in line["changes"].items():
            _set(config, key, value)
    return config


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of the option `--key`, which may be the data module with all its options."""
    group, _, option = key.partition(".")
    if group == "data" and not option:
        config["data"] = value if isinstance(value, dict) else {"class_path": value}
    elif group == "data":
        config["data"]["init_args"] = (config["data"].get("init_args") or {}) | {option: value}
    elif option:
        config[group] = (config.get(group) or {}) | {option: value}
    else:
        config[key] = value


def find_changes(run: Path, config: dict[str, Any]) -> Changes:
    """The options that `flat` lists and in which a configuration differs from that of a run."""
    stored = current_config(run)
    before, now = flat(stored), flat(config)
    keys = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    if "data" in keys:  # with all of its options
        before["data"], now["data"] = stored["data"], config["data"]
        keys = [key for key in keys if not key.startswith("data.")]
    return {key: (before.get(key), now.get(key)) for key in keys}


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """The options that define a run, by the names that users type, such as `data.batch_size`, with their defaults."""
    data, trainer = config["data"], config.get("trainer") or {}
    cls = class_at(data["class_path"], L.LightningDataModule, "a data module")
    arguments = _defaults(cls) | (data.get("init_args") or {})
    values = {
        "seed_everything": config.get("seed_everything"),
        "data": f"{cls.__module__}.{cls.__qualname__}",
    }
    values |= {f"data.{key}": value for key, value in arguments.items() if key not in FREE}
    for key, default in TRAINER.items():
        value = trainer.get(key)
        values[f"trainer.{key}"] = default if value is None else value
    precision = str(values["trainer.precision"])
    values["trainer.precision"] = PRECISIONS.get(precision, precision)
    return json.loads(json.dumps(values, default=str))  # tuples as lists, as in a file


def _defaults(cls: type) -> dict[str, Any]:
    """The defaults of a class's options and of those of its base classes: earlier versions had fewer of them."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        for name, parameter in inspect.signature(base.__init__).parameters.items():  # type: ignore[misc]
            if parameter.default is not parameter.empty:
                found.setdefault(name, parameter.default)
    return found


def check_changes(changes: Changes, allowed: list[str], path: str) -> None:
    """Raise UsageError for changes that are not allowed, and for names in `allowed` that cannot change."""
    for key in allowed:
        if not (key in ("seed_everything", "data") or key.startswith(("data.", "trainer."))):
            known = [*changes, "seed_everything", "data", *(f"trainer.{name}" for name in TRAINER)]
            raise UsageError(
                f"--allow_changes: a run cannot change {key!r}{did_you_mean(key, known)}; it may change data, "
                f"data.OPTION, seed_everything and trainer.{{{', '.join(TRAINER)}}}"
            )
    refused = {key: values for key, values in changes.items() if key not in {*allowed, *RECORDED}}
    if refused:
        listed = "; ".join(
            f"{key} was {_named(old)}, now {_named(new)}" for key, (old, new) in list(refused.items())[:3]
        )
        raise UsageError(
            f"{path} would go on as another run: {listed}.  Leave it as it was, start a new run from its weights with "
            f"--model.weights {path}, or ask for it with --allow_changes {','.join([*allowed, *refused])}"
        )


def _named(value: Any) -> Any:
    """A value as it is printed: a class without its arguments."""
    return value["class_path"] if isinstance(value, dict) and "class_path" in value else value


def check_model(ours: dict[str, Any], stored: dict[str, Any], path: str) -> None:
    """Raise UsageError if the options of a model differ from those of the run that is resumed."""
    different = [
        f"{key} was {old}, now {new}"
        for key, old, new in _differences(ours, stored)
        if key not in MODEL and not (key == "num_classes" and new is None)
    ]
    if different:
        raise UsageError(
            f"{path} cannot be resumed with another model: {'; '.join(different[:3])}.  Leave it as it was, or start a "
            f"new run from its weights with --model.weights {path}"
        )


def _differences(ours: Any, theirs: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """(key, theirs, ours) wherever two nests of plain values differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            difference
            for k in dict.fromkeys([*theirs, *ours])
            for difference in _differences(ours.get(k), theirs.get(k), f"{key}.{k}" if key else k)
        ]
    as_list = [list(x) if isinstance(x, tuple) else x for x in (ours, theirs)]
    return [] if as_list[0] == as_list[1] else [(key, theirs, ours)]


def record_changes(run: Path, changes: Changes, step: int) -> None:
    """Add what changes from this step on to the run's `changes.jsonl`."""
    with open(run / FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "changes": changes}) + "\n")


def read_changes(run: Path) -> list[dict[str, Any]]:
    """The changes of a run, each with the step from which it holds; keys with the values before and since."""
    path = run / FILE
    if not path.is_file():
        return []
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [
            {"step": int(x["step"]), "changes": {k: (v[0], v[1]) for k, v in x["changes"].items()}}
            for x in lines
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is damaged ({error}); repair it, or remove it if nothing was changed"
        ) from error
