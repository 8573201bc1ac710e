"""The folders `configs/` and `checkpoints/`: at the top of a clone, inside the package where it is installed."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def configs_folder() -> Path:
    """The configuration files that come with the package."""
    return _folder("configs")


def checkpoints_folder() -> Path:
    """The trained weights of the zoo."""
    return _folder("checkpoints")


def output_folder() -> Path:
    """Where new zoo weights are written by default: the clone's `checkpoints/`, or `./checkpoints` without a clone."""
    folder = checkpoints_folder()
    return Path("checkpoints") if folder.is_relative_to(PACKAGE) else folder


def _folder(name: str) -> Path:
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name
