"""Nodes to frozen dataclasses: the type hints of a dataclass are the schema of its section.

A section of a YAML file is written down once, as a dataclass with types, defaults and bounds, beside the code that uses it:

    steps: Annotated[int, Bound(low=1)] = 100

`bind` reads those hints and fills the fields from a node. A key that is not a field, a value of another type and a number out
of bounds each become a problem with the line of the value, and checking continues with the next field: nothing is ever read
with `.get`, so that no typo is ignored. Values are not converted, with one exception: where the type is int or float, a number may be
written as the other, if it is whole (`steps: 1e3`, `lr: 1`).
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from jgt.document.keys import descriptions, hints_of, is_required, keys_of, without_links
from jgt.document.node import Node, dotted_key
from jgt.document.problems import nearest, shown

_T = TypeVar("_T")
_MAX_WHOLE = 2**53
"""Larger floats are whole too, but not the number that was written."""


@dataclass(frozen=True)
class Bound:
    """The limits of a number, for `Annotated[int, Bound(low=1)]`. low and high are allowed values, above is not."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def complaint(self, value: float) -> str | None:
        """The reason why a value is not allowed, or None."""
        # Written as "not >=", a NaN fails every bound.
        if self.low is not None and not value >= self.low:
            return f"{value} is too small; it must be at least {self.low}"
        if self.above is not None and not value > self.above:
            return f"{value} is too small; it must be greater than {self.above}"
        if self.high is not None and not value <= self.high:
            return f"{shown(value)} is too large; it must be at most {self.high:_}"
        return None


@dataclass(frozen=True)
class ReadBy:
    """For `Annotated[T, ReadBy(...)]`: a value that its owner reads.

    read: gets the node, the list of problems and what `bind` was given, and returns the value.
    schema: the JSON Schema of the value.
    """

    read: Callable[[Node, list[str], typing.Any], object]
    schema: Mapping[str, object]


def bind(node: Node, cls: type[_T], problems: list[str], given: object = None) -> _T | None:
    """Fills a frozen dataclass from a mapping. Appends to `problems`, and returns None if a field could not be filled.

    Field types may be bool, int, float, str, Literal, a dataclass, `tuple[T, ...]`, `tuple[T, T]`, `dict[str, T]`, unions, and Node for a
    part that its owner reads; `Annotated[number, Bound]`, `Annotated[T, text]` with the end of messages about it, `Annotated[str, f]` where
    f returns why a text is wrong, or None, and `Annotated[T, ReadBy]`, whose function gets what is `given` here.

    A field `where` is not a key: it gets the place of the node. Beside its fields, a class may have

    problems(): yields (field, message) for what only several fields together show to be wrong.
    variant(node): a static method that names another class to fill.
    REST: the field that takes all keys that are not fields, with their plain values.
    WORDS: what other keys mean.
    NAME: the field for the key of an entry. A tuple of the class is then written as a mapping, whose entries may be null.
    VALUE: the field that takes the whole node, which then is not a mapping of keys.
    """
    return _bind_class(node, cls, problems, given)


def _bind_class(node: Node, cls: type[_T], problems: list[str], given: object, name: str | None = None) -> _T | None:
    """As `bind`. name: the key of an entry of a mapping, whose value the node is."""
    num_before = len(problems)
    whole: str | None = getattr(cls, "VALUE", None)
    if whole is not None:
        values = {whole: _bind_value(node, hints_of(cls)[whole], problems, given)}
    elif isinstance(node.value, dict) or (node.value is None and name is not None):
        if choose := getattr(cls, "variant", None):
            cls = choose(node)
        values = _values(node, cls, problems, given)
    else:
        problems.append(node.problem(f"must be a mapping of keys to values, not {node.in_words()}"))
        return None
    if len(problems) > num_before:
        return None
    if "where" in hints_of(cls):
        values["where"] = node.where
    if name is not None:
        values[getattr(cls, "NAME")] = name  # noqa: B009
    # Only now: the checks of `problems` rely on the types and bounds of the single fields.
    bound = cls(**values)
    for key, message in getattr(bound, "problems", tuple)():
        # The field may have its default: its key is named all the same, with the line of the section.
        problems.append(Node(None, node.find(key).where, dotted_key(node.key, key)).problem(message))
    return bound


def _values(node: Node, cls: type, problems: list[str], given: object) -> dict[str, object]:
    """The value of each field that the mapping has a key for."""
    rest: str | None = getattr(cls, "REST", None)
    children, hints = node.children, hints_of(cls)
    fields = {field.name: field for field in keys_of(cls)}
    values: dict[str, object] = {} if rest is None else {rest: {k: v.plain() for k, v in children.items() if k == rest or k not in fields}}
    for name, child in children.items():
        if name in fields and name != rest:
            values[name] = _bind_value(child, hints[name], problems, given)
        elif rest is None:
            word = getattr(cls, "WORDS", {}).get(name)
            meant = f"Did you mean {word}?" if word else _inside(node, name, fields, hints) or nearest(name, fields)
            problems.append(child.problem(f"unknown key. {meant}"))
    for name, field in fields.items():
        if name not in values and is_required(field):
            said = without_links(descriptions(cls).get(name, "")).split(". ")[0].removesuffix(".")
            problems.append(node.problem(f"the key {name!r} is missing{said and f': {said}'}"))
    return values


def _inside(node: Node, name: str, fields: Iterable[str], hints: Mapping[str, object]) -> str:
    """`Did you mean 'train.steps'?` for `steps`, if a section of this mapping has a key of that name and the mapping has no similar one."""
    if nearest(name, fields, lists=False):
        return ""
    classes = {field: typing.cast("type", hint) for field in fields if dataclasses.is_dataclass(hint := hints[field])}
    sections = [field for field, cls in classes.items() if not hasattr(cls, "VALUE") and name in [key.name for key in keys_of(cls)]]
    return f"Did you mean {' or '.join(repr(dotted_key(dotted_key(node.key, section), name)) for section in sections)}?" if sections else ""


def _bind_value(node: Node, hint: object, problems: list[str], given: object) -> object:
    if hint is Node:
        return node
    if binder := _BINDERS.get(typing.get_origin(hint)):
        return binder(node, typing.get_args(hint), problems, given)
    if dataclasses.is_dataclass(hint):
        return _bind_class(node, typing.cast("type[object]", hint), problems, given)
    return _bind_scalar(node, hint, problems)


def _bind_scalar(node: Node, hint: object, problems: list[str]) -> object:
    value = node.value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_WHOLE:
        return int(value)
    assert hint in _TYPE_NAMES, f"bind does not know the type {hint}"
    # Not isinstance: True is an int, and a whole number must not take it.
    if type(value) is not hint:
        hinted = " (write true or false)" if hint is bool and value in ("yes", "no", "on", "off") else ""
        problems.append(node.problem(f"must be {_TYPE_NAMES[hint]}, not {node.in_words()}{hinted}"))
    elif isinstance(value, float) and not math.isfinite(value):
        problems.append(node.problem(f"must be a finite number, not {value}"))
    return value


_HintArguments = tuple[object, ...]
"""The arguments of a generic type hint: (str, int) for dict[str, int]."""


def _bind_annotated(node: Node, arguments: _HintArguments, problems: list[str], given: object) -> object:
    for owner in arguments[1:]:
        if isinstance(owner, ReadBy):
            return owner.read(node, problems, given)
    num_before = len(problems)
    value = _bind_value(node, arguments[0], problems, given)
    # A text says what else may be meant.
    remedies = [text for text in arguments[1:] if isinstance(text, str)]
    for number in range(num_before, len(problems)) if remedies else ():
        problems[number] = " ".join([problems[number].rstrip(".") + "." * (problems[number][-1] != "?"), *remedies])
    if isinstance(value, int | float):
        complaints = [bound.complaint(value) for bound in arguments[1:] if isinstance(bound, Bound)]
        problems += [node.problem(complaint) for complaint in complaints if complaint]
    elif isinstance(value, str):
        found = [check(value) for check in arguments[1:] if isinstance(check, types.FunctionType)]
        problems += [node.problem(problem) for problem in found if problem]
    return value


def _bind_union(node: Node, arguments: _HintArguments, problems: list[str], given: object) -> object:
    if node.value is None and type(None) in arguments:
        return None
    for option in arguments:
        # It knows from the node which class is meant.
        if hasattr(option, "variant"):
            return _bind_value(node, option, problems, given)
    trials: list[tuple[object, list[str]]] = []
    # Where a float is allowed, a float is not read as a whole number.
    for option in sorted(arguments, key=lambda option: option is not float) if isinstance(node.value, float) else arguments:
        if option is not type(None):
            trial_problems: list[str] = []
            value = _bind_value(node, option, trial_problems, given)
            if not trial_problems:
                return value
            trials.append((value, trial_problems))
    # Report the option that the user most likely meant: unions name scalars first and collections last.
    value, trial_problems = trials[-1] if isinstance(node.value, dict | list) else trials[0]
    problems += trial_problems
    return value


def _bind_literal(node: Node, arguments: _HintArguments, problems: list[str], _: object) -> object:
    value = node.value
    # In Python 1 == True; a choice of numbers must not take true.
    if value not in arguments or isinstance(value, bool) != isinstance(arguments[0], bool):
        near = nearest(value, map(str, arguments), lists=False) if isinstance(value, str) else ""
        problems.append(node.problem(f"{shown(node.plain())} is not one of {', '.join(map(str, arguments))}. {near}".rstrip()))
    return value


def _bind_tuple(node: Node, arguments: _HintArguments, problems: list[str], given: object) -> object:
    if hasattr(arguments[0], "NAME"):
        return _bind_named(node, typing.cast("type[object]", arguments[0]), problems, given)
    if not isinstance(node.value, list):
        example = f". Write [{', '.join(node.value.split())}]" if isinstance(node.value, str) else ""
        problems.append(node.problem(f"must be a list, not {node.in_words()}{example}"))
        return None
    if arguments[-1] is not ... and len(node.value) != len(arguments):
        problems.append(node.problem(f"must be a list of {len(arguments)}, not of {len(node.value)}"))
        return None
    return tuple(_bind_value(item, arguments[0], problems, given) for item in node.value)


def _bind_named(node: Node, cls: type[object], problems: list[str], given: object) -> object:
    if not isinstance(node.value, dict | None):
        problems.append(node.problem(f"must be a mapping of keys to values, not {node.in_words()}"))
    return tuple(_bind_class(item, cls, problems, given, name) for name, item in node.children.items())


def _bind_dict(node: Node, arguments: _HintArguments, problems: list[str], given: object) -> object:
    if not isinstance(node.value, dict):
        problems.append(node.problem(f"must be a mapping, not {node.in_words()}"))
        return None
    return {name: _bind_value(item, arguments[1], problems, given) for name, item in node.value.items()}


_BINDERS: Mapping[object, Callable[[Node, _HintArguments, list[str], object], object]] = {
    typing.Annotated: _bind_annotated,
    typing.Union: _bind_union,
    types.UnionType: _bind_union,
    Literal: _bind_literal,
    tuple: _bind_tuple,
    dict: _bind_dict,
}
"""By the origin of a generic type hint, as `typing.get_origin` returns it."""

_TYPE_NAMES: Mapping[object, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
