"""`--ckpt_path`: a checkpoint, the folder of a run, or `best` or `last` of the newest run; and that run's configuration.

    python train.py test --ckpt_path runs/quickstart/version_0    the run's best checkpoint, on the run's data
    python train.py test --ckpt_path best                         that of the newest run below runs/

A command that names no data itself is configured as the run was; its other options win.
"""

from pathlib import Path

import yaml

from ortho_vit.cli.changes import current_config
from ortho_vit.cli.compose import refuse_classes, take_option
from ortho_vit.cli.run_folder import run_of
from ortho_vit.errors import UsageError

ROOT = "runs"  # the trainer's default_root_dir
DESCRIBING = ("-c", "--config", "--data", "--weights")  # options that name data


def expand_run(arguments: list[str], subcommand: str) -> list[str]:
    """The arguments with the configuration of the run that `--ckpt_path` names, where they describe none."""
    path, others = take_option(arguments, "--ckpt_path")
    if path is None or any(argument.partition("=")[0] in DESCRIBING for argument in arguments):
        return arguments
    root, _ = take_option(arguments, "--trainer.default_root_dir")
    name, _ = take_option(arguments, "--name")
    folder = Path(root or ROOT)
    checkpoint = (
        find_checkpoint(path, folder / name, subcommand)
        if name
        else newest_checkpoint(path, folder, subcommand)
    )
    run = run_of(checkpoint) if checkpoint else None
    if run is None:
        return arguments
    config = current_config(run)
    refuse_classes((config.get("model") or {}).get("model_kwargs"), str(run / "config.yaml"))
    text = yaml.safe_dump(config, allow_unicode=True)
    return [others[0], "--config", text, *others[1:], "--ckpt_path", str(checkpoint)]


def find_checkpoint(path: str, folder: Path, subcommand: str) -> str | None:
    """The checkpoint that `--ckpt_path` names: a file, that of a run's folder, or of the newest run in `folder`.

    None where `fit` may start from the beginning.
    """
    return _find(path, folder, "version_*/checkpoints", subcommand)


def newest_checkpoint(path: str, folder: Path, subcommand: str) -> str | None:
    """The same for a run of any name: `best` and `last` are those of the newest run anywhere below `folder`."""
    return _find(path, folder, "**/checkpoints", subcommand)


def _find(path: str, folder: Path, where: str, subcommand: str) -> str | None:
    if path not in ("best", "last"):
        return _in_run(Path(path), subcommand) if Path(path).is_dir() else path
    if found := _latest(folder, f"{where}/{path}.ckpt"):
        return found
    if subcommand == "fit":
        print(f"no {path}.ckpt below {folder} yet: starting from the beginning")
        return None
    raise UsageError(
        f"no {path}.ckpt below {folder}; give its path, the folder of its run, or --name of the run"
    )


def _in_run(run: Path, subcommand: str) -> str:
    """The checkpoint of a run to continue from, or to evaluate: without validation there is no best one."""
    names = ("last",) if subcommand == "fit" else ("best", "last")
    for name in names:
        file = f"checkpoints/{name}.ckpt"
        if found := _latest(run, file) or _latest(run, f"version_*/{file}"):
            return found
    raise UsageError(
        f"{run} holds no checkpoints/{names[0]}.ckpt: it is not the folder of a run, or the run failed early"
    )


def _latest(folder: Path, pattern: str) -> str | None:
    """The file that was written last."""
    found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    return str(found[-1]) if found else None
