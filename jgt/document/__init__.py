"""YAML documents whose values know their line, and dataclasses filled from them. Nothing here imports JAX."""

from jgt.document.bind import Bound, bind
from jgt.document.edit import merge, override
from jgt.document.files import read
from jgt.document.node import InputError, Node, collect, describe, from_python, nearest, suggestion
from jgt.document.reader import dump, parse

__all__ = [
    "Bound",
    "InputError",
    "Node",
    "bind",
    "collect",
    "describe",
    "dump",
    "from_python",
    "merge",
    "nearest",
    "override",
    "parse",
    "read",
    "suggestion",
]
