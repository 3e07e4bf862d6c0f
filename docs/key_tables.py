"""Writes the tables of keys in the pages of docs/ from the classes that read the keys. Run it after a change of a key or of its docstring.

    python docs/key_tables.py

A table stands between two comments. The first one names its class:

    <!-- keys: SpikesConfig of skip_spikes -->

    | key | type | default | meaning |
    ...

    <!-- end of keys -->

Types, limits and defaults are those of the class, and the meaning of a key is what its docstring says. `of` gives the keys a prefix, and
`only a, b` chooses some of them. Rows keep their order in the page, and new keys come last. Keys of a nested class or of a base class
stand in the same table, unless the page has a table of that class.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeGuard

from jgt.document import Bound, LocalPath, Node, dump
from jgt.document.keys import descriptions, hints_of, is_required, keys_of
from train.config import Config
from train.files.bucket import PathOrUrl

PAGES = sorted(Path(__file__).parent.glob("*.md"))

_TABLE = re.compile(r"(<!-- keys: (\w+)(?: of (\S+))?(?: only ([\w, ]+))? -->\n)(.*?)(<!-- end of keys -->)", re.DOTALL)
_HEAD = "| key | type | default | meaning |\n|---|---|---|---|\n"
_NO_LIMIT = 1e30
"""The limit of numbers that have no other, which no row has to state."""
_WORDS: Mapping[object, str] = {bool: "bool", int: "int", float: "float", str: "text", LocalPath: "path", PathOrUrl: "path, URL"}


def main() -> None:
    """Writes the tables of all pages."""
    for page in PAGES:
        page.write_text(with_tables(page.read_text(), Config))


def with_tables(page: str, sections: type[Any]) -> str:
    """The page with its tables, which are about this class and the classes in it. Raises KeyError for a table of another class."""
    classes = {cls.__name__: cls for cls in classes_in(sections)}
    listed = {match[2] for match in _TABLE.finditer(page)}

    def table(match: re.Match[str]) -> str:
        begin, name, prefix, only, before, end = match.groups()
        found = dict(_rows(classes[name], f"{prefix}." if prefix else "", only.split(", ") if only else None, listed - {name}))
        order = re.findall(r"^\| `(.+?)` \|", before, re.MULTILINE)
        rows = [found[key] for key in sorted(found, key=lambda key: order.index(key) if key in order else len(order))]
        return f"{begin}\n{_HEAD}{''.join(rows)}\n{end}"

    return _TABLE.sub(table, page)


def classes_in(hint: object) -> Iterator[type[Any]]:
    """Every class in a type hint, with its bases, and in the hints of its keys."""
    if _is_section(hint):
        yield from filter(dataclasses.is_dataclass, hint.__mro__)
        for key in keys_of(hint):
            yield from classes_in(hints_of(hint)[key.name])
    for argument in typing.get_args(hint):
        yield from classes_in(argument)


def _is_section(hint: object) -> TypeGuard[type[Any]]:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint is not Node


def _rows(cls: type[Any], prefix: str, only: Collection[str] | None, listed: Collection[str]) -> Iterator[tuple[str, str]]:
    """The keys and the rows of a table. listed: the classes with a table of their own."""
    texts, hints = descriptions(cls), hints_of(cls)
    for key in keys_of(cls):
        owner = next(base for base in cls.__mro__ if key.name in vars(base).get("__annotations__", ()))
        if owner.__name__ in listed or (only and key.name not in only):
            continue
        name, hint = f"{prefix}{key.name}", hints[key.name]
        meaning = texts[key.name].removesuffix(".")
        if key.name == getattr(cls, "REST", None):
            yield "any other", f"| any other | | | {meaning} |\n"
            continue
        yield name, f"| `{name}` | {_type_text(hint)} | {_default_text(key)} | {meaning} |\n"
        inside = f"{name}[]." if typing.get_origin(hint) is tuple else f"{name}."
        for option in (hint, *typing.get_args(hint)):
            if _is_section(option) and option.__name__ not in listed:
                yield from _rows(option, inside, None, listed)


def _default_text(key: dataclasses.Field[Any]) -> str:
    if is_required(key):
        return "required"
    value: Any = key.default if key.default_factory is dataclasses.MISSING else key.default_factory()
    text = dump({"": list(value) if isinstance(value, tuple) else value}).partition(": ")[2].strip()
    # YAML writes 1.0e-05.
    text = re.sub(r"(\.0)?e-0", "e-", text)
    return f"`{text}`"


def _type_text(hint: object) -> str:
    if hint in _WORDS:
        return _WORDS[hint]
    if of_arguments := _BY_ORIGIN.get(typing.get_origin(hint)):
        return of_arguments(typing.get_args(hint))
    assert _is_section(hint), hint
    return "mapping"


def _annotated(arguments: tuple[Any, ...]) -> str:
    word = _type_text(arguments[0])
    return next((f"{word} {_limits(bound)}" for bound in arguments[1:] if isinstance(bound, Bound)), word)


def _limits(bound: Bound) -> str:
    high = "" if bound.high is None or bound.high == _NO_LIMIT else f"{bound.high:,}"
    if bound.above is not None:
        return f"> {bound.above}, ≤ {high}" if high else f"> {bound.above}"
    return f"{bound.low} to {high}" if high else f"≥ {bound.low}"


def _union(arguments: tuple[Any, ...]) -> str:
    words = [_type_text(option) for option in arguments if option is not type(None)]
    return " or ".join([*words, *(["null"] if type(None) in arguments else [])])


def _tuple(arguments: tuple[Any, ...]) -> str:
    word, *limits = _type_text(arguments[0]).split(" ", 1)
    return " ".join(["list of", word if word.startswith("`") else f"{word}s", *limits])


_BY_ORIGIN: Mapping[object, Callable[[tuple[Any, ...]], str]] = {
    typing.Annotated: _annotated,
    typing.Union: _union,
    types.UnionType: _union,
    Literal: lambda arguments: ", ".join(f"`{choice}`" for choice in arguments),
    tuple: _tuple,
    dict: lambda arguments: "mapping",
}
"""By the origin of a generic type hint, as for `bind`."""


if __name__ == "__main__":
    main()
