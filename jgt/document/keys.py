"""The keys that a dataclass has in a file: its fields, their type hints, and what its docstring says about them.

A docstring describes one key a line, `steps: the number of steps.`, or several, `low, high: the limits.` A text may go on in the next line.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Mapping
from typing import Any


def keys_of(cls: type[Any]) -> list[dataclasses.Field[Any]]:
    """The fields of a class that are keys of a file. Its owner sets those without init or comparison, `bind` place and name."""
    set_by_bind = ("where", getattr(cls, "NAME", None))
    return [field for field in dataclasses.fields(cls) if field.init and field.compare and field.name not in set_by_bind]


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Whether a field has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@functools.cache
def hints_of(cls: type[Any]) -> Mapping[str, object]:
    """The type hints of a class, with `Annotated` and so with the bounds."""
    return typing.get_type_hints(cls, include_extras=True)


def descriptions(cls: type[Any]) -> dict[str, str]:
    """The description of each key, from the docstrings of a class and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        keys: list[str] = []
        for line in inspect.cleandoc(base.__doc__ or "").splitlines():
            names, colon, text = line.partition(": ")
            if colon and set(names.split(", ")) <= set(getattr(base, "__dataclass_fields__", ())):
                keys = names.split(", ")
                found |= dict.fromkeys(keys, text)
            else:
                # A description continues until the end of its paragraph.
                keys = keys if line else []
                found |= {key: f"{found[key]} {line}" for key in keys}
    return found


def without_links(text: str) -> str:
    """A description without the targets of its links, which lead to other pages."""
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
