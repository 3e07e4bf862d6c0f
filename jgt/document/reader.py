"""YAML text to nodes, and plain values to YAML text. The only module that imports yaml.

It reads a subset of YAML on purpose. Tags, anchors, aliases and merge keys make a file mean something other than it shows, and
duplicate keys drop a line silently: all are errors here. A document has limits on depth, values and keys, because a file of a
few kilobytes could otherwise keep a cluster busy. Scalars follow the core schema of YAML 1.2 instead of PyYAML's 1.1, so that
`1e-4` is a float, `no` is a string and `1:30` is not 90.

Nodes are built from the parser's events, not from its objects: only events still show tags, anchors and lines.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import cast

import yaml

from jgt.document.node import Node, Value, dotted_key
from jgt.document.problems import InputError, shown

MAX_DEPTH = 32
"""Levels of mappings and lists inside each other."""
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"
_LIBYAML_TOO_DEEP = "maximum nesting depth"
"""Part of libyaml's message at its own limit of 1,000 levels, which it has since PyYAML 6.0.4."""

MAX_VALUES = 10_000
"""Keys and values of a document."""

MAX_KEY = 1_000
"""Characters of a dotted key. Every value below a key carries it along, so that long keys cost quadratic memory."""

_MAX_DIGITS = 300
"""Longer numbers are text. float() overflows soon after, and int() has a limit of its own."""

_MAX_OPEN = 1_000
"""Levels at which reading stops altogether: libyaml's time grows with the square of the open brackets."""

# PyYAML may be built without libyaml. Its own parser reads the same YAML, more slowly.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SURROGATE = re.compile("[\ud800-\udfff]")
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None, "true": True, "True": True, "false": False, "False": False}


def parse(text: str, where: str) -> Node:
    """Reads YAML text. where: what messages name as its file. Raises InputError."""
    problems: list[str] = []
    node = build(text, where, problems)
    if problems:
        raise InputError(problems)
    return node


def build(text: str, file: str, problems: list[str]) -> Node:
    """Reads YAML text like `parse`, but appends to `problems` and returns what could be read."""
    return _Builder(text, file, problems).document()


def dump(value: object) -> str:
    """Ordinary Python objects as YAML text that `parse` reads back unchanged."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Builder:
    """Builds the nodes of one text, and collects the problems on the way."""

    def __init__(self, text: str, file: str, problems: list[str]):
        self._file = file
        self._problems = problems
        self._events = self._limited_events(text)

    def document(self) -> Node:
        """The root of the text's only document."""
        root: Node | None = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    self._report(event, "a second document starts here; a file has one document")
                    return root
                first = next(self._events, None)
                root = self._node(first, "", 0) if first else None
        return root or Node(None, f"{self._file}:1")

    def _limited_events(self, text: str) -> Iterator[yaml.Event]:
        """The parser's events, up to the first limit or the first error. Either becomes a problem."""
        num_open = num_values = 0
        try:
            for event in cast("Iterator[yaml.Event]", yaml.parse(text, Loader=_Loader)):
                num_open += _depth_change(event)
                num_values += isinstance(event, yaml.NodeEvent)
                if num_open > _MAX_OPEN:
                    # _node has reported MAX_DEPTH long before.
                    return
                if num_values > MAX_VALUES:
                    self._report(event, f"more than {MAX_VALUES:,} keys and values, which is the limit; the rest was not read")
                    return
                if isinstance(event, yaml.ScalarEvent) and _SURROGATE.search(event.value):
                    self._report(event, f"{shown(event.value)} contains half of a surrogate pair, which is not a character")
                yield event
        except yaml.MarkedYAMLError as error:
            self._report_syntax(error, text)
        except yaml.YAMLError as error:
            self._problems.append(f"{self._file}:1: not valid YAML: {str(error).splitlines()[0]}")
        except UnicodeEncodeError as error:
            line = text[: error.start].count("\n") + 1
            self._problems.append(f"{self._file}:{line}: not Unicode text: {text[error.start]!r} at character {error.start}")
        except (ValueError, OverflowError) as error:
            # PyYAML's loader in Python lets these through, for version numbers and \U escapes that are too large.
            self._problems.append(f"{self._file}:1: not valid YAML: {error}")

    def _report_syntax(self, error: yaml.MarkedYAMLError, text: str) -> None:
        mark = error.problem_mark or error.context_mark
        # The end of the text may be one line behind its last.
        line = min(mark.line, text.count("\n")) + 1 if mark else 1
        if _LIBYAML_TOO_DEEP not in (error.problem or ""):
            self._problems.append(f"{self._file}:{line}: not valid YAML: {_syntax_problem(error, text)}")
        # libyaml may reach its limit before its first event. Otherwise _node has reported MAX_DEPTH.
        elif not any(_TOO_DEEP in problem for problem in self._problems):
            self._problems.append(f"{self._file}:{line}: {_TOO_DEEP}")

    def _report(self, event: yaml.Event, problem: str) -> None:
        self._problems.append(f"{self._at(event)}: {problem}")

    def _at(self, event: yaml.Event) -> str:
        return f"{self._file}:{event.start_mark.line + 1}"

    def _node(self, event: yaml.Event, key: str, depth: int) -> Node:
        node = Node(None, self._at(event), key)
        if isinstance(event, yaml.AliasEvent):
            self._problems.append(node.problem(f"the alias *{event.anchor} is not allowed; write the value out, or use extends:"))
            return node
        assert isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
        if event.anchor is not None:
            self._problems.append(node.problem(f"the anchor &{event.anchor} is not allowed; write the value out, or use extends:"))
        if event.tag is not None:
            self._problems.append(node.problem(f"the tag {event.tag} is not allowed; write a plain value"))
        if isinstance(event, yaml.ScalarEvent):
            # implicit[0]: the scalar is not quoted.
            return dataclasses.replace(node, value=_scalar(event.value) if event.implicit[0] else event.value)
        if depth == MAX_DEPTH:
            self._problems.append(node.problem(_TOO_DEEP))
            self._skip_collection()
            return node
        is_list = isinstance(event, yaml.SequenceStartEvent)
        return dataclasses.replace(node, value=self._list(key, depth) if is_list else self._mapping(key, depth))

    def _list(self, key: str, depth: int) -> list[Node]:
        items: list[Node] = []
        for event in self._events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self._node(event, f"{key}[{len(items)}]", depth + 1))
        return items

    def _mapping(self, key: str, depth: int) -> dict[str, Node]:
        values: dict[str, Node] = {}
        for name_event in self._events:
            if isinstance(name_event, yaml.MappingEndEvent):
                break
            name = self._key_text(name_event, key)
            value_event = next(self._events, None)
            # The events end early at a limit or at a syntax error, which is a problem already.
            if value_event is None:
                break
            path = dotted_key(key, name)
            value = self._node(value_event, path, depth + 1)
            if name in values:
                self._report(name_event, f"{path}: this key is given twice; the first is at {values[name].where}")
                continue
            # The line of the key, which is where a reader looks for a value that begins on the next line.
            values[name] = dataclasses.replace(value, where=self._at(name_event))
        return values

    def _key_text(self, event: yaml.Event, key: str) -> str:
        """The name of an entry below `key`, or "?" if it cannot be one."""
        parent = key or "file"
        if isinstance(event, yaml.ScalarEvent):
            if event.tag is not None or event.anchor is not None:
                self._report(event, f"{parent}: tags and anchors are not allowed on keys")
            if event.value == "<<" and event.implicit[0]:
                self._report(event, f"{parent}: the merge key << is not allowed; write the values out, or use extends:")
            if len(key) + len(event.value) < MAX_KEY:
                return event.value
            limit = f"{MAX_KEY:,} characters, including the keys around it"
            self._report(event, f"{parent}: the key {shown(event.value)} is longer than {limit}")
            return "?"
        self._report(event, f"{parent}: a key must be plain text")
        if not isinstance(event, yaml.AliasEvent):
            self._skip_collection()
        return "?"

    def _skip_collection(self) -> None:
        """Reads to the end of a collection whose start was read last, however deep it is."""
        num_open = 1
        for event in self._events:
            num_open += _depth_change(event)
            if num_open == 0:
                return


def _depth_change(event: yaml.Event) -> int:
    return isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)


def _syntax_problem(error: yaml.MarkedYAMLError, text: str) -> str:
    """The parser's message, or a better one for the mistakes that it describes by their consequence."""
    mark, problem = error.problem_mark, error.problem or error.context or ""
    lines = text.split("\n")
    if mark and mark.line < len(lines) and lines[mark.line][mark.column : mark.column + 1] == "\t":
        return "there is a tab where YAML allows only spaces. Replace it with spaces"
    if "expected alphabetic or numeric character" in problem:
        return "text that begins with * or & must be in quotes, because YAML reads it as an alias or an anchor"
    return f"{problem}. Check the indentation, brackets and quotes there"


def _scalar(text: str) -> Value:
    """The value of an unquoted scalar, by the core schema of YAML 1.2 (section 10.3.2) without octal and hexadecimal numbers."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _MAX_DIGITS:
        return text
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        # float() knows inf and nan, but without the dot.
        digits = text.replace("_", "").lower()
        return float(digits.replace(".inf", "inf").replace(".nan", "nan"))
    return text


class _Dumper(yaml.SafeDumper):
    """Lists on one line, no anchors, and quotes around text that `parse` would read as something else."""

    # An object that occurs twice would be written as an anchor and an alias, which `parse` refuses.
    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    is_safe = value.isprintable() and isinstance(_scalar(value), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if is_safe else '"')


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True))
