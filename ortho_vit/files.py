"""Files that several processes use at once: a lock that ends with its process, folders that only one of them creates.

This module imports nothing of ours.
"""

import contextlib
import itertools
import os
import socket
import time
import weakref
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

_locked: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def lock(path: Path) -> IO[str]:
    """Open and lock a file, until it is closed or this process ends, however it ends.

    The file says who has it.  Raises BlockingIOError, with that text, where another process holds the lock.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("a+", encoding="utf-8"))
        if not try_lock(file, attempts=3):
            file.seek(0)
            raise BlockingIOError(file.read() or "another process")
        file.truncate(0)
        file.write(f"{socket.gethostname()}, process {os.getpid()}")
        file.flush()
        _locked.add(file)
        stack.pop_all()
        return file


def try_lock(file: IO[str], *, shared: bool = False, attempts: int = 1) -> bool:
    """Whether an open file could be locked; tried more than once where a look at its state may be in the way.

    A file system without locks refuses nothing.
    """
    if fcntl is None:
        return True
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    for attempt in range(attempts):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if attempt + 1 < attempts:
                time.sleep(0.05)
        except OSError:
            return True
    return False


def _close_in_fork() -> None:
    """A worker of a data loader must not keep the lock of a run whose process was killed."""
    for file in list(_locked):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_fork)


def next_folder(parent: Path, prefix: str) -> Path:
    """Create and return `parent/prefixN`, N one more than the largest there is; no two processes get the same."""
    parent.mkdir(parents=True, exist_ok=True)
    suffixes = [path.name.removeprefix(prefix) for path in parent.glob(f"{prefix}*")]
    first = max((int(suffix) + 1 for suffix in suffixes if suffix.isdecimal()), default=0)
    for number in itertools.count(first):
        with contextlib.suppress(FileExistsError):
            folder = parent / f"{prefix}{number}"
            folder.mkdir()
            return folder
    raise AssertionError  # `count` has no end
