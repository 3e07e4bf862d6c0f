"""The small files of a run on a bucket: they are written into a local folder, the spool, and copied to the bucket from there and back.

A log is appended to and a config is replaced by a rename; a store can do neither. So a run writes such files as every run does, and a
thread copies what has changed to the bucket every few seconds, at a save and at the end. A lost machine loses at most these seconds of
lines.

A file is an object of the same name below `records/`, and what it has beyond the first megabyte is in further objects of a megabyte, so
that a log of any size sends only its end. Each process copies its own files.

Which of the two is the truth at a start? The bucket's `spool.json` has the identity of the local folder that wrote last. That folder has
all lines, also those that were not sent. Otherwise the run went on elsewhere, and the folder is replaced by what the bucket has.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import tempfile
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jgt.document import InputError, shown

from .bucket import Bucket, is_url
from .disk import replaced
from .json_text import read_object
from .locks import lock
from .streams import say
from .worker import Worker

SPOOL = "spool.json"
_FILL = "fill.lock"
NOT_COPIED = (SPOOL, _FILL)
"""The names of files that are about the spool itself."""
RECORDS = "records"
_PART_BYTES = 1 << 20
_MOST_BYTES = 1 << 30
_PART = re.compile(r"(.+)\.~([1-9][0-9]{0,5})")
_THREADS = 8


class Mirror:
    """Copies a process's files from the spool to the bucket.

    is_mine(name): whether this process copies a file, by its name relative to the folder. may_write(): asked before each copy.
    """

    def __init__(self, bucket: Bucket, folder: Path, seconds: float, is_mine: Callable[[str], bool], may_write: Callable[[], bool]):
        self._bucket, self._folder = bucket.below(RECORDS), folder
        self._is_mine, self._may_write = is_mine, may_write
        self._sent: dict[str, list[int]] | None = None
        """A checksum of each part that the bucket has."""
        self._lock, self._has_failed = threading.Lock(), False
        self._worker = Worker("mirror", seconds, lambda is_last: self.copy())
        self._worker.start()

    def wake(self) -> None:
        """Copies soon, without waiting."""
        self._worker.wake()

    def close(self) -> None:
        """Copies for the last time."""
        self._worker.close()

    def flush(self, seconds: float) -> None:
        """Copies now, for at most so many seconds: the process ends."""
        last = threading.Thread(target=self.copy, daemon=True)
        with contextlib.suppress(RuntimeError):
            last.start()
            last.join(seconds)

    def copy(self) -> None:
        """Copies what has changed. A failure is said once, and tried again the next time."""
        try:
            with self._lock:
                if self._may_write():
                    self._copy()
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                say(f"records cannot be copied to {self._bucket.url()}: {error.strerror or error}. Training continues, and tries again")
            self._has_failed = True

    def _copy(self) -> None:
        if self._sent is None:
            self._sent = {}
            for name in self._bucket.names():
                file, part = _file_of(name)
                if self._is_mine(file):
                    parts = self._sent.setdefault(file, [])
                    parts += [-1] * (part + 1 - len(parts))
        files = dict(_files(self._folder, self._is_mine))
        for name in self._sent.keys() - files.keys():
            self._bucket.remove(_parts(name, len(self._sent[name])))
            del self._sent[name]
        for name, path in files.items():
            self._send(name, path, self._sent.setdefault(name, []))

    def _send(self, name: str, path: Path, sent: list[int]) -> None:
        # A file that is gone since the listing is removed the next time.
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            number, content = 0, b""
            # A part that is not full is the last one, though the file may grow meanwhile.
            while not number or len(content) == _PART_BYTES:
                content = file.read(_PART_BYTES)
                crc = zlib.crc32(content)
                if sent[number : number + 1] != [crc]:
                    self._bucket.write(_part(name, number), content)
                    sent[number : number + 1] = [crc]
                number += 1
            if sent[number:]:
                self._bucket.remove(_parts(name, len(sent), number))
                del sent[number:]


def fetch_records(
    bucket: Bucket, folder: Path, wanted: Callable[[str], object] = lambda name: True, known: dict[str, bytes] | None = None
) -> None:
    """Writes the small files of a run on a bucket into a folder. Raises InputError if there is no run, and OSError.

    wanted: chooses files by name. known: the versions of what the folder has already, by object, which is not read again.
    """
    records = bucket.below(RECORDS)
    names = records.names()
    if not names:
        raise InputError([f"{bucket.url()}: is not a run: it has no {RECORDS}/"])
    parts: dict[str, list[int]] = {}
    for name in names:
        file, part = _file_of(name)
        if not _is_safe(file):
            raise InputError([f"{records.url(shown(name))}: is not the name of a file of a run. Remove it"])
        parts.setdefault(file, []).append(part)

    def fetch(item: tuple[str, list[int]]) -> None:
        _fetch(records, item[0], sorted(item[1]), folder / item[0], known)

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(fetch, [item for item in parts.items() if wanted(item[0])]))


def _fetch(records: Bucket, name: str, numbers: Sequence[int], path: Path, known: dict[str, bytes] | None) -> None:
    """Writes a file from its parts. known: as in `fetch_records`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if known and path.is_file() else "wb") as file:
        for place, number in enumerate(numbers):
            part = _part(name, number)
            with contextlib.suppress(FileNotFoundError):
                if known is not None and known.get(part) == records.read(part, 0, 0).version:
                    continue
                found = records.read(part)
                file.seek(place * _PART_BYTES)
                file.write(found.content[:_PART_BYTES])
                if number == numbers[-1]:
                    file.truncate()
                if known is not None:
                    known[part] = found.version
        file.truncate(min(file.seek(0, os.SEEK_END), len(numbers) * _PART_BYTES))


@contextlib.contextmanager
def local_copies(places: Sequence[str]) -> Iterator[list[Path]]:
    """Folders with the small files of runs, which are gone afterwards for those that are URLs. Raises InputError and OSError."""
    with contextlib.ExitStack() as stack:
        folders = [Path(place) for place in places]
        for number, place in enumerate(places):
            if is_url(place):
                folders[number] = Path(stack.enter_context(tempfile.TemporaryDirectory()), place.rstrip("/").rpartition("/")[2])
                fetch_records(Bucket(place), folders[number])
        yield folders


def fill_spool(bucket: Bucket, folder: Path, kept: Collection[str], remove: Callable[[Path], None], *, strict: bool = False) -> None:
    """Makes the spool what the bucket has, unless the spool wrote last.

    kept: names that stay in the spool. remove: removes a file or a folder. strict: not even if it was filled since another spool wrote.
    Raises InputError if the folder belongs to another run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Other processes of this run may have the same folder.
    with (folder / _FILL).open("w") as file:
        with contextlib.suppress(OSError):
            lock(file, waits=True)
        here, there = _parsed(_read(folder / SPOOL)), _there(bucket)
        old = [path for path in folder.iterdir() if path.name not in (*kept, _FILL, SPOOL)]
        if (old and not here) or (here and here.get("url") != bucket.url()):
            what = f"belongs to the run {shown(str(here.get('url')))}" if here else "has files of another run"
            raise InputError([f"{folder}: {what}, but is to be the local folder of {bucket.url()}. Name another one (run.spool=...)"])
        if here and there.get("id") in (here.get("id"), None if strict else here.get("filled_from")):
            return
        # Another identity than the bucket's, until this spool writes. The folder's own never changes.
        values = {"url": bucket.url(), "folder": here.get("folder") or secrets.token_hex(8), "id": secrets.token_hex(8)}
        # If this start dies, the next one finds a folder of this run that was filled from nothing, and fills it again.
        _write(folder, values)
        for path in old:
            remove(path)
        if there:
            # The identity in the bucket belongs to the folder that wrote last, and must not become this folder's.
            fetch_records(bucket, folder, lambda name: name not in NOT_COPIED)
        _write(folder, {**values, "filled_from": there.get("id")})


def adopt_spool(bucket: Bucket, folder: Path) -> None:
    """Notes in the bucket that this spool writes from now on."""
    here = _parsed(_read(folder / SPOOL))
    if here.get("id") != _there(bucket).get("id"):
        bucket.write(f"{RECORDS}/{SPOOL}", json.dumps(here).encode())


def spool_of(folder: Path) -> str:
    """The identity of a spool that was filled, which no other folder has, not even a copy of it."""
    return f"{_parsed(_read(folder / SPOOL)).get('folder')}-{folder.stat().st_ino}"


def _there(bucket: Bucket) -> dict[str, object]:
    with contextlib.suppress(FileNotFoundError):
        return _parsed(bucket.read(f"{RECORDS}/{SPOOL}").content)
    return {}


def _read(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def _parsed(content: bytes) -> dict[str, object]:
    return read_object(content) or {}


def _write(folder: Path, values: Mapping[str, object]) -> None:
    with replaced(folder / SPOOL, is_of_run=True) as new:
        new.write_text(json.dumps(values))


def _files(folder: Path, is_mine: Callable[[str], bool]) -> Iterator[tuple[str, Path]]:
    """The files of a folder that are to be copied, by name."""
    for inner, folders, files in os.walk(folder):
        here = Path(inner).relative_to(folder)
        folders[:] = [name for name in folders if is_mine(str(here / name))]
        for name in files:
            path = Path(inner, name)
            # No link, which may lead anywhere.
            with contextlib.suppress(OSError):
                if is_mine(str(here / name)) and not path.is_symlink() and path.is_file() and path.stat().st_size <= _MOST_BYTES:
                    yield str(here / name), path


def _part(name: str, number: int) -> str:
    return f"{name}.~{number}" if number else name


def _parts(name: str, end: int, begin: int = 0) -> list[str]:
    return [_part(name, number) for number in range(begin, end)]


def _file_of(name: str) -> tuple[str, int]:
    """The file that an object is a part of, and the number of the part."""
    match = _PART.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, 0)


def _is_safe(name: str) -> bool:
    return name.isprintable() and "\0" not in name and not {"", ".", ".."} & set(name.split("/"))
