"""YAML text → values that know their line; values → frozen dataclasses.

The only file that knows YAML. It reads a subset on purpose: no tags, no anchors or aliases, no duplicate
keys, one document, at most 1 MB, at most 32 levels deep. Scalars follow YAML 1.2's core schema, so that `1e-4`
is a float and `no` is a string. Nothing here imports JAX: a typo is answered in milliseconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

MAX_BYTES = 1_000_000
MAX_DEPTH = 32

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None, "true": True, "True": True, "false": False, "False": False}


class InputError(ValueError):
    """The input is wrong. `problems` has one `file:line: key: what, what is allowed, what to change` each."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


@contextlib.contextmanager
def collect(problems: list[str]) -> Iterator[None]:
    """Appends what an InputError inside says to `problems` and goes on: the next part is checked too."""
    try:
        yield
    except InputError as error:
        problems += error.problems


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a document: a dict of nodes, a list of nodes or a scalar; where it stands; its dotted key."""

    value: Any
    where: str
    key: str = ""

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.value, dict)

    def plain(self) -> Any:
        """The value as ordinary Python objects."""
        if isinstance(self.value, dict):
            return {name: child.plain() for name, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def find(self, key: str) -> Node:
        """The node at a dotted key, or its nearest ancestor that was written down."""
        node = self
        for part in filter(None, key.split(".")):
            if not (isinstance(node.value, dict) and part in node.value):
                break
            node = node.value[part]
        return node

    def problem(self, message: str) -> str:
        return f"{self.where}: {self.key or 'file'}: {message}"


# -- reading ---------------------------------------------------------------------------------------------------


def read(path: str | Path, *, name: str | None = None) -> Node:
    """Reads a YAML file, following `extends:` (a path beside the file). Raises InputError with every problem."""
    problems: list[str] = []
    node = _read(Path(path), problems, seen=(), name=name)
    if problems:
        raise InputError(problems)
    return node


def parse(text: str, where: str) -> Node:
    """Reads YAML text; `where` stands for the file's name in messages. Raises InputError."""
    problems: list[str] = []
    node = _build(text, where, problems)
    if problems:
        raise InputError(problems)
    return node


def from_python(value: Any, where: str, key: str = "") -> Node:
    """Wraps ordinary Python objects, so that rules and configs built in code are checked like files."""
    if isinstance(value, Mapping):
        return Node({str(k): from_python(v, where, _join(key, str(k))) for k, v in value.items()}, where, key)
    if isinstance(value, list | tuple):
        return Node([from_python(v, where, f"{key}[{i}]") for i, v in enumerate(value)], where, key)
    return Node("..." if value is ... else value, where, key)


def merge(child: Node, parent: Node) -> Node:
    """`child` over `parent`, entry by entry: the child's entries come first, and a null removes the parent's."""
    if not (isinstance(child.value, dict) and isinstance(parent.value, dict)):
        return child
    merged: dict[str, Node] = {}
    for name, node in child.value.items():
        inherited = parent.value.get(name)
        if inherited is not None and node.value is None:
            continue
        merged[name] = node if inherited is None else merge(node, inherited)
    for name, node in parent.value.items():
        if name not in child.value:
            merged[name] = node
    return Node(merged, child.where, child.key)


def override(root: Node, assignment: str) -> Node:
    """Puts one `key.sub=value` of a command line in the place of what the key holds; the value is YAML. Raises InputError."""
    key, equals, text = assignment.partition("=")
    where = f"command line: {assignment}"
    if not equals or not all(key.split(".")):
        raise InputError([f"{where}: an override is written key.sub=value, for example train.steps=300"])
    value = parse(text, where)
    return _replaced(root, key.split("."), _relocate(value, where, key))


def _replaced(root: Node, parts: Sequence[str], node: Node) -> Node:
    """`root` with the value at a path replaced; mappings on the way that are missing are made."""
    if not parts:
        return node
    name, *rest = parts
    if not (root.value is None or isinstance(root.value, dict)):
        below = node.key.removeprefix(f"{root.key}.")
        raise InputError([f"{node.where}: {root.key or 'file'}: holds {describe(root.value)} ({root.where}), so {below!r} cannot be set below it"])
    values = dict(root.value) if root.value else {}
    values[name] = _replaced(values.get(name, Node(None, node.where, _join(root.key, name))), rest, node)
    return Node(values, root.where, root.key)


def _relocate(node: Node, where: str, key: str) -> Node:
    if isinstance(node.value, dict):
        return Node({k: _relocate(v, where, _join(key, k)) for k, v in node.value.items()}, where, key)
    if isinstance(node.value, list):
        return Node([_relocate(v, where, f"{key}[{i}]") for i, v in enumerate(node.value)], where, key)
    return Node(node.value, where, key)


def _read(path: Path, problems: list[str], seen: tuple[Path, ...], name: str | None) -> Node:
    shown = name or str(path)
    empty = Node({}, shown)
    resolved = path.resolve()
    if resolved in seen:
        problems.append(f"{shown}: extends: the files extend each other in a circle: {' -> '.join(p.name for p in (*seen, resolved))}")
        return empty
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        problems.append(f"{shown}: cannot be read: {error.strerror or error}")
        return empty
    if len(data) > MAX_BYTES:
        problems.append(f"{shown}: the file is larger than {MAX_BYTES:,} bytes, the most a YAML file may have here")
        return empty
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        problems.append(f"{shown}:{line}: not UTF-8: byte {data[error.start]:#04x} at offset {error.start}. Save the file as UTF-8")
        return empty
    node = _build(text, shown, problems)
    if not isinstance(node.value, dict):
        if node.value is not None:
            problems.append(f"{node.where}: the file must be a mapping of keys to values, not {describe(node.value)}")
        return empty
    extends = node.value.pop("extends", None)
    if extends is None:
        return node
    if not isinstance(extends.value, str):
        problems.append(extends.problem(f"must be the path of a file, not {describe(extends.value)}"))
        return node
    parent_path = path.parent / extends.value
    if not parent_path.is_file():
        problems.append(extends.problem(f"no such file: {parent_path}"))
        return node
    return merge(node, _read(parent_path, problems, (*seen, resolved), str(parent_path)))


def _build(text: str, file: str, problems: list[str]) -> Node:
    """Builds nodes from YAML events: tags, anchors and aliases are visible there and nowhere later."""
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
    try:
        yield from yaml.parse(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = min(mark.line, text.count("\n")) + 1 if mark else 1
        problems.append(f"{file}:{line}: not valid YAML: {error.problem or error.context}. Check the indentation, brackets and quotes there")
    except yaml.YAMLError as error:
        problems.append(f"{file}:1: not valid YAML: {str(error).splitlines()[0]}")
    except UnicodeEncodeError as error:
        line = text[: error.start].count("\n") + 1
        problems.append(f"{file}:{line}: not Unicode text: {text[error.start]!r} at character {error.start}")


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
        value = _node(value_event, events, file, _join(key, name), depth + 1, problems)
        if name in values:
            problems.append(f"{_at(file, name_event)}: {_join(key, name)}: this key is given twice; the first is at {values[name].where}")
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
    if isinstance(event, yaml.ScalarEvent):
        if event.tag is not None or event.anchor is not None:
            problems.append(f"{_at(file, event)}: {key or 'file'}: tags and anchors are not allowed on keys")
        return event.value
    problems.append(f"{_at(file, event)}: {key or 'file'}: a key must be plain text")
    if not isinstance(event, yaml.AliasEvent):
        _skip(events)
    return "?"


def _scalar(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text.replace("_", "")) if len(text) < 400 else text
    if _FLOAT.fullmatch(text):
        digits = text.replace("_", "").lower()
        return float(digits.replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


# -- writing ---------------------------------------------------------------------------------------------------


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


# -- binding ---------------------------------------------------------------------------------------------------


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
            return f"{value} is too large; it must be at most {self.high}"
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
        problems.append(Node(None, node.find(name).where, _join(node.key, name)).problem(message))
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
            problems.append(node.problem(f"{node.plain()!r} is not one of {', '.join(map(str, args))}. {nearest(str(node.plain()), map(str, args))}"))
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


def describe(value: Any) -> str:
    """A value of a document, in words."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    kind = {bool: "", int: "the whole number ", float: "the number ", str: "the text "}.get(type(value), "")
    return f"{kind}{str(value).lower() if isinstance(value, bool) else repr(value)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`Did you mean 'x'?` with the nearest of `known`, or the list of them."""
    options = list(dict.fromkeys(known))
    close = suggestion(name, options)
    if close:
        return close.lstrip()
    if not options:
        return "None is known here"
    shown = ", ".join(options[:12]) + (", ..." if len(options) > 12 else "")
    return f"Known: {shown}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` with the nearest of `known`, for a message that lists them already; empty when none is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
