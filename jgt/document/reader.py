"""YAML text → nodes, and plain values → YAML text. The only file that knows YAML.

It reads a subset on purpose: no tags, no anchors or aliases, no merge keys, no duplicate keys, one document, at most 32
levels deep and MAX_VALUES long. Scalars follow YAML 1.2's core schema, so that `1e-4` is a float and `no` is a string.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import yaml

from jgt.document.node import InputError, Node, joined, shown

MAX_DEPTH = 32
MAX_VALUES = 10_000
MAX_KEY = 1_000
_MAX_DIGITS = 300
"""Shorter than what a float or Python's conversion of integers would not take."""
_MAX_OPEN = 1_000
"""Levels that are read past: libyaml's time grows with the square of the open brackets."""

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SURROGATE = re.compile("[\ud800-\udfff]")
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None, "true": True, "True": True, "false": False, "False": False}


def parse(text: str, where: str) -> Node:
    """Reads YAML text; `where` stands for the file's name in messages. Raises InputError."""
    problems: list[str] = []
    node = build(text, where, problems)
    if problems:
        raise InputError(problems)
    return node


def build(text: str, file: str, problems: list[str]) -> Node:
    """Like `parse`, appending to `problems`."""
    # From events: tags, anchors and aliases are visible there and nowhere later.
    empty = Node(None, f"{file}:1")
    events = _events(text, file, problems)
    root: Node | None = None
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            if root is not None:
                problems.append(f"{_at(file, event)}: a second document starts here; one file holds one document")
                return root
            first = next(events, None)
            if first is None:
                return empty
            root = _node(first, events, file, "", 0, problems)
    return root or empty


def _events(text: str, file: str, problems: list[str]) -> Iterator[yaml.Event]:
    num_open = num_values = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            num_open += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            num_values += isinstance(event, yaml.NodeEvent)
            if num_open > _MAX_OPEN:
                return
            if num_values > MAX_VALUES:
                problems.append(f"{_at(file, event)}: more than {MAX_VALUES:,} keys and values, the most that is read; the rest was not")
                return
            if isinstance(event, yaml.ScalarEvent) and _SURROGATE.search(event.value):
                problems.append(f"{_at(file, event)}: {shown(event.value)} holds half of a surrogate pair, which is no character")
            yield event
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = min(mark.line, text.count("\n")) + 1 if mark else 1
        problems.append(f"{file}:{line}: not valid YAML: {error.problem or error.context}. Check the indentation, brackets and quotes there")
    except yaml.YAMLError as error:
        problems.append(f"{file}:1: not valid YAML: {str(error).splitlines()[0]}")
    except UnicodeEncodeError as error:
        line = text[: error.start].count("\n") + 1
        problems.append(f"{file}:{line}: not Unicode text: {text[error.start]!r} at character {error.start}")
    except (ValueError, OverflowError) as error:
        # Of the loader in Python: numbers of versions and of characters.
        problems.append(f"{file}:1: not valid YAML: {error}")


def _at(file: str, event: yaml.Event) -> str:
    return f"{file}:{event.start_mark.line + 1}"


def _node(event: yaml.Event, events: Iterator[yaml.Event], file: str, key: str, depth: int, problems: list[str]) -> Node:
    where = _at(file, event)
    node = Node(None, where, key)
    if isinstance(event, yaml.AliasEvent):
        problems.append(node.problem(f"the alias *{event.anchor} is not allowed; write the value out, or use extends:"))
        return node
    assert isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
    if event.anchor is not None:
        problems.append(node.problem(f"the anchor &{event.anchor} is not allowed; write the value out, or use extends:"))
    if event.tag is not None:
        problems.append(node.problem(f"the tag {event.tag} is not allowed; write a plain value"))
    if isinstance(event, yaml.ScalarEvent):
        return Node(_scalar(event.value) if event.implicit[0] else event.value, where, key)
    if depth == MAX_DEPTH:
        problems.append(node.problem(f"nested deeper than {MAX_DEPTH} levels"))
        _skip(events)
        return node
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[Node] = []
        for item in events:
            if isinstance(item, yaml.SequenceEndEvent):
                break
            items.append(_node(item, events, file, f"{key}[{len(items)}]", depth + 1, problems))
        return Node(items, where, key)
    values: dict[str, Node] = {}
    for name_event in events:
        if isinstance(name_event, yaml.MappingEndEvent):
            break
        name = _key_text(name_event, events, file, key, problems)
        value_event = next(events, None)
        if value_event is None:
            break
        value = _node(value_event, events, file, joined(key, name), depth + 1, problems)
        if name in values:
            problems.append(f"{_at(file, name_event)}: {joined(key, name)}: this key is given twice; the first is at {values[name].where}")
            continue
        values[name] = dataclasses.replace(value, where=_at(file, name_event))
    return Node(values, where, key)


def _skip(events: Iterator[yaml.Event]) -> None:
    """Reads past the rest of a collection, however deep it is."""
    num_open = 1
    for event in events:
        num_open += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if num_open == 0:
            return


def _key_text(event: yaml.Event, events: Iterator[yaml.Event], file: str, key: str, problems: list[str]) -> str:
    where = f"{_at(file, event)}: {key or 'file'}"
    if isinstance(event, yaml.ScalarEvent):
        if event.tag is not None or event.anchor is not None:
            problems.append(f"{where}: tags and anchors are not allowed on keys")
        if event.value == "<<" and event.implicit[0]:
            problems.append(f"{where}: the merge key << is not allowed; write the values out, or use extends:")
        if len(key) + len(event.value) < MAX_KEY:
            return event.value
        # Each value below would carry it along.
        problems.append(f"{where}: the key {shown(event.value)} is longer than {MAX_KEY:,} characters, with those around it")
        return "?"
    problems.append(f"{where}: a key must be plain text")
    if not isinstance(event, yaml.AliasEvent):
        _skip(events)
    return "?"


def _scalar(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _MAX_DIGITS:
        return text
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        digits = text.replace("_", "").lower()
        return float(digits.replace(".inf", "inf").replace(".nan", "nan"))
    return text


class _Dumper(yaml.SafeDumper):
    """Lists stand on one line; text that `parse` would read as something else is quoted; no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    plain = value.isprintable() and isinstance(_scalar(value), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True))


def dump(value: Any) -> str:
    """Ordinary Python objects as YAML text that `parse` reads back unchanged."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
