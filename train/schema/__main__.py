"""The command `jgt schema`: prints a JSON Schema, or writes both of them to a folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jgt.command.parser import CommandParser
from jgt.document.schema import Schema
from jgt.rules.schema import rules_schema

from .run_file import run_schema

SCHEMAS: Mapping[str, Callable[[], Schema]] = {"run": run_schema, "rules": rules_schema}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: printed or written. 2: a file cannot be written."""
    arguments = parser().parse_args(argv)
    if arguments.write is None:
        print(schema_text(arguments.name), end="")
        return 0
    folder = Path(arguments.write)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in SCHEMAS:
            (folder / f"{name}.json").write_text(schema_text(name), encoding="utf-8")
    except OSError as error:
        print(f"command line: --write: {error.filename} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 2
    print(f"Wrote {' and '.join(f'{name}.json' for name in SCHEMAS)} in {folder}", file=sys.stderr)
    return 0


def schema_text(name: str) -> str:
    """The schema of this name, as the text of its file."""
    return json.dumps(SCHEMAS[name](), indent=1, ensure_ascii=False) + "\n"


def parser() -> CommandParser:
    """The command line of the schemas."""
    parser = CommandParser("jgt schema", "Prints the JSON Schema of run files or of rules files, for editors.")
    parser.add_argument("name", nargs="?", choices=[*SCHEMAS], default="run", help="run (the default) or rules")
    parser.add_argument("--write", metavar="DIR", help="write both schemas to a folder, as run.json and rules.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
