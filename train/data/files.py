"""Which files a path stands for. Only looks at names and sizes; opens nothing."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    """The file, the visible files below the folder (sorted), or the files that match the glob (sorted); maybe none."""
    # A path that exists is never read as a glob: its name may hold brackets.
    start = Path(path)
    if start.is_dir():
        return FileSet(root=start, paths=tuple(sorted(_visible(start))))
    if start.exists():
        return FileSet(root=start.parent, paths=(start,))
    # Path.glob takes no absolute pattern.
    matches = map(Path, sorted(glob.glob(path, recursive=True)))  # noqa: PTH207
    paths = tuple(match for match in matches if match.is_file())
    return FileSet(root=Path(os.path.commonpath([p.parent for p in paths])) if paths else Path(), paths=paths)


def standard_library() -> FileSet:
    """The modules of the running Python's standard library, without their tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return FileSet(root=root, paths=tuple(sorted(path for path in _walk(root, _NOT_LIBRARY) if path.suffix == ".py")))


def is_glob(path: str) -> bool:
    return glob.has_magic(path)


def _visible(root: Path) -> Iterator[Path]:
    return (path for path in _walk(root, frozenset()) if not path.name.startswith("."))


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        yield from (Path(folder, name) for name in names)
