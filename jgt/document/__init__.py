"""YAML documents whose values know their line, and dataclasses filled from them. Nothing here imports JAX."""

from jgt.document.bind import Bound, bind
from jgt.document.edit import merge, override
from jgt.document.files import read
from jgt.document.node import InputError, Node, collect, describe, from_python, nearest, printable, shown, suggestion
from jgt.document.reader import dump, parse
from jgt.document.regular import is_file, is_folder, kind_problem, read_bytes, read_text

__all__ = [
    "Bound",
    "InputError",
    "Node",
    "bind",
    "collect",
    "describe",
    "dump",
    "from_python",
    "is_file",
    "is_folder",
    "kind_problem",
    "merge",
    "nearest",
    "override",
    "parse",
    "printable",
    "read",
    "read_bytes",
    "read_text",
    "shown",
    "suggestion",
]
