"""The files that a path of the config names: a file, a folder, or a glob. Looks at names and sizes, and opens no file.

A path may be the URL of a file, a folder or a glob in a bucket. This is the only place that knows: what it names is copied into a local
cache (`train.files.cache`), and the files are the copies.

`path: /` or a glob above a file server would let `Path.glob` look at names for hours, and it reports only matches. So a `Finder` counts
every name that it looks at, and gives up after MAX_NAMES of them, over all paths of a config together.

`**` and a walk do not follow links to folders, because a link can lead back to its own folder. Hidden files and folders are skipped unless
the pattern itself begins with a dot.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from jgt.document import InputError, path_problem

from ..files.bucket import Bucket, is_url
from ..files.cache import ObjectCache

MAX_NAMES = 300_000
"""Names of files and folders that a search looks at, for all paths of a config together."""
_BEFORE_NAMES = 2
"""The parts of a URL before the bucket's name."""
_NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, kw_only=True)
class FileSet:
    """Files below `root`, in the order in which their tokens follow each other."""

    root: Path
    paths: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def digest(self) -> str:
        """The SHA-256 of the files' names below `root` and of their sizes. Moving the folder does not change it."""
        lines = (f"{path.relative_to(self.root).as_posix()}\t{path.stat().st_size}\n" for path in self.paths)
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


@functools.cache
def standard_library() -> FileSet:
    """The modules of the running Python's standard library, without their tests."""
    # Present on every machine with Python: the default data needs no download.
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = (path for path in Finder().below(str(root), _NOT_LIBRARY) if path.suffix == ".py")
    return FileSet(root=root, paths=tuple(sorted(modules)))


class Finder:
    """Finds the files of a config's paths, and bounds the number of names that it looks at for all of them. cache: for objects."""

    def __init__(self, cache: ObjectCache | None = None) -> None:
        self._path, self._names_left, self._cache = "", MAX_NAMES, cache or ObjectCache()

    def names(self, path: str) -> list[str]:
        """The paths of the files, or the URLs of the objects, of which nothing is copied. Raises InputError as `files`."""
        if not is_url(path):
            return [str(file) for file in self.files(path).paths]
        with _readable(path):
            bucket, names, _ = self._objects(path)
        return [bucket.url(name) for name in names]

    def files(self, path: str) -> FileSet:
        """The file; or the visible files below the folder; or the matches of the glob that are not folders. Sorted, possibly empty.

        The result may contain pipes, devices and broken links: their kind is not examined. For a URL, they are
        copies. Raises InputError if there are too many names, and if objects cannot be copied.
        """
        self._path = path
        if is_url(path):
            return self._copies(path)
        # A path that exists is never read as a glob: its name may contain brackets.
        if not path_problem(path, "folder"):
            paths = (file for file in self.below(path) if not file.name.startswith("."))
            return FileSet(root=Path(path), paths=tuple(sorted(paths)))
        if os.path.lexists(path):
            return FileSet(root=Path(path).parent, paths=(Path(path),))
        matches = sorted(self._matches(path)) if glob.has_magic(path) and "\0" not in path else []
        # The digest of names is taken below this root, so that a moved data set keeps its identity.
        return FileSet(root=Path(os.path.commonpath([p.parent for p in matches])) if matches else Path(), paths=tuple(matches))

    def _copies(self, url: str) -> FileSet:
        with _readable(url):
            bucket, names, beside = self._objects(url)
            if not names:
                return FileSet(root=Path(), paths=())
            folder = self._cache.fetch(bucket, [*names, *beside])
        paths = sorted(folder / name for name in names)
        return FileSet(
            root=Path(os.path.commonpath([path.parent for path in paths])) if glob.has_magic(url) else folder, paths=tuple(paths)
        )

    def _objects(self, url: str) -> tuple[Bucket, list[str], list[str]]:
        """The objects that a URL names, below their bucket, and the indexes (.idx) beside them."""
        self._path = url
        parts = url.rstrip("/").split("/")
        # `s3:`, nothing, the bucket, and the parts of the name.
        plain = next((n for n, part in enumerate(parts) if n > _BEFORE_NAMES and glob.has_magic(part)), len(parts))
        if pattern := parts[plain:]:
            start = re.split(r"[*?[]", pattern[0])[0]
            return self._matching("/".join(parts[:plain]), start, [*pattern, *(["*"] if pattern[-1] == "**" else [])])
        *above, name = parts
        ways = [(url, "", ["**", "*"]), ("/".join(above), PurePath(name).stem, [glob.escape(name)])]
        # The likely one first. A bucket is not a file.
        ways = ways[:1] if len(above) == _BEFORE_NAMES else ways[::-1] if PurePath(name).suffix else ways
        found = (self._matching(*way) for way in ways)
        return next((one for one in found if one[1]), (Bucket(url), [], []))

    def _matching(self, url: str, start: str, pattern: Sequence[str]) -> tuple[Bucket, list[str], list[str]]:
        # Some tools mark a folder by an object whose name ends in a slash.
        bucket = Bucket(url)
        names = [name for name in bucket.names(start) if not name.endswith("/")]
        self._count(len(names))
        found = [name for name in names if _is_match(name.split("/"), pattern)]
        indexes = {str(PurePath(name).with_suffix(".idx")) for name in found if name.endswith(".bin")}
        return bucket, found, sorted(indexes & {*names} - {*found})

    def below(self, root: str, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
        """Everything below a folder that is not a folder itself, except in hidden and `skipped` folders."""
        return (Path(folder, name) for folder, names in self._walk(root, skipped) for name in names)

    def _walk(self, root: str, skipped: frozenset[str] = frozenset()) -> Iterator[tuple[str, list[str]]]:
        # os.walk does not enter links to folders, and yields nothing for a folder that cannot be read.
        for folder, folders, names in os.walk(root):
            self._count(len(folders) + len(names))
            folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
            yield folder, names

    def _count(self, number: int) -> None:
        self._names_left -= number
        if self._names_left < 0:
            many = f"more than {MAX_NAMES:,} names in all would have to be looked at"
            raise InputError([f"{self._path}: {many}. Name folders further down"])

    def _matches(self, pattern: str) -> Iterator[Path]:
        """The matches of a glob that are not folders. Each level of the pattern turns the matches so far into their matching entries."""
        path = Path(pattern)
        # As text, because a set of paths is slow.
        matches = {path.anchor or "."}
        for part in (*path.relative_to(path.anchor).parts, *(["*"] if path.name == "**" else [])):
            if part == "**":
                matches = {below for folder in matches for below, _ in self._walk(folder)}
            elif glob.has_magic(part):
                matches = {f"{folder.rstrip('/')}/{name}" for folder in matches for name in self._entries(folder, part)}
            else:
                # Levels without magic are joined without listing a folder: `/data/*/train.bin` looks at the names in /data only.
                matches = {f"{folder.rstrip('/')}/{part}" for folder in matches}
        # A broken link counts, so that it is reported instead of ignored.
        return (Path(path) for path in matches if os.path.lexists(path) and path_problem(path, "folder"))

    def _entries(self, folder: str, pattern: str) -> list[str]:
        _, folders, names = next(os.walk(folder), ("", [], []))
        self._count(len(folders) + len(names))
        shows_hidden = pattern.startswith(".")
        return [name for name in (*folders, *names) if fnmatchcase(name, pattern) and (shows_hidden or not name.startswith("."))]


def _is_match(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of an object's name match those of a glob. As for files, only a part that begins with a dot matches such names."""
    if not name or not pattern:
        return not name and not pattern
    if pattern[0] == "**" and _is_match(name, pattern[1:]):
        return True
    wanted = "*" if pattern[0] == "**" else pattern[0]
    if not fnmatchcase(name[0], wanted) or (name[0].startswith(".") and not wanted.startswith(".")):
        return False
    return _is_match(name[1:], pattern if pattern[0] == "**" else pattern[1:])


@contextlib.contextmanager
def _readable(url: str) -> Iterator[None]:
    """Turns a failure of a store or of the cache's disk into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError([f"{error.filename or url}: cannot be read: {error.strerror or error}"]) from error
