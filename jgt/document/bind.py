"""Nodes → frozen dataclasses, every problem with its line."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from jgt.document.node import Node, describe, joined, nearest, shown, suggestion


@dataclass(frozen=True)
class Bound:
    """Limits of a number, for `Annotated[int, Bound(low=1)]`."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def complaint(self, value: float) -> str | None:
        if self.low is not None and not value >= self.low:
            return f"{value} is too small; it must be at least {self.low}"
        if self.above is not None and not value > self.above:
            return f"{value} is too small; it must be greater than {self.above}"
        if self.high is not None and not value <= self.high:
            return f"{shown(value)} is too large; it must be at most {self.high:_}"
        return None


def bind(node: Node, cls: type, problems: list[str]) -> Any:
    """Fills a frozen dataclass from a mapping, appending to `problems`; None when a field could not be filled.

    Field types may be bool, int, float, str, Literal, a dataclass, `tuple[T, ...]`, `dict[str, T]`, unions with
    None, `Annotated[number, Bound]`, and Node for a part that its owner reads. A class may have a method `problems()`
    yielding (field, message) for what only several fields together can tell.
    """
    if not isinstance(node.value, dict):
        problems.append(node.problem(f"must be a mapping of keys to values, not {describe(node.value)}"))
        return None
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    before = len(problems)
    values: dict[str, Any] = {}
    for name, child in node.value.items():
        if name not in fields:
            problems.append(child.problem(f"unknown key. {nearest(name, fields)}"))
        else:
            values[name] = _bind_value(child, hints[name], problems)
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(node.problem(f"the key {name!r} is missing"))
    if len(problems) > before:
        return None
    bound = cls(**values)
    for name, message in getattr(bound, "problems", tuple)():
        problems.append(Node(None, node.find(name).where, joined(node.key, name)).problem(message))
    return bound


def _bind_value(node: Node, hint: Any, problems: list[str]) -> Any:
    value, origin, args = node.value, typing.get_origin(hint), typing.get_args(hint)
    if hint is Node:
        return node
    if origin is typing.Annotated:
        result = _bind_value(node, args[0], problems)
        if isinstance(result, int | float):
            for complaint in filter(None, (bound.complaint(result) for bound in args[1:])):
                problems.append(node.problem(complaint))
        return result
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        options = [a for a in args if a is not type(None)]
        trials: list[tuple[Any, list[str]]] = []
        for option in options:
            found: list[str] = []
            result = _bind_value(node, option, found)
            if not found:
                return result
            trials.append((result, found))
        result, found = trials[-1] if isinstance(value, dict | list) else trials[0]
        problems.extend(found)
        return result
    if origin is Literal:
        if value not in args or isinstance(value, bool) != isinstance(next(iter(args)), bool):
            near = suggestion(value, map(str, args)) if isinstance(value, str) else ""
            problems.append(node.problem(f"{shown(node.plain())} is not one of {', '.join(map(str, args))}.{near}"))
        return value
    if origin is tuple:
        if not isinstance(value, list):
            problems.append(node.problem(f"must be a list, not {describe(value)}"))
            return None
        return tuple(_bind_value(item, args[0], problems) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            problems.append(node.problem(f"must be a mapping, not {describe(value)}"))
            return None
        return {name: _bind_value(item, args[1], problems) for name, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return bind(node, typing.cast(type, hint), problems)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (bool, int, float, str):
        if type(value) is not hint:
            hinted = " (write true or false)" if hint is bool and value in ("yes", "no", "on", "off") else ""
            problems.append(node.problem(f"must be {_TYPE_NAMES[hint]}, not {describe(value)}{hinted}"))
        elif isinstance(value, float) and not math.isfinite(value):
            problems.append(node.problem(f"must be a finite number, not {value}"))
        return value
    raise AssertionError(f"no binding for {hint}")


_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
