"""YAML documents whose values know the file and line they come from, and dataclasses filled from them.

Every error message of jgt that concerns a user's file begins with `file:line: key:`. It can, because nothing downstream works
on plain dicts: a `Node` carries its place through `extends:`, overrides and checks up to the moment it becomes a field of a
dataclass. Read `node.py` first, then follow a file: `files.py` (bytes), `reader.py` (YAML to nodes), `compose.py` (one document
over another), `bind.py` (nodes to dataclasses), and to `problems.py`, if it is wrong. Nothing here imports JAX.

`__all__` is what a program needs that reads its own files with this room, as the trainer does. The other names serve rooms of jgt, and are
better imported from the file that defines them. YAML is loaded on first use: rules may come from Python alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jgt.document.bind import Bound as Bound
from jgt.document.bind import bind as bind
from jgt.document.files import LocalPath as LocalPath
from jgt.document.files import path_problem as path_problem
from jgt.document.files import read_bytes as read_bytes
from jgt.document.files import read_text as read_text
from jgt.document.files import shipped_folder as shipped_folder
from jgt.document.node import Node as Node
from jgt.document.problems import InputError as InputError
from jgt.document.problems import nearest as nearest
from jgt.document.problems import shown as shown

if TYPE_CHECKING:
    from jgt.document.compose import merge as merge
    from jgt.document.compose import override as override
    from jgt.document.compose import read as read
    from jgt.document.reader import dump as dump
    from jgt.document.reader import parse as parse

_YAML = {"dump": "reader", "merge": "compose", "override": "compose", "parse": "reader", "read": "compose"}

__all__ = ["Bound", "InputError", "LocalPath", "Node", "bind", "dump", "nearest", "override", "path_problem", "read", "read_bytes", "shown"]


def __getattr__(name: str) -> Any:
    if name not in _YAML:
        raise AttributeError(f"module 'jgt.document' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jgt.document.{_YAML[name]}"), name)
