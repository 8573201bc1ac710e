"""Start runs, watch them, stop them.

Any number of sweeps may share a folder, on one machine or several: each takes the runs that are neither done nor claimed.
A sweep tries each run once; a run that fails or is killed is resumed by the next sweep.

A job scheduler such as SLURM or Ray would do the same, but a reader has none at hand; a lock in the folder of each run
(`Run.claim`) and this loop need nothing besides a shared file system.
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
HOPELESS = 3  # a sweep ends after this many failures without a success

Say = Callable[[str], None]
Job = tuple[Run, subprocess.Popen]


@dataclass
class Outcome:
    succeeded: int = 0
    failed: dict[str, str] = field(default_factory=dict)  # name of the run: its error
    stopped: bool = False

    @property
    def hopeless(self) -> bool:
        return len(self.failed) >= HOPELESS and not self.succeeded


def sweep(runs: Sequence[Run], workers: int, say: Say, show: Callable[[], None]) -> Outcome:
    """Do the unfinished ones of `runs`, `workers` at a time; `show` is called about once per second."""
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
                        _add_to_outcome(run, process.returncode, outcome, say)
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


def _add_to_outcome(run: Run, code: int, outcome: Outcome, say: Say) -> None:
    """Count a run that has ended: as succeeded if it has a result, even that it diverged, otherwise as failed."""
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
    """Ask the processes to stop after their current batch; kill those that do not within `GRACE_SECONDS`."""
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
    """A context in which SIGTERM (from a batch system) and SIGHUP (from a closed terminal) act like Ctrl-C."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # which nohup sets
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def visible_gpus() -> list[str]:
    """The GPUs that runs can use, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] if named else [str(i) for i in range(count)]
