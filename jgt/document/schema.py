"""Frozen dataclasses to JSON Schema, so that an editor completes and checks what `bind` will read.

The type hints, bounds and docstrings that `bind` and its readers use are all there is to say about a section, so the schema is derived from
them and cannot disagree. It is the weaker check of the two: what several keys decide together is left to `bind`, and no key is required
outside a list, because a file may inherit it by `extends:`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from jgt.document.bind import Bound, ReadBy
from jgt.document.keys import descriptions, hints_of, is_required, keys_of, without_links
from jgt.document.node import Node

Schema = dict[str, Any]
DIALECT = "http://json-schema.org/draft-07/schema#"
"""The version of JSON Schema that editors understand best."""
_SCALARS: Mapping[object, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def schema_of(cls: type[Any], *, in_list: bool = False) -> Schema:
    """The schema of a mapping that `bind` reads as this class. in_list: it is an item of a list, which no file inherits in part."""
    hints, texts, rest = hints_of(cls), descriptions(cls), getattr(cls, "REST", None)
    keys = [field for field in keys_of(cls) if field.name != rest]
    said = {key.name: {"description": without_links(texts[key.name])} if key.name in texts else {} for key in keys}
    properties = {key.name: {**_of_hint(hints[key.name]), **said[key.name], **_default(key)} for key in keys}
    required = [key.name for key in keys if in_list and is_required(key)]
    return mapping_of(properties) | ({"additionalProperties": True} if rest else {}) | ({"required": required} if required else {})


def file_schema(
    title: str, example: str, keys: Mapping[str, Schema], texts: Mapping[str, str], sections: type[Any] | None = None
) -> Schema:
    """The schema of a whole file, whose `extends` names a file that it overrides, and where null removes what that file has.

    example: what `extends` may be beside a path. keys: their schemas. texts: their descriptions. sections: a class that `bind` reads, whose
    fields are keys as well.
    """
    properties: dict[str, Schema] = {} if sections is None else schema_of(sections)["properties"]
    entries: Schema = {"extends": {"type": "string", "description": f"A file that this one overrides, relative to this one, or {example}."}}
    for name, schema in {**properties, **keys}.items():
        text = texts.get(name) or schema.get("description", f"The `{name}:` section.")
        # Every key may be null here.
        entries[name] = {"description": text, **or_null(schema["anyOf"][0] if is_optional(schema) else schema)}
    return {"$schema": DIALECT, "title": title, **mapping_of(entries)}


def mapping_of(properties: Mapping[str, Schema]) -> Schema:
    """The schema of a mapping with these keys and no others."""
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def or_null(schema: Schema) -> Schema:
    """The schema, or null: in a file that extends another, null removes what the other has."""
    return {"anyOf": [schema, {"type": "null"}]}


def is_optional(schema: Schema) -> bool:
    """Whether the schema is one that `or_null` returns."""
    return {"type": "null"} in schema.get("anyOf", ())


def _default(field: dataclasses.Field[Any]) -> Schema:
    value = field.default
    if isinstance(value, tuple):
        return {"default": list(cast("tuple[object, ...]", value))}
    return {"default": value} if value is None or isinstance(value, bool | int | float | str) else {}


def _of_hint(hint: object) -> Schema:
    if hint is Node:
        # Its owner reads it, and knows its schema.
        return {}
    if of_arguments := _BY_ORIGIN.get(typing.get_origin(hint)):
        return of_arguments(typing.get_args(hint))
    if dataclasses.is_dataclass(hint):
        cls = cast("type[Any]", hint)
        return _of_hint(hints_of(cls)[cls.VALUE]) if hasattr(cls, "VALUE") else schema_of(cls)
    return {"type": _SCALARS[hint]}


def _annotated(arguments: tuple[Any, ...]) -> Schema:
    owners = [owner for owner in arguments[1:] if isinstance(owner, ReadBy)]
    bounds = [bound for bound in arguments[1:] if isinstance(bound, Bound)]
    return dict(owners[0].schema) if owners else _of_hint(arguments[0]) | _limits(bounds)


def _union(arguments: tuple[Any, ...]) -> Schema:
    own = [option for option in arguments if hasattr(option, "REST")]
    if own:
        return _named(own[0], next(option for option in arguments if hasattr(option, "variant")))
    return {"anyOf": [_of_hint(argument) for argument in arguments]}


def _tuple(arguments: tuple[Any, ...]) -> Schema:
    if hasattr(arguments[0], "NAME"):
        return {"type": "object", "additionalProperties": _of_hint(arguments[0])}
    length = {} if arguments[-1] is ... else {"minItems": len(arguments), "maxItems": len(arguments)}
    return {"type": "array", "items": _of_item(arguments[0]), **length}


def _named(own: Any, plain: Any) -> Schema:
    """The schema of a section that names an object, MODULE:NAME, by the field without a default, or is plain."""
    key = next(field.name for field in dataclasses.fields(own) if field.default is dataclasses.MISSING)
    named = {"properties": {key: {"type": "string", "pattern": "^[^:]+:[^:]+$"}}, "required": [key]}
    return {"if": named, "then": schema_of(own), "else": schema_of(plain)}


def _of_item(hint: object) -> Schema:
    return schema_of(cast("type[Any]", hint), in_list=True) if dataclasses.is_dataclass(hint) else _of_hint(hint)


def _limits(bounds: list[Bound]) -> Schema:
    words = {"low": "minimum", "high": "maximum", "above": "exclusiveMinimum"}
    return {word: value for bound in bounds for name, word in words.items() if (value := getattr(bound, name)) is not None}


_BY_ORIGIN: Mapping[object, Callable[[tuple[Any, ...]], Schema]] = {
    typing.Annotated: _annotated,
    typing.Union: _union,
    types.UnionType: _union,
    Literal: lambda arguments: {"enum": list(arguments)},
    tuple: _tuple,
    dict: lambda arguments: {"type": "object", "additionalProperties": _of_hint(arguments[1])},
}
"""By the origin of a generic type hint, as for `bind`."""
