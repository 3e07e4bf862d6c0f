"""The files of a user's own code, as `--code PATH` gives them: which modules they are, and whether they have changed. Imports no JAX.

A config may come from anywhere, so it must not decide what is run: only a person at a command line does, by naming files. A YAML file
then picks among what these files define. Everything here works on the text of the files, without importing them. So a wrong name is
answered at once, and a name that is not defined there, such as a function that a file has only imported, is never called.

The files are part of a run's identity, as its data is: the run directory keeps a copy of them, and a start with other files is refused
unless it is allowed. The identity covers all Python files below a path, because a file may import its neighbours.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from jgt.document import InputError, path_problem

COPY = "code"
"""The folder of the run directory that keeps the copy."""
IS_PYTHONS = "is the name of a module of Python's own. Give the file another name"
_MAX_FILES, _MAX_BYTES = 2_000, 20_000_000
_SKIPPED = ("__pycache__", "node_modules", "site-packages")


@dataclass(frozen=True, kw_only=True)
class Code:
    """Modules that a run may import, and objects that were given from Python.

    files: the place of each file by its path inside the code, such as `models/ssm.py`. objects: each object by its config key.
    """

    files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    objects: Mapping[str, object] = field(default_factory=dict[str, object])

    @cached_property
    def modules(self) -> Mapping[str, Path]:
        """Each module by its full name."""
        return {_module_name(inside): path for inside, path in self.files.items()}

    @cached_property
    def checksum(self) -> str:
        """The SHA-256 of all names and contents; empty without files."""
        digest = hashlib.sha256()
        for inside, path in sorted(self.files.items()):
            digest.update(f"{inside}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
        return digest.hexdigest() if self.files else ""

    @property
    def meaning(self) -> list[tuple[str, str]]:
        """The names and contents of all files, without comments and layout. Raises SyntaxError and ValueError."""
        return [(inside, ast.dump(ast.parse(path.read_bytes()))) for inside, path in sorted(self.files.items())]

    def defined(self, module: str) -> list[str]:
        """The classes, functions and values that a module defines at its top, or names in `__all__`. Raises InputError for other text."""
        path = self.modules[module]
        try:
            tree = ast.parse(path.read_bytes(), filename=str(path))
        except (SyntaxError, ValueError) as error:
            line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            raise InputError([f"{path}{line}: is not Python: {getattr(error, 'msg', error)}"]) from None
        return sorted({name for statement in tree.body for name in _names(statement) if not name.startswith("_")})

    def copy(self, folder: Path) -> None:
        """Writes all files below a new folder."""
        for inside, path in self.files.items():
            target = folder / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())


def read_code(paths: Sequence[str | Path]) -> Code:
    """The Python files at and below these paths. A folder contributes its modules; one with an `__init__.py` is a package itself.

    Raises InputError with every path that is not a Python file or a folder of some, and for two files of one name.
    """
    problems: list[str] = []
    files: dict[str, Path] = {}
    for path in map(Path, paths):
        at_path, problem = _files_at(path)
        problems += [] if problem is None else [f"command line: --code: {path}: {problem}"]
        for inside, file in at_path.items():
            other = files.setdefault(inside, file)
            if other.resolve() != file.resolve():
                problems.append(f"command line: --code: {file} and {other} are both the module {_module_name(inside)}. Rename one of them")
    if not problems and (size := sum(file.stat().st_size for file in files.values())) > _MAX_BYTES:
        problems.append(f"command line: --code: has {size:,} bytes of Python; at most {_MAX_BYTES:,} are allowed. Name fewer files")
    if problems:
        raise InputError(problems)
    # A module of Python's own would be hidden from everything else in the process.
    return Code(files={inside: file for inside, file in files.items() if _module_name(inside).split(".")[0] not in sys.stdlib_module_names})


def _files_at(path: Path) -> tuple[dict[str, Path], str | None]:
    """The Python files at a path, by their paths inside the code, and what is wrong with it."""
    if path_problem(path, "folder"):
        if not path_problem(path) and path.suffix == ".py":
            # It would be left out in silence, and whoever imports it would get Python's.
            return {path.name: path}, f"{path.stem} {IS_PYTHONS}" if path.stem in sys.stdlib_module_names else None
        return {}, "is not a Python file or a folder" if os.path.lexists(path) else "no such file or folder"
    prefix = path.resolve().name if (path / "__init__.py").is_file() else ""
    files = {str(Path(prefix) / file.relative_to(path)): file for file in itertools.islice(_python_files(path), _MAX_FILES + 1)}
    if len(files) > _MAX_FILES:
        return {}, f"has more than {_MAX_FILES:,} Python files. Name a smaller folder, or single files"
    return files, None if files else "has no Python files"


def _python_files(folder: Path) -> Iterator[Path]:
    for current, folders, names in os.walk(folder):
        here = Path(current)
        folders[:] = sorted(name for name in folders if not _is_skipped(here / name))
        # A pipe in a folder from elsewhere would block whoever reads it.
        yield from (here / name for name in sorted(names) if name.endswith(".py") and (here / name).is_file())


def _is_skipped(folder: Path) -> bool:
    """Whether a folder's Python files are not meant: it is hidden, installed, a virtual environment or a run directory."""
    marks = (folder / "pyvenv.cfg", folder / "config.yaml")
    return folder.name.startswith(".") or folder.name in _SKIPPED or any(mark.exists() for mark in marks)


def _module_name(inside: str) -> str:
    parts = Path(inside).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _names(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement at the top of a module defines. Imports define none: whatever they bring was made elsewhere."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.If | ast.Try):
        for inner in [*statement.body, *statement.orelse]:
            yield from _names(inner)
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        yield from names
        if names == ["__all__"] and isinstance(statement.value, ast.List | ast.Tuple):
            yield from (e.value for e in statement.value.elts if isinstance(e, ast.Constant) and isinstance(e.value, str))
