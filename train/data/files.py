"""Which files a path stands for. Only looks at names and sizes; opens nothing."""

from __future__ import annotations

import fnmatch
import functools
import glob
import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jgt.document import InputError, is_folder

MAX_FILES = 100_000
MAX_NAMES = 300_000
"""Names that are looked at; `path: /` would not end."""
_MAX_LEVELS = 32
_MAX_PATH = 4_096
_NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, kw_only=True)
class FileSet:
    """Files in the order in which their tokens follow each other."""

    root: Path
    paths: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def digest(self) -> str:
        """sha256 of the names below `root` and the sizes: the same after the folder moves."""
        lines = (f"{path.relative_to(self.root).as_posix()}\t{path.stat().st_size}\n" for path in self.paths)
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True)
class Unreadable:
    """Stands among the texts of a reader for one that could not be read: `file:line: what, what to change`."""

    message: str


def resolve(path: str) -> FileSet:
    """As `Finder.files`, of one path."""
    return Finder().files(path)


@functools.cache
def standard_library() -> FileSet:
    """The modules of the running Python's standard library, without their tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (Path(file) for file in _walk(str(root), Finder(), _NOT_LIBRARY) if file.endswith(".py"))
    return FileSet(root=root, paths=tuple(sorted(files)))


def is_glob(path: str) -> bool:
    return glob.has_magic(path)


class Finder:
    """Finds the files of a config's paths, and looks at so many names for all of them."""

    def __init__(self) -> None:
        self._found: dict[str, FileSet] = {}
        self._num_names = 0

    def files(self, path: str) -> FileSet:
        """The file, the visible files below the folder (sorted), or what matches the glob (sorted) and is no folder; maybe nothing.

        Raises InputError for too many of them. What they are is not looked at: a pipe and a link to nothing are among them.
        """
        if path not in self._found:
            try:
                self._found[path] = self._find(path)
            except _TooManyError:
                raise InputError([f"{path}: more than {MAX_NAMES:,} names in all would have to be looked at. Name folders further down"]) from None
        return self._found[path]

    def _find(self, path: str) -> FileSet:
        # A path that exists is never read as a glob: its name may hold brackets.
        if is_folder(path):
            visible = (file for file in _walk(path, self) if not file.rpartition("/")[2].startswith("."))
            return FileSet(root=Path(path), paths=_few(visible, path))
        if "\0" in path or len(path) > _MAX_PATH:
            return FileSet(root=Path(), paths=())
        if os.path.lexists(path):
            return FileSet(root=Path(path).parent, paths=(Path(path),))
        paths = _few(_matching(path, self), path) if is_glob(path) else ()
        return FileSet(root=Path(os.path.commonpath([p.parent for p in paths])) if paths else Path(), paths=paths)

    def below(self, folder: str) -> list[os.DirEntry[str]]:
        """The entries of a folder; none of what may not be read."""
        try:
            with os.scandir(folder) as entries:
                found = list(itertools.islice(entries, max(MAX_NAMES + 1 - self._num_names, 0)))
        except OSError:
            return []
        self._num_names += len(found)
        if self._num_names > MAX_NAMES:
            raise _TooManyError
        return found


class _TooManyError(Exception):
    """More names than anyone means."""


def _few(paths: Iterator[str], start: str) -> tuple[Path, ...]:
    found: set[str] = set()
    for path in paths:
        found.add(path)
        if len(found) > MAX_FILES:
            raise InputError([f"{start} stands for more than {MAX_FILES:,} files. Name fewer, or join them"])
    return tuple(sorted(map(Path, found)))


def _walk(root: str, finder: Finder, skipped: frozenset[str] = frozenset()) -> Iterator[str]:
    """All but folders; hidden folders, links to folders and those that are skipped are passed by."""
    folders = [root]
    while folders:
        for entry in finder.below(folders.pop()):
            if not _is_folder(entry):
                yield entry.path
            elif entry.name not in skipped and not _is_aside(entry):
                folders.append(entry.path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_aside(folder: os.DirEntry[str]) -> bool:
    return folder.name.startswith(".") or folder.is_symlink()


def _matching(pattern: str, finder: Finder) -> Iterator[str]:
    """What matches a glob and is no folder. Unlike with glob.glob, `**` follows no links: two links to their own folder have no end."""
    parts = list(Path(pattern).parts)
    # Neighbouring ** are one, and the last one stands for all that is below.
    parts = [part for before, part in zip(["", *parts], parts, strict=False) if not part == before == "**"]
    if parts[-1] == "**":
        parts.append("*")
    if sum(map(glob.has_magic, parts)) > _MAX_LEVELS:
        raise InputError([f"{pattern} has more than {_MAX_LEVELS} levels with *, ? or []"])
    found = iter([""])
    for is_pattern, level in itertools.groupby(parts, key=glob.has_magic):
        if is_pattern:
            for part in level:
                found = _children(found, part, finder)
        else:
            found = map(functools.partial(_joined, tail=str(Path(*level))), found)
    return filter(_is_no_folder, found)


def _children(folders: Iterator[str], part: str, finder: Finder) -> Iterator[str]:
    for folder in folders:
        if part == "**":
            yield folder
            yield from _folders(folder, finder)
        else:
            for entry in finder.below(folder or "."):
                if fnmatch.fnmatchcase(entry.name, part) and (part[0] == "." or entry.name[0] != "."):
                    yield _joined(folder, entry.name)


def _folders(root: str, finder: Finder) -> Iterator[str]:
    folders = [root]
    while folders:
        folder = folders.pop()
        for entry in finder.below(folder or "."):
            if _is_folder(entry) and not _is_aside(entry):
                folders.append(_joined(folder, entry.name))
                yield folders[-1]


def _joined(folder: str, tail: str) -> str:
    return f"{folder}{'' if folder in ('', '/') else '/'}{tail}"


def _is_no_folder(path: str) -> bool:
    """Whether something stands there that is not a folder, if only a link to nothing."""
    return os.path.lexists(path) and not is_folder(path)
