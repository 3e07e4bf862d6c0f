"""The command `jgt init DIR`: writes a project that runs, as a place to begin.

The files are copies of configs/project, which is tested like every other shipped config: a new user begins with something that works.
Existing files are never replaced: if one is in the way, nothing is written.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jgt.command.parser import CommandParser
from jgt.document import InputError, shipped_folder

_FILES = ("run.yaml", "rules.yaml", "model.py", "README.md")
_SCHEMAS = ("schema/run.json", "schema/rules.json")
_NAME = "{name: project}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: the project is written. 2: it cannot be, and stderr says why."""
    return parser().answer(argv, lambda arguments: _begin(Path(arguments.folder)))


def parser() -> CommandParser:
    """The command line of the new project."""
    parser = CommandParser("jgt init", "Writes a project: a run, its rules, and a model of your own to begin with.")
    parser.add_argument("folder", metavar="DIR", help="the folder of the project, which is created if it does not exist")
    return parser


def _begin(folder: Path) -> None:
    _write(folder, _contents(folder.resolve().name))
    run, model = (shlex.quote(str(folder / name)) for name in ("run.yaml", "model.py"))
    print(f"Wrote {', '.join(_FILES)} in {folder}. Train the model:\n\n    jgt train {run} --code {model}")


def _contents(name: str) -> dict[str, str]:
    """The text of each file, by its path in the project. name: the run's name."""
    source = shipped_folder()
    contents = {file: (source / "project" / file).read_text(encoding="utf-8").replace("$schema=../", "$schema=") for file in _FILES}
    contents |= {file: (source / file).read_text(encoding="utf-8") for file in _SCHEMAS}
    # Any other name would need quotes.
    if re.fullmatch(r"[A-Za-z][\w.-]{0,60}", name, re.ASCII):
        contents["run.yaml"] = contents["run.yaml"].replace(_NAME, f"{{name: {name}}}")
    return contents


def _write(folder: Path, contents: dict[str, str]) -> None:
    """Writes all files, or none. Raises InputError."""
    problems = [f"{folder / file}: exists. Name another folder, or move the file away" for file in contents if (folder / file).exists()]
    if problems:
        raise InputError(problems)
    try:
        for file, text in contents.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError([f"{error.filename}: cannot be written: {error.strerror or error}"]) from None


if __name__ == "__main__":
    sys.exit(main())
