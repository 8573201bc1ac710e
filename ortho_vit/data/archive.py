"""Files of a data set, in a folder or inside a `.tar.gz`, and the download of the latter.

An archive is read where it lies; nothing is extracted, so a hostile one has no path to write to and a broken
one leaves nothing behind.  All that goes wrong is reported in one line that names the file.
"""

import gzip
import hashlib
import http.client
import os
import tarfile
import urllib.request
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

MAX_BYTES = 2**28  # of one file in an archive; the largest official one has 153,700,000
MAX_TOTAL = 2**30  # of all of them


def read_folder(folder: Path, names: Sequence[str]) -> list[bytes]:
    """The contents of the named files of a folder."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} is incomplete: it has no {', '.join(missing)}; extract the archive again"
        )
    return [(folder / name).read_bytes() for name in names]


def read_archive(archive: Path, folder: str, names: Sequence[str]) -> list[bytes]:
    """The contents of `folder/name` for each name, from a `.tar.gz` that may come from anywhere."""
    try:
        contents = _read_members(archive, {f"{folder}/{name}" for name in names})
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ValueError(f"{archive} is damaged ({error}); delete it and download it again") from error
    missing = [name for name in names if f"{folder}/{name}" not in contents]
    if missing:
        raise ValueError(f"{archive} is incomplete: it has no {folder}/{missing[0]}; download it again")
    return [contents[f"{folder}/{name}"] for name in names]


def _read_members(archive: Path, wanted: set[str]) -> dict[str, bytes]:
    """Go through the whole archive, for what is wanted, for what should not be there, and for its checksum."""
    contents = {}
    with _Limited(archive) as stream:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                    raise tarfile.TarError(
                        f"refused: its member {member.name!r} could leave the folder it belongs to"
                    )
                _require_size(member.size, MAX_BYTES)  # also of those that tarfile would skip, block by block
                if str(path) in wanted and (file := tar.extractfile(member)):
                    contents[str(path)] = file.read()
        while stream.read(2**20):  # tarfile stops before the end, where gzip keeps its checksum
            pass
    return contents


class _Limited(gzip.GzipFile):
    """Ends in an error beyond `MAX_TOTAL` bytes, whatever they claim to be."""

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        _require_size(self.tell(), MAX_TOTAL)
        return content


def _require_size(size: int, most: int) -> None:
    if size > most:
        raise tarfile.TarError(f"refused: it unpacks to more than {most} bytes")


def download(url: str, target: Path, md5: str) -> None:
    """Fetch a file; it appears under its name only when it is complete and its MD5 is right."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with part.open("wb") as out, urllib.request.urlopen(url, timeout=60) as response:
            while chunk := response.read(2**20):
                digest.update(chunk)
                out.write(chunk)
        if digest.hexdigest() != md5:
            raise ValueError(
                f"{url}: the download's MD5 is {digest.hexdigest()}, not {md5}; nothing was kept, try again"
            )
        part.replace(target)
    except (OSError, http.client.HTTPException) as error:
        by_hand = f"fetch it by hand and put it into {target.parent}"
        raise ConnectionError(f"could not download {url} ({error}); {by_hand}") from error
    finally:
        part.unlink(missing_ok=True)
