"""The state of a sweep: what is done, how far the running ones are, how long the rest will take."""

import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ortho_vit.experiments.result import duration
from ortho_vit.experiments.table1.runs import Run


def overview(runs: Sequence[Run]) -> list[str]:
    """One line about the sweep, and one about each run in progress."""
    states = [run.state() for run in runs]
    count = Counter(states)
    done = count["finished"] + count["diverged"]
    left = count["interrupted"] + count["waiting"]
    parts = [f"{done} of {len(runs)} runs done", f"{count['running']} running", f"{left} left"]
    if count["diverged"]:
        parts[0] += f" ({count['diverged']} diverged)"
    if count["interrupted"]:
        parts[2] += f" ({count['interrupted']} begun)"
    if (seconds := remaining(runs, states)) is not None:
        parts.append(f"about {duration(seconds)} to go")
    running = [run for run, state in zip(runs, states, strict=True) if state == "running"]
    return [", ".join(parts), *(f"  {run.name}  {_where(run.progress)}  ({run.owner()})" for run in running)]


def _where(progress: dict[str, Any] | None) -> str:
    if not progress:
        return "starting"
    epoch = min(progress["epoch"] + 1, progress["epochs"])
    return f"epoch {epoch}/{progress['epochs']}  step {progress['step']}/{progress['steps']}"


def remaining(runs: Sequence[Run], states: Sequence[str]) -> float | None:
    """Seconds until all runs are done, from the mean time per step so far and the number of runs in progress.

    None before the first step, and when nothing runs.
    """
    seconds = steps = longest = todo = 0.0
    for run, state in zip(runs, states, strict=True):
        progress = run.progress if state != "waiting" else None
        if progress:
            seconds, steps = seconds + progress["seconds"], steps + progress["step"]
            longest = max(longest, progress["steps"])
        if state not in ("finished", "diverged"):
            todo += 1 - (progress["step"] / progress["steps"] if progress else 0)
    running = states.count("running")
    return todo * longest * seconds / steps / running if steps and running else None


class Display:
    """Messages, and below them on a terminal the current overview; in a log the overview comes once per minute.

    A library's live display would not write the overview to a log.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self._live = sys.stdout.isatty()
        self._lines = 0  # of the overview, which the next message replaces
        self._shown = 0.0

    def say(self, *lines: str) -> None:
        if self._lines:
            print(f"\033[{self._lines}A\033[J", end="")
        self._lines = 0
        print("\n".join(lines), flush=True)

    def show(self) -> None:
        if not self._live and time.monotonic() - self._shown < 60:
            return
        self._shown = time.monotonic()
        lines = overview(self.runs)
        if self._live:  # a line that wraps cannot be erased
            lines = [line[: shutil.get_terminal_size().columns - 1] for line in lines]
        self.say(*lines)
        self._lines = len(lines) if self._live else 0
