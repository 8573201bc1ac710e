"""What changes what a run is: resuming with other data, another seed or precision is refused unless asked for by name.

The run's `config.yaml` says how it began.  Each change that was allowed is one line of `changes.jsonl` beside it, so the
two together say how the run is trained at any time.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import lightning as L

from ortho_vit.cli.run_folder import read_config
from ortho_vit.errors import UsageError, did_you_mean
from ortho_vit.training.classifier import class_at

FILE = "changes.jsonl"
Changes = dict[str, tuple[Any, Any]]  # by key, as it is typed: the values before and now

# Of a data module: where the data lies and how fast it comes, not what it is.
FREE = ("root", "download", "num_workers", "device_resident", "predict_root")
# Of the trainer, with the value that null stands for.
TRAINER = {
    "precision": "32-true",
    "accumulate_grad_batches": 1,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": "norm",
    "limit_train_batches": 1.0,
    "overfit_batches": 0.0,
}
PRECISIONS = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}


def find_changes(run: Path, config: dict[str, Any]) -> Changes:
    """How a configuration differs from that of a run in what the run is."""
    before, now = flat(read_config(run / "config.yaml")), flat(config)
    for line in _lines(run):
        before |= {key: new for key, (_, new) in line["changes"].items()}
    if before["data"] != now["data"]:
        return {"data": (before["data"], now["data"])}
    keys = (key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key))
    return {key: (before.get(key), now.get(key)) for key in keys}


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """What a run is, by keys as they are typed, such as `data.batch_size`; defaults are filled in."""
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
    """The defaults of a class's options, also of those it passes on: earlier versions had fewer of them."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        for name, parameter in inspect.signature(base.__init__).parameters.items():  # type: ignore[misc]
            if parameter.default is not parameter.empty:
                found.setdefault(name, parameter.default)
    return found


def check_changes(changes: Changes, allowed: list[str], path: str) -> None:
    """Raise UsageError for changes that were not asked for, and for names of nothing that may change."""
    for key in allowed:
        if not (key in ("seed_everything", "data") or key.startswith(("data.", "trainer."))):
            known = [*changes, "seed_everything", "data", *(f"trainer.{name}" for name in TRAINER)]
            raise UsageError(
                f"--allow_changes: a run cannot change {key!r}{did_you_mean(key, known)}; it may change data, "
                f"data.OPTION, seed_everything and trainer.{{{', '.join(TRAINER)}}}"
            )
    refused = {key: values for key, values in changes.items() if key not in allowed}
    if refused:
        listed = "; ".join(f"{key} was {old}, now {new}" for key, (old, new) in list(refused.items())[:3])
        raise UsageError(
            f"{path} would go on as another run: {listed}.  Leave it as it was, start a new run from its weights with "
            f"--model.weights {path}, or ask for it with --allow_changes {','.join([*allowed, *refused])}"
        )


def record_changes(run: Path, changes: Changes, step: int) -> None:
    """Add what changes from this step on to the run's `changes.jsonl`."""
    with open(run / FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "changes": changes}) + "\n")


def _lines(run: Path) -> list[dict[str, Any]]:
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
            f"{path} is damaged ({error}); mend it, or remove it if nothing was changed"
        ) from error
