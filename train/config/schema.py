"""The command `jgt schema`: the JSON Schemas of run files and rules files, with which editors complete and check them.

The schema of a run file describes `Config` and the sections whose keys belong to jgt.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jgt import CommandParser, MeshSizes, file_schemas
from jgt.document import InputError
from jgt.planner import Budget

from .config import Config

NAMES = ("run", "rules")
_NUMBER = {"type": "number", "minimum": 0}
_LIMITS = {
    "peak_gb": "the most GB of memory on a device.",
    "step_ms": "the most milliseconds of a step; needs --target.",
    "sent_gb": "the most GB that a device sends in a step.",
}
_TEXTS = {
    "mesh": "The axes of the mesh and their sizes, outermost first. One size may be -1: the remaining devices.",
    "rules": "The path of a rules file, relative to this one, jgt:NAME for one that jgt ships, or the rules themselves. null: one device.",
    "budget": "The limits of `jgt plan`: of the whole step, or of a signal in GB.",
    "sync": "How often the devices along an axis of the mesh agree, and what they send.",
    "pipeline": "Distributes the layers under a signal over the stages of a mesh axis.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: printed or written. 2: a file cannot be written."""
    return parser().answer(argv, _print_or_write)


def schema_text(name: str) -> str:
    """The schema of this name, as the text of its file."""
    return json.dumps(schemas()[name], indent=1, ensure_ascii=False) + "\n"


def parser() -> CommandParser:
    """The command line of the schemas."""
    parser = CommandParser("jgt schema", "Prints the JSON Schema of run files or of rules files, for editors.")
    parser.add_argument("name", nargs="?", choices=NAMES, default="run", help="run (the default) or rules")
    parser.add_argument("--write", metavar="DIR", help="write both schemas to a folder, as run.json and rules.json")
    return parser


def _print_or_write(arguments: argparse.Namespace) -> None:
    if arguments.write is None:
        print(schema_text(arguments.name), end="")
        return
    folder = Path(arguments.write)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            (folder / f"{name}.json").write_text(schema_text(name), encoding="utf-8")
    except OSError as error:
        raise InputError([f"command line: --write: {error.filename} cannot be written: {error.strerror or error}"]) from None
    print(f"Wrote {' and '.join(f'{name}.json' for name in NAMES)} in {folder}", file=sys.stderr)


def schemas() -> dict[str, dict[str, Any]]:
    """The schemas by name."""
    # null removes an axis that the extended file has.
    size = {"anyOf": [{"type": "integer", "minimum": -1, "maximum": MeshSizes.MOST_DEVICES}, {"type": "null"}]}
    limits = {"type": "object", "additionalProperties": _NUMBER}
    keys: dict[str, dict[str, Any]] = {
        "mesh": {"type": "object", "additionalProperties": size},
        "budget": {
            **limits,
            "properties": {key: {**_NUMBER, "description": _LIMITS[key]} for key in Budget.KEYS},
            "additionalProperties": limits,
        },
    }
    return file_schemas(Config, keys, _TEXTS)


if __name__ == "__main__":
    sys.exit(main())
