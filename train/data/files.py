"""The files that a path of the config names: a file, a folder, or a glob. Looks at names and sizes, and opens no file.

Why not `Path.rglob`? Because a path comes from a config, and a config can be wrong. `path: /` or a glob above a file server
would look at names for hours before it fails, and `Path.rglob` reports only matches: it cannot say that it looked at a
million names in vain. So every folder is listed in one place, `Finder.entries`, which counts the names and gives up after
MAX_NAMES of them, over all paths of a config together. The walk of folders and the matching of globs are built on it.

Two more rules keep a search finite and its result sensible. `**` and a walk do not follow links to folders, because a link
can lead back to its own folder. Hidden files and folders are skipped unless the pattern itself begins with a dot.
"""

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
"""Files of one path."""
MAX_NAMES = 300_000
"""Names of files and folders that a search looks at, for all paths of a config together."""
_MAX_LEVELS = 32
_MAX_PATH = 4_096
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
    files = (Path(file) for file in _files_below(str(root), Finder(), _NOT_LIBRARY) if file.endswith(".py"))
    return FileSet(root=root, paths=tuple(sorted(files)))


def is_glob(path: str) -> bool:
    """Whether a path contains *, ? or [."""
    return glob.has_magic(path)


class Finder:
    """Finds the files of a config's paths, and bounds the number of names that it looks at for all of them."""

    def __init__(self) -> None:
        self._found: dict[str, FileSet] = {}
        self._num_names = 0

    def files(self, path: str) -> FileSet:
        """The file; or the visible files below the folder; or the matches of the glob that are not folders. Sorted, possibly empty.

        The result may contain pipes, devices and broken links: their kind is not examined. Raises InputError if there are too many
        files, or too many names to look at.
        """
        if path not in self._found:
            try:
                self._found[path] = self._find(path)
            except _TooManyError:
                raise InputError(
                    [f"{path}: more than {MAX_NAMES:,} names in all would have to be looked at. Name folders further down"]
                ) from None
        return self._found[path]

    def _find(self, path: str) -> FileSet:
        # A path that exists is never read as a glob: its name may contain brackets.
        if is_folder(path):
            visible = (file for file in _files_below(path, self) if not file.rpartition("/")[2].startswith("."))
            return FileSet(root=Path(path), paths=_sorted_paths(visible, path))
        # The system would answer such names with errors of different kinds.
        if "\0" in path or len(path) > _MAX_PATH:
            return FileSet(root=Path(), paths=())
        if os.path.lexists(path):
            return FileSet(root=Path(path).parent, paths=(Path(path),))
        paths = _sorted_paths(_matches(path, self), path) if is_glob(path) else ()
        # The digest of names is taken below this root, so that a moved data set keeps its identity.
        return FileSet(root=Path(os.path.commonpath([p.parent for p in paths])) if paths else Path(), paths=paths)

    def entries(self, folder: str) -> list[os.DirEntry[str]]:
        """The entries of a folder; none if it cannot be read. Raises _TooManyError."""
        try:
            with os.scandir(folder) as entries:
                # One name more than allowed is enough to know that there are too many.
                found = list(itertools.islice(entries, max(MAX_NAMES + 1 - self._num_names, 0)))
        except OSError:
            # Not permitted, or gone since its own folder was listed.
            return []
        self._num_names += len(found)
        if self._num_names > MAX_NAMES:
            raise _TooManyError
        return found


class _TooManyError(Exception):
    """The search would look at more than MAX_NAMES names."""


def _sorted_paths(paths: Iterator[str], start: str) -> tuple[Path, ...]:
    """The paths, each once. Raises InputError if there are more than MAX_FILES; does not consume the rest."""
    # `**/a/**` can match one file in several ways.
    found: set[str] = set()
    for path in paths:
        found.add(path)
        if len(found) > MAX_FILES:
            raise InputError([f"{start} matches more than {MAX_FILES:,} files. Name fewer, or join them"])
    return tuple(sorted(map(Path, found)))


def _walk(root: str, finder: Finder, skipped: frozenset[str] = frozenset()) -> Iterator[tuple[str, list[str]]]:
    """Each folder from `root` down, with the names in it that are not folders.

    Does not enter hidden folders, links to folders (they could lead back), and folders named in `skipped`.
    """
    folders = [root]
    while folders:
        folder, names = folders.pop(), []
        for entry in finder.entries(folder or "."):
            if not _is_folder_entry(entry):
                names.append(entry.name)
            elif entry.name not in skipped and not entry.name.startswith(".") and not entry.is_symlink():
                folders.append(_joined(folder, entry.name))
        yield folder, names


def _files_below(root: str, finder: Finder, skipped: frozenset[str] = frozenset()) -> Iterator[str]:
    return (_joined(folder, name) for folder, names in _walk(root, finder, skipped) for name in names)


def _is_folder_entry(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _matches(pattern: str, finder: Finder) -> Iterator[str]:
    """The matches of a glob that are not folders. Unlike in `glob.glob`, `**` does not follow links. Raises InputError.

    The pattern is applied level by level: each level of it turns the folders that match so far into their matching entries.
    """
    parts = list(Path(pattern).parts)
    # `a/**/**/b` means `a/**/b`, and a `**` at the end means everything below.
    parts = [part for before, part in zip(["", *parts], parts, strict=False) if not part == before == "**"]
    if parts[-1] == "**":
        parts.append("*")
    if sum(map(glob.has_magic, parts)) > _MAX_LEVELS:
        raise InputError([f"{pattern} has more than {_MAX_LEVELS} levels with *, ? or []"])
    # The empty path is the working directory; an absolute pattern has "/" as its first level.
    found = iter([""])
    for is_pattern, level in itertools.groupby(parts, key=glob.has_magic):
        if is_pattern:
            for part in level:
                found = _children(found, part, finder)
        else:
            # Levels without magic are joined without listing a folder: `/data/*/train.bin` looks at the names in /data only.
            found = map(functools.partial(_joined, tail=str(Path(*level))), found)
    return filter(_is_not_folder, found)


def _children(folders: Iterator[str], part: str, finder: Finder) -> Iterator[str]:
    """The entries of the folders that match one level of a pattern. `**` matches each folder and all folders below it."""
    for folder in folders:
        if part == "**":
            yield from (below for below, _ in _walk(folder, finder))
        else:
            for entry in finder.entries(folder or "."):
                if fnmatch.fnmatchcase(entry.name, part) and (part[0] == "." or entry.name[0] != "."):
                    yield _joined(folder, entry.name)


def _joined(folder: str, tail: str) -> str:
    return f"{folder}{'' if folder in ('', '/') else '/'}{tail}"


def _is_not_folder(path: str) -> bool:
    """Whether the path exists and is not a folder. A broken link counts, so that it is reported instead of ignored."""
    return os.path.lexists(path) and not is_folder(path)
