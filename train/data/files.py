"""The files that a path of the config names: a file, a folder, or a glob. Looks at names and sizes, and opens no file.

Why not `Path.glob`? Because a path comes from a config, and a config can be wrong. `path: /` or a glob above a file server would look at
names for hours before it fails, and `Path.glob` reports only matches: it cannot say that it looked at a million names in vain. So a
`Finder` counts every name that it looks at, and gives up after MAX_NAMES of them, over all paths of a config together.

`**` and a walk do not follow links to folders, because a link can lead back to its own folder. Hidden files and folders are skipped unless
the pattern itself begins with a dot.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from jgt.document import InputError, path_problem

MAX_NAMES = 300_000
"""Names of files and folders that a search looks at, for all paths of a config together."""
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


def find_files(path: str) -> FileSet:
    """The files of one path, as `Finder.files` finds them."""
    return Finder().files(path)


@functools.cache
def standard_library() -> FileSet:
    """The modules of the running Python's standard library, without their tests."""
    # Present on every machine with Python: the default data needs no download.
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = (Path(folder, name) for folder, names in Finder().walk(str(root), _NOT_LIBRARY) for name in names if name.endswith(".py"))
    return FileSet(root=root, paths=tuple(sorted(modules)))


def is_glob(path: str) -> bool:
    """Whether a path contains *, ? or [."""
    return glob.has_magic(path)


class Finder:
    """Finds the files of a config's paths, and bounds the number of names that it looks at for all of them."""

    def __init__(self) -> None:
        self._found: dict[str, FileSet] = {}
        self._names_left = MAX_NAMES

    def files(self, path: str) -> FileSet:
        """The file; or the visible files below the folder; or the matches of the glob that are not folders. Sorted, possibly empty.

        The result may contain pipes, devices and broken links: their kind is not examined. Raises InputError if there are too many names.
        """
        if path not in self._found:
            try:
                self._found[path] = self._find(path)
            except _TooManyError:
                many = f"more than {MAX_NAMES:,} names in all would have to be looked at"
                raise InputError([f"{path}: {many}. Name folders further down"]) from None
        return self._found[path]

    def _find(self, path: str) -> FileSet:
        # A path that exists is never read as a glob: its name may contain brackets.
        if not path_problem(path, "folder"):
            paths = (Path(folder, name) for folder, names in self.walk(path) for name in names if not name.startswith("."))
            return FileSet(root=Path(path), paths=tuple(sorted(paths)))
        if os.path.lexists(path):
            return FileSet(root=Path(path).parent, paths=(Path(path),))
        matches = sorted(self._matches(path)) if is_glob(path) and "\0" not in path else []
        # The digest of names is taken below this root, so that a moved data set keeps its identity.
        return FileSet(root=Path(os.path.commonpath([p.parent for p in matches])) if matches else Path(), paths=tuple(matches))

    def walk(self, root: str, skipped: frozenset[str] = frozenset()) -> Iterator[tuple[str, list[str]]]:
        """Each folder from `root` down, except hidden and `skipped` ones, with the names in it that are not folders."""
        # os.walk does not enter links to folders, and yields nothing for a folder that cannot be read.
        for folder, folders, names in os.walk(root):
            self._count(len(folders) + len(names))
            folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
            yield folder, names

    def _names(self, folder: str) -> list[str]:
        try:
            with os.scandir(folder) as entries:
                names = [entry.name for entry in entries]
        except OSError:
            # Not permitted, or no folder.
            return []
        self._count(len(names))
        return names

    def _count(self, number: int) -> None:
        self._names_left -= number
        if self._names_left < 0:
            raise _TooManyError

    def _matches(self, pattern: str) -> Iterator[Path]:
        """The matches of a glob that are not folders. Each level of the pattern turns the matches so far into their matching entries."""
        path = Path(pattern)
        # As text, because a set of paths is slow.
        matches = {path.anchor or "."}
        for part in (*path.relative_to(path.anchor).parts, *(["*"] if path.name == "**" else [])):
            if part == "**":
                matches = {below for folder in matches for below, _ in self.walk(folder)}
            elif is_glob(part):
                matches = {_below(folder, name) for folder in matches for name in self._names(folder) if _is_match(name, part)}
            else:
                # Levels without magic are joined without listing a folder: `/data/*/train.bin` looks at the names in /data only.
                matches = {_below(folder, part) for folder in matches}
        # A broken link counts, so that it is reported instead of ignored.
        return (Path(path) for path in matches if os.path.lexists(path) and path_problem(path, "folder"))


class _TooManyError(Exception):
    """The search would look at more than MAX_NAMES names."""


def _below(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def _is_match(name: str, part: str) -> bool:
    return fnmatchcase(name, part) and (part.startswith(".") or not name.startswith("."))
