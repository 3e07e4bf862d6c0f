"""Objects as local files: they are copied into a folder as a whole, and stay there for the next time.

Everything that reads data maps files, seeks in them and looks whether they have changed. A store does none of that. So what a URL names is
copied before it is read, and what reads it knows of no stores. The folder is laid out like the cache of Hugging Face:

    blobs/KEY              an object; the key is made of its URL and its version, so a blob never changes
    snapshots/KEY/NAME     relative links to the blobs of some objects, by their names: the folder may be moved, or have several paths
    snapshots/KEY.lock     locked, shared, by each process that uses the snapshot, until it ends

One process at a time copies objects, the others wait, and then find them. A blob gets its name when all of it is on the disk, so a killed
process leaves nothing but a file that the next one removes. Where there is no room, the blobs that were not used for the longest time go,
but none that a process uses: a cache that cannot hold what is in use would copy the same objects in each epoch, and is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jgt.document import InputError, shown

from .bucket import Bucket, is_url
from .disk import cache_folder
from .locks import lock
from .streams import say

_PIECE_BYTES = 1 << 26
_THREADS, _SMALL_THREADS = 4, 32
_SAY_SECONDS = 10.0
_TEXTS = (".json", ".jinja", ".txt", ".model")
"""How the names of files of a published model end that describe the model and its tokenizer."""
_in_use: dict[Path, int] = {}
"""The open files of the locks of the snapshots that this process uses, until it ends."""


@dataclass(frozen=True, kw_only=True)
class ObjectCache:
    """A folder for copies of objects. folder: None for the user's own. most_bytes: the limit of all copies together; None: the disk's."""

    folder: str | None = None
    most_bytes: int | None = None

    @property
    def path(self) -> Path:
        """The folder: `objects` in the user's cache, if no other is named. Raises InputError."""
        if self.folder is not None:
            return Path(self.folder).absolute()
        try:
            return cache_folder("objects")
        except RuntimeError:
            raise InputError(["data.cache: this user has no home for copies of objects. Name a folder (data.cache=...)"]) from None

    def fetch(self, bucket: Bucket, names: Sequence[str]) -> Path:
        """A folder with the objects as files of their names, which stay until the process ends.

        Raises InputError for names that files cannot have, an object that changes meanwhile and a cache without room, and OSError.
        """
        _check_names(bucket, names)
        with ThreadPoolExecutor(_SMALL_THREADS) as pool:
            versions = dict(zip(names, pool.map(lambda name: bucket.read(name, 0, 0).version, names), strict=True))
        keys = {name: _key(bucket.url(name).encode(), version) for name, version in versions.items()}
        snapshot = self.path / "snapshots" / _key(*(f"{name}\0{key}".encode() for name, key in sorted(keys.items())))
        is_known = snapshot.is_dir()
        (self.path / "blobs").mkdir(parents=True, exist_ok=True)
        snapshot.mkdir(parents=True, exist_ok=True)
        with _in_use_from_now(snapshot.with_suffix(".lock")):
            # Nobody removes what is in use, so nothing else has to be locked.
            if not (is_known and all((snapshot / name).exists() for name in names)):
                with self._locked():
                    self._fill(bucket, snapshot, keys, versions)
        for key in keys.values():
            # The time of the last use. The other one is the same for each copy of an object, which encoded text is known by.
            os.utime(self.path / "blobs" / key, (time.time(), 0))
        return snapshot

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.path / "fetch.lock").open("w") as file:
            if not lock(file):
                say(f"waiting for another process, which copies objects into {self.path}")
                lock(file, waits=True)
            yield

    def _fill(self, bucket: Bucket, snapshot: Path, keys: Mapping[str, str], versions: Mapping[str, bytes]) -> None:
        blobs = self.path / "blobs"
        for left in blobs.glob("*.part"):
            left.unlink()
        for name, key in keys.items():
            link, target = snapshot / name, os.path.relpath(blobs / key, (snapshot / name).parent)
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink() or str(link.readlink()) != target:
                link.unlink(missing_ok=True)
                link.symlink_to(target)
        missing = [name for name, key in keys.items() if not (blobs / key).exists()]
        with ThreadPoolExecutor(_SMALL_THREADS) as pool:
            sizes = dict(zip(missing, pool.map(bucket.size, missing), strict=True))
        self._make_room(bucket, sum(sizes.values()))
        total, done, said = sum(sizes.values()), 0, time.monotonic()
        if missing:
            say(f"copying {len(missing):,} objects of {bucket.url()} into {self.path}: {_mb(total)}")
        pieces = [(name, begin) for name, size in sizes.items() for begin in range(0, max(size, 1), _PIECE_BYTES)]

        def copy(piece: tuple[str, int]) -> int:
            name, begin = piece
            found = bucket.read(name, begin, end := min(begin + _PIECE_BYTES, sizes[name]))
            if found.version != versions[name] or len(found.content) != end - begin:
                raise InputError([f"{bucket.url(name)}: has changed while it was copied. Start again when nobody writes it"])
            with os.fdopen(os.open(_part(blobs / keys[name]), os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
                file.seek(begin)
                file.write(found.content)
                file.flush()
                os.fsync(file.fileno())
            return len(found.content)

        with ThreadPoolExecutor(_THREADS) as pool:
            for (name, begin), count in zip(pieces, pool.map(copy, pieces), strict=True):
                done += count
                if begin + _PIECE_BYTES >= sizes[name]:
                    _part(blobs / keys[name]).rename(blobs / keys[name])
                if time.monotonic() - said > _SAY_SECONDS:
                    said = time.monotonic()
                    say(f"copied {_mb(done)} of {_mb(total)} of {bucket.url()}")

    def _make_room(self, bucket: Bucket, new: int) -> None:
        """Removes blobs that nobody uses until there is room for `new` bytes. Raises InputError if that is not enough."""
        states = {blob: blob.stat() for blob in (self.path / "blobs").iterdir()}
        present = sum(state.st_size for state in states.values())
        room = min(math.inf if self.most_bytes is None else self.most_bytes, present + shutil.disk_usage(self.path).free)
        if present + new <= room:
            return
        # Held until the end, because a process may begin to use a snapshot at any moment.
        with contextlib.ExitStack() as stack:
            used = {blob for snapshot in self._snapshots_in_use(stack) for blob in _blobs_of(snapshot)}
            needed = new + sum(state.st_size for blob, state in states.items() if blob.name in used)
            if needed > room:
                why = f"has room for {_mb(room)}, but what this run and others on this machine read has {_mb(needed)}"
                remedy = "Raise data.cache_bytes, or name a folder on a larger disk (data.cache)"
                raise InputError([f"{bucket.url()}: the cache {self.path} {why}. {remedy}"])
            for blob in sorted((blob for blob in states if blob.name not in used), key=lambda blob: states[blob].st_atime_ns):
                if present + new > room:
                    blob.unlink()
                    present -= states[blob].st_size

    def _snapshots_in_use(self, stack: contextlib.ExitStack) -> Iterator[Path]:
        """The snapshots that a process uses. The locks of the others are held until the stack is closed."""
        for path in (self.path / "snapshots").glob("*.lock"):
            file = stack.enter_context(path.open("ab"))
            if not lock(file):
                yield path.with_suffix("")


@contextlib.contextmanager
def _in_use_from_now(path: Path) -> Iterator[None]:
    """Uses a snapshot from now on, unless there is an error inside."""
    if path in _in_use:
        yield
        return
    with contextlib.ExitStack() as stack:
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        stack.callback(os.close, file)
        lock(file, waits=True, is_shared=True)
        yield
        stack.pop_all()
        _in_use[path] = file


def _blobs_of(snapshot: Path) -> Iterator[str]:
    """The names of the blobs that a snapshot has."""
    return (path.readlink().name for path in snapshot.rglob("*") if path.is_symlink())


def local_folder(place: str, needed: str = "config.json", *, weights: bool = True) -> Path:
    """The folder of a published model at a path, or a copy of the one at a URL. weights: whether the copy has more than its texts.

    Raises InputError, also for a URL below which the file `needed` is missing.
    """
    if not is_url(place):
        return Path(place)
    bucket = Bucket(place)
    try:
        # Without folders, in which other forms of the same weights may be.
        found = [name for name in bucket.names() if "/" not in name or name.startswith("additional_chat_templates/")]
        if needed not in found:
            raise InputError([f"{place}: is not a folder of Hugging Face: {needed} is missing"])
        return ObjectCache().fetch(bucket, [name for name in found if weights or name.endswith(_TEXTS)])
    except OSError as error:
        raise InputError([f"{error.filename or place}: cannot be read: {error.strerror or error}"]) from error


def local_file(place: str) -> Path:
    """A file at a path, or a copy of the one at a URL, beside which are the other texts of its folder. Raises InputError."""
    if not is_url(place):
        return Path(place)
    folder, _, name = place.rpartition("/")
    return local_folder(folder, name, weights=False) / name


def _check_names(bucket: Bucket, names: Sequence[str]) -> None:
    """Raises InputError for names that cannot be those of files below one folder."""
    above = {name[:n] for name in names for n, letter in enumerate(name) if letter == "/"}
    bad = [name for name in names if not name.isprintable() or {"", ".", ".."} & set(name.split("/")) or name in above]
    if bad:
        raise InputError([f"{bucket.url()}: {shown(bad[0])} cannot be the name of a file beside the others. Leave it out"])


def _key(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _part(blob: Path) -> Path:
    return blob.with_suffix(".part")


def _mb(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
