"""A run: one row and one seed, in its own folder.

run.json        row, seed and arguments
config.yaml     the whole configuration
checkpoints/    last.ckpt, from which it resumes exactly
progress.json   how far it is
result.json     written once, at its end; a run that has one is done
log.txt         its output
lock            held by an OS lock (flock) while the run trains; the system releases it however the process ends
"""

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from ortho_vit.errors import UsageError
from ortho_vit.experiments.table1.presets import PRESETS
from ortho_vit.experiments.table1.rows import ROWS, Row
from ortho_vit.files import try_lock, write_json

REPOSITORY = Path(__file__).resolve().parents[3]  # of a clone; an installed package has no train.py there
INSTALLED = ("-c", "import sys; from ortho_vit.cli.entry import main; sys.exit(main())")

PROMPT = "$ python train.py "  # before each attempt in the log

State = Literal["finished", "diverged", "running", "interrupted", "waiting"]


@dataclass(frozen=True)
class Sweep:
    """The folder of the runs, and what the runs have in common."""

    out: Path
    preset: str
    data: str
    overrides: tuple[str, ...] = ()  # of the preset, for all runs
    machine: tuple[str, ...] = ()  # arguments that make no difference to the result

    @property
    def name(self) -> str:
        return f"{self.preset}-{self.data.lower()}"

    def run(self, row: Row, seed: int) -> "Run":
        config = f"configs/paper/{self.data.lower()}/{row.config}.yaml"
        common = (*PRESETS[self.preset].arguments, *self.overrides)
        seeds = ("--seed_everything", str(seed), "--data.seed", str(seed))
        arguments = ("--config", config, *common, *row.arguments, *seeds)
        folder = self.out.resolve() / self.name / row.name / f"seed{seed}"
        return Run(row, seed, folder, arguments, self.machine)

    def begun(self) -> list["Run"]:
        """Every run that has a folder, in the order of the rows."""
        runs = []
        for name, row in ROWS.items():
            folders = (self.out / self.name / name).glob("seed*")
            suffixes = [folder.name.removeprefix("seed") for folder in folders]
            runs += [self.run(row, seed) for seed in sorted(int(s) for s in suffixes if s.isdecimal())]
        return runs

    def check(self) -> None:
        """Raise UsageError where the folder has a run with other arguments."""
        for run in self.begun():
            run.check(run.started)


@dataclass(frozen=True)
class Run:
    row: Row
    seed: int
    folder: Path
    arguments: tuple[str, ...]
    machine: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.row.name}/seed{self.seed}"

    @property
    def started(self) -> dict[str, Any] | None:
        """Arguments and commit with which it was last started."""
        return _read(self.folder / "run.json")

    @property
    def result(self) -> dict[str, Any] | None:
        return _read(self.folder / "result.json")

    @property
    def progress(self) -> dict[str, Any] | None:
        return _read(self.folder / "progress.json")

    @property
    def checkpoint(self) -> Path | None:
        path = self.folder / "checkpoints" / "last.ckpt"
        return path if path.is_file() else None

    @property
    def error(self) -> str:
        """The last error message in its log since the last start."""
        log = self.folder / "log.txt"
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        errors = re.findall(r"^(?:error: |\w*Error: )(.*)$", text.rpartition(PROMPT)[2], re.MULTILINE)
        return errors[-1][:300] if errors else f"ended without a result; see {log}"

    def state(self) -> State:
        if result := self.result:
            return result["status"]
        with contextlib.suppress(FileNotFoundError), (self.folder / "lock").open(encoding="utf-8") as lock:
            if not try_lock(lock, shared=True):
                return "running"
        return "interrupted" if self.checkpoint else "waiting"

    def check(self, started: Mapping[str, Any] | None) -> None:
        """Raise UsageError where a run was started with other arguments, which would not be comparable."""
        theirs, ours = _options(started["arguments"] if started else self.arguments), _options(self.arguments)
        if theirs != ours:
            there = " ".join(option for option in theirs if option not in ours)
            now = " ".join(option for option in ours if option not in theirs)
            raise UsageError(
                f"{self.folder} was run with other arguments ({there or 'fewer'} there, {now or 'fewer'} now); "
                "give the same ones after --, or choose another --out"
            )

    def claim(self) -> IO[str] | None:
        """The locked lock file if the run is unfinished and no other process has it, otherwise None."""
        if self.result:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            lock = stack.enter_context((self.folder / "lock").open("a+", encoding="utf-8"))
            if not try_lock(lock, attempts=3) or self.result:
                return None
            self.check(self.started)  # another sweep may have started it in the meantime
            stack.pop_all()
            return lock

    def start(self, lock: IO[str], environment: Mapping[str, str]) -> subprocess.Popen:
        """Start or resume the run in a process that inherits the lock, which is released when that process ends."""
        with lock:
            self.write_started(self.arguments, commit())
            arguments = [*self.arguments, *self.machine, "--trainer.default_root_dir", str(self.folder)]
            if self.checkpoint:
                arguments += ["--ckpt_path", str(self.checkpoint)]
            else:
                (self.folder / "config.yaml").unlink(missing_ok=True)
            with (self.folder / "log.txt").open("a", encoding="utf-8") as log:
                log.write(f"{PROMPT}{shlex.join(arguments)}\n")
                log.flush()
                process = subprocess.Popen(
                    [sys.executable, *(("train.py",) if in_clone() else INSTALLED), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=REPOSITORY if in_clone() else self.folder,  # configurations are found from any folder
                    env=environment,
                    pass_fds=(lock.fileno(),),
                    start_new_session=True,  # Ctrl-C is for the sweep, which then stops its runs
                )
            lock.truncate(0)
            lock.write(f"{socket.gethostname()}, process {process.pid}")
        return process

    def write_started(self, arguments: Sequence[str], commit: str | None) -> None:
        what = {"row": self.row.name, "seed": self.seed, "arguments": arguments, "commit": commit}
        write_json(self.folder / "run.json", what)

    def owner(self) -> str:
        """Machine and process that hold the lock, or held it last."""
        lock = self.folder / "lock"
        return lock.read_text(encoding="utf-8") if lock.is_file() else ""


def _options(arguments: Sequence[str]) -> list[str]:
    """Each option with its values, except those that do not change what is trained.

    These are the recorder, whose module has been renamed, and validation, which `augmented` did not have at first.
    """
    options = [text.strip() for text in re.split(r"(?:^| )(?=--)", " ".join(arguments)) if text]
    return [
        option
        for option in options
        if not re.search(r"\.Recorder$|_val_(?:batches|every_n_epoch) \d+$", option)
    ]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def in_clone() -> bool:
    return (REPOSITORY / "train.py").is_file()


def commit() -> str | None:
    """The commit of the code, with "-dirty" if it has uncommitted changes; None outside of a clone."""
    if not in_clone():
        return None
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def environment(slot: int, workers: int, gpus: Sequence[str]) -> dict[str, str]:
    """Environment variables for the run in one of `workers` slots: its share of the cores, and one GPU.

    SLURM's variables are removed: they describe the sweep, and a run is one process on one device.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variables.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return variables
