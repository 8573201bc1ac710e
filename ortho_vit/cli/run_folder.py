"""A run on disk: its checkpoints, and the configuration that it was trained with beside them."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import yaml

from ortho_vit.errors import CheckpointError, UsageError
from ortho_vit.models import ModelSpec, find_checkpoint
from ortho_vit.models.weights import PICKLED, read_checkpoint
from ortho_vit.training.same_data import stored_classes

ROOT = "runs"  # the trainer's default_root_dir


def locate_checkpoint(path: str, folder: Path, subcommand: str, runs: str = "version_*") -> str | None:
    """The checkpoint that `--ckpt_path` names: a file, that of a run's folder, or `best` or `last` of the newest run.

    The newest run is that of the runs in `folder` that wrote a checkpoint last; with `runs="**"` anywhere below it.  Of a
    run's folder, `fit` continues from the last checkpoint; the others evaluate the best, or the last if there was no
    validation, which is also what `best` means.  None where `fit` may start from the beginning.
    """
    newest = path in ("best", "last")
    if not newest and not Path(path).is_dir():
        return path
    patterns = [f"{runs}/checkpoints"] if newest else ["checkpoints", "version_*/checkpoints"]
    folder = folder if newest else Path(path)
    names = ["best", "last"] if path == "best" or (not newest and subcommand != "fit") else ["last"]
    for pattern in patterns:
        found = [_existing(place, names) for place in folder.glob(pattern)]
        if found := [file for file in found if file]:
            return str(max(found, key=_written))
    if not newest:
        raise UsageError(
            f"{path} holds no checkpoints/{names[0]}.ckpt: it is not the folder of a run, or the run failed early"
        )
    if subcommand != "fit":
        raise UsageError(
            f"no {path}.ckpt below {folder}; give its path, the folder of its run, or --name of the run"
        )
    print(f"no {path}.ckpt below {folder} yet: starting from the beginning")
    return None


def _existing(place: Path, names: list[str]) -> Path | None:
    """The first checkpoint of these names in a folder, or None."""
    return next((file for name in names if (file := place / f"{name}.ckpt").is_file()), None)


def _written(checkpoint: Path) -> float:
    """When the run of a checkpoint last wrote one."""
    return max(file.stat().st_mtime for file in checkpoint.parent.glob("*.ckpt"))


def read_run(path: str) -> dict[str, Any]:
    """A checkpoint of a run, its `hyper_parameters` those of the model alone."""
    if Path(path).suffix == ".safetensors":
        raise UsageError(
            f"{path} holds weights and no run to continue: give it as --model.weights instead of --ckpt_path"
        )
    try:
        checkpoint = read_checkpoint(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"ckpt_path: {error}") from error
    stored = checkpoint.get("hyper_parameters")
    weights = checkpoint.get("state_dict")
    if not isinstance(stored, dict) or not isinstance(weights, dict) or "name" not in stored:
        raise UsageError(
            f"{path} is not a checkpoint of a run: if it holds weights, give it as --model.weights"
        )
    model = {key: value for key, value in stored.items() if not key.startswith("_")}
    return checkpoint | {"hyper_parameters": with_spec(model, path)}


def classes_of(weights: str) -> list[str] | None:
    """The names of the classes that weights were trained on, from their card or run checkpoint, where they have one."""
    try:
        if Path(weights).suffix in PICKLED:
            return stored_classes(read_checkpoint(weights))
        return list(find_checkpoint(weights).card.classes)
    except CheckpointError:  # weights without a card
        return None


def with_spec(model: dict[str, Any], source: str) -> dict[str, Any]:
    """The options of a classifier; those that version 0.1 kept in `model_kwargs` get their own place."""
    try:
        return model | ModelSpec.from_options(model).options()
    except (TypeError, ValueError) as error:
        raise UsageError(f"{source}: {error}") from error


def run_of(path: str) -> Path | None:
    """The folder of the run that wrote a checkpoint, if it has its `config.yaml`."""
    run = Path(path).absolute().parent.parent
    return run if (run / "config.yaml").is_file() else None


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration that a run has written, which is complete and has no bases."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"no configuration {path}: {error}") from error
    data = config.get("data") if isinstance(config, dict) else None
    if not isinstance(data, dict) or "class_path" not in data:
        raise UsageError(f"{path} names no data; give the config.yaml that the run wrote")
    return config


@contextlib.contextmanager
def removed_if_empty(created: Path | None, trainer: L.Trainer) -> Iterator[None]:
    """Remove the folder that was created for a run if the run fails before its first step.

    It holds nothing to continue or to look at.  The folder of a run with several processes stays: some may still use it.
    """
    try:
        yield
    except BaseException:
        if (
            created
            and trainer.world_size == 1
            and not trainer.global_step
            and not any(created.rglob("*.ckpt"))
        ):
            shutil.rmtree(created, ignore_errors=True)
            with contextlib.suppress(OSError):
                created.parent.rmdir()  # unless there are other runs
        raise
