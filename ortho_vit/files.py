"""Files that are written whole or not at all, downloads, locks that end with their process, folders of one process each.

This module imports no other module of the package.
"""

import contextlib
import hashlib
import http.client
import itertools
import json
import math
import os
import socket
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

_locked: weakref.WeakSet[IO[str]] = weakref.WeakSet()


# ------------------------------------------------------------------------------------------------------------- writing


def partial_file(path: Path) -> Path:
    """Where a file is written until it is complete: beside its target, as a rename must not cross file systems."""
    return path.with_name(f".{path.name}.partial")


def complete(partial: Path, path: Path) -> None:
    """Give a file that has been written its name, once its content has reached the disk."""
    descriptor = os.open(partial, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    partial.replace(path)


@contextlib.contextmanager
def replacing(path: Path, *, only_writer: bool = False) -> Iterator[Path]:
    """A path to write to within this context, which then becomes `path`; after an error it is removed and `path` kept.

    With `only_writer` no other process may write `path` at the same time.  Then the partial file has a fixed name, so
    that the one of a killed process is overwritten by the next.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_file(path if only_writer else path.with_name(f"{path.name}.{os.getpid()}"))
    try:
        yield partial
        complete(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there completely or not at all."""
    with replacing(path) as partial:
        partial.write_bytes(data)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write plain values as one line of JSON, completely or not at all; NaN and infinity become null."""
    write_whole(path, (json.dumps(as_json(content), allow_nan=False) + "\n").encode())


def as_json(value: Any) -> Any:
    """Nested plain values as JSON can hold them: None (null) instead of NaN and infinity."""
    if isinstance(value, dict):
        return {key: as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return finite_or_none(value) if isinstance(value, float) else value


def finite_or_none(value: Any) -> float | None:
    """A number as JSON can hold it: None (null) instead of NaN and infinity."""
    return float(value) if value is not None and math.isfinite(value) else None


def printable(text: str) -> str:
    """The text with bytes of file names that are not UTF-8 replaced, so that any terminal can print it."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# ----------------------------------------------------------------------------------------------------------- downloads


def read_address(url: str) -> Iterator[bytes]:
    """The content of a web address in pieces.  Raises ConnectionError where it cannot be read."""
    if not url.startswith(("https://", "http://", "file://")):
        raise ValueError(f"{url}: only https, http and file addresses are downloaded")
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            while piece := response.read(2**20):
                yield piece
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        raise ConnectionError(f"{url}: cannot be downloaded ({error})") from error


def download(url: str, target: Path, algorithm: str, digest: str) -> None:
    """Download a file, which appears under its name when it is complete.

    Raises ConnectionError where it cannot be read, ValueError where its hash by `algorithm` is not `digest`.
    """
    found = hashlib.new(algorithm, usedforsecurity=False)
    with replacing(target) as partial:
        with partial.open("wb") as file:
            for piece in read_address(url):
                found.update(piece)
                file.write(piece)
        if found.hexdigest() != digest:
            raise ValueError(
                f"{url}: its {algorithm} is {found.hexdigest()}, not {digest}: truncated or changed; nothing was kept, try "
                "again"
            )


# --------------------------------------------------------------------------------------------------- locks and folders


def lock(path: Path, *, wait: bool = False) -> IO[str]:
    """Open and lock a file, until it is closed or this process ends, however it ends.

    The file says who has it.  Where another process holds the lock, wait for it, or raise BlockingIOError with that text.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("a+", encoding="utf-8"))
        if not try_lock(file, attempts=3, wait=wait):
            file.seek(0)
            raise BlockingIOError(file.read() or "another process")
        file.truncate(0)
        file.write(f"{socket.gethostname()}, process {os.getpid()}")
        file.flush()
        _locked.add(file)
        stack.pop_all()
        return file


def try_lock(file: IO[str], *, shared: bool = False, attempts: int = 1, wait: bool = False) -> bool:
    """Whether an open file could be locked; tried more than once where a look at its state may be in the way.

    A file system without locks refuses nothing.  `wait` returns once it is locked.
    """
    if fcntl is None:
        return True
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    for attempt in range(attempts):
        try:
            fcntl.flock(file, kind)
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
