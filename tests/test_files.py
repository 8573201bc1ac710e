"""Files are written whole or not at all, locks end with their process, and no two runs get the same folder."""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ortho_vit.files import (
    download,
    finite_or_none,
    lock,
    next_folder,
    partial_file,
    replacing,
    try_lock,
    write_json,
    write_whole,
)

REPOSITORY = Path(__file__).parents[1]

# Takes the lock, starts a child by fork as a data loader does, and says the child's number
HOLDER = """
import importlib.util, os, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("files", sys.argv[1])
files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
file = files.lock(Path(sys.argv[2]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


# ----------------------------------------------------------------------------------------------------------- writing


def test_a_file_is_replaced_when_it_is_complete(tmp_path):
    path = tmp_path / "new/folder/file"
    write_whole(path, b"old")
    with replacing(path) as partial:
        partial.write_bytes(b"new")
        assert path.read_bytes() == b"old"
        assert partial.parent == path.parent
    assert {p.name: p.read_bytes() for p in path.parent.iterdir()} == {"file": b"new"}


@pytest.mark.parametrize("only_writer", [True, False])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_after_an_error_the_old_file_is_all_there_is(tmp_path, error, only_writer):
    path = tmp_path / "file"
    write_whole(path, b"old")

    def fail():
        with replacing(path, only_writer=only_writer) as partial:
            partial.write_bytes(b"half")
            raise error

    with pytest.raises(error):
        fail()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"file": b"old"}


def test_content_reaches_the_disk_before_the_name(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    monkeypatch.setattr(Path, "replace", lambda *paths: calls.append("replace"))
    write_whole(tmp_path / "file", b"new")
    assert calls == ["fsync", "replace"]


def test_the_only_writer_overwrites_what_a_killed_process_has_left(tmp_path):
    path = tmp_path / "file"
    partial_file(path).write_bytes(b"left by a killed process")
    with replacing(path, only_writer=True) as partial:
        partial.write_bytes(b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"file": b"new"}


def test_several_writers_do_not_share_a_partial_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    with replacing(path) as one:
        monkeypatch.setattr(os, "getpid", lambda: 0)
        with replacing(path) as another:
            assert one != another
            another.write_bytes(b"another")
        one.write_bytes(b"one")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"file": b"one"}


def test_json_has_null_for_numbers_it_cannot_hold(tmp_path):
    assert [finite_or_none(float(name)) for name in ("nan", "-inf", "1.5")] == [None, None, 1.5]
    curve = [{"loss": math.inf, "heads": {"entropy": [math.nan, 1.5]}}, {"loss": 2, "name": "x"}]
    write_json(tmp_path / "result.json", {"curve": curve})
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["curve"] == [{"loss": None, "heads": {"entropy": [None, 1.5]}}, {"loss": 2, "name": "x"}]


# ---------------------------------------------------------------------------------------------------------- downloads


def test_a_download_appears_when_its_hash_is_right(tmp_path):
    source, target = tmp_path / "source", tmp_path / "data/target"
    source.write_bytes(b"x" * 2**21)
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match=r"its sha256 is .*, not 0: truncated or changed; nothing was kept"):
        download(source.as_uri(), target, "sha256", "0")
    assert list(target.parent.iterdir()) == []
    download(source.as_uri(), target, "sha256", sha256)
    assert target.read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("file:///nowhere/at/all", ConnectionError, "cannot be downloaded"),
        ("ftp://example.org/file", ValueError, "only https, http and file addresses"),
    ],
)
def test_what_cannot_be_downloaded_is_named(tmp_path, url, error, message):
    with pytest.raises(error, match=f"{url}.*{message}"):
        download(url, tmp_path / "target", "md5", "0")
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------- locks and folders


def test_no_two_callers_get_the_same_folder(tmp_path):
    (tmp_path / "run/version_7").mkdir(parents=True)
    (tmp_path / "run/version_old").mkdir()
    together = threading.Barrier(8)

    def create(_):
        together.wait()
        return next_folder(tmp_path / "run", "version_").name

    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(create, range(8)))
    assert sorted(created) == sorted(f"version_{number}" for number in range(8, 16))
    assert next_folder(tmp_path / "new/run", "version_").name == "version_0"


def test_a_lock_names_its_holder_and_ends_when_it_is_closed(tmp_path):
    path = tmp_path / "lock"
    with lock(path), pytest.raises(BlockingIOError, match=rf", process {os.getpid()}$"):
        lock(path)
    lock(path).close()


def test_a_killed_process_gives_up_its_lock_though_a_child_lives_on(tmp_path):
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, REPOSITORY / "ortho_vit/files.py", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        try:
            with pytest.raises(BlockingIOError, match=f"process {process.pid}"):
                lock(path)
            process.kill()
            process.wait()
            os.kill(child, 0)  # still there
            lock(path).close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_shared_look_at_a_lock_takes_nothing(tmp_path):
    path = tmp_path / "lock"
    with lock(path), path.open() as look:
        assert not try_lock(look, shared=True)
    with path.open() as look, path.open() as another:
        assert try_lock(look, shared=True)
        assert try_lock(another, shared=True)


def test_a_lock_can_be_waited_for(tmp_path):
    path, taken = tmp_path / "lock", []

    def wait():
        with lock(path, wait=True):
            taken.append("second")

    with lock(path):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.2)
        taken.append("first")
    thread.join(10)
    assert taken == ["first", "second"]
