"""Start runs, watch them, stop them.

Any number of sweeps may share a folder, on one machine or several: each takes whatever is neither done nor claimed.
A sweep tries a run once; one that fails or is killed stays for the next sweep, which resumes it.

This scheduler and the display in `progress.py` earn their lines as a table takes days: it is interrupted and resumed, shared
by machines, and watched, without a cluster's tools.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

import torch

from ortho_vit.experiments.result import duration
from ortho_vit.experiments.table1.runs import Run, environment

POLL_SECONDS = 1.0
GRACE_SECONDS = 30.0  # for a run to finish its batch once it is asked to stop
HOPELESS = 3  # failures before anything succeeded

Say = Callable[[str], None]
Job = tuple[Run, subprocess.Popen]


@dataclass
class Outcome:
    succeeded: int = 0
    failed: dict[str, str] = field(default_factory=dict)  # name of the run: what it said
    stopped: bool = False

    @property
    def hopeless(self) -> bool:
        return len(self.failed) >= HOPELESS and not self.succeeded


def sweep(runs: Sequence[Run], workers: int, say: Say, show: Callable[[], None]) -> Outcome:
    """Do what is left of `runs`, `workers` at a time; `show` is called about once a second."""
    outcome, tried, active = Outcome(), set[str](), dict[int, Job]()
    gpus = visible_gpus()
    with interruptible():
        try:
            while True:
                free = [] if outcome.hopeless else [slot for slot in range(workers) if slot not in active]
                for slot in free:
                    if job := _start_next(runs, tried, environment(slot, workers, gpus), say):
                        active[slot] = job
                if not active:
                    return outcome
                show()
                time.sleep(POLL_SECONDS)
                for slot, (run, process) in list(active.items()):
                    if process.poll() is not None:
                        del active[slot]
                        _take_note(run, process.returncode, outcome, say)
        except KeyboardInterrupt:
            outcome.stopped = True
            return outcome
        finally:
            stop([process for _, process in active.values()])


def _start_next(runs: Sequence[Run], tried: set[str], variables: dict[str, str], say: Say) -> Job | None:
    for run in runs:
        if run.name not in tried and (lock := run.claim()):
            tried.add(run.name)
            say(f"{'resumed' if run.checkpoint else 'started'} {run.name}")
            return run, run.start(lock, variables)
    return None


def _take_note(run: Run, code: int, outcome: Outcome, say: Say) -> None:
    """Of a run that has ended: with a result, which may be that it diverged, or without."""
    result = run.result
    if result is None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else run.error
        if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            how = f"was stopped by {signal.Signals(code - 128).name}"
        outcome.failed[run.name] = how
        say(f"failed {run.name}: {how}")
        return
    outcome.succeeded += 1
    accuracy = result.get("test_accuracy")
    what = f"test error {1 - accuracy:.2%}" if accuracy is not None else result.get("reason", "")
    say(f"{result['status']} {run.name}: {what}, {duration(result['seconds'])}")


def stop(processes: Sequence[subprocess.Popen]) -> None:
    """Ask the processes to end after the batch they are at; end those that do not."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        for process in processes:
            process.kill()
    for process in processes:
        process.wait()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM, as a batch system sends it, is treated as Ctrl-C, and so is SIGHUP, of a closed terminal."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def visible_gpus() -> list[str]:
    """The devices a run may be given, as CUDA_VISIBLE_DEVICES would name them."""
    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] if named else [str(i) for i in range(count)]
