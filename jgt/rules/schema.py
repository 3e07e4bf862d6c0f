"""The JSON Schemas of run files and rules files, for editors.

Rules are read entry by entry (`load.py`) and not into one dataclass, so their schema is written here, from the same lists of keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jgt.document.schema import Schema, file_schema, mapping_of, or_null
from jgt.rules.load import (
    ACTIONS,
    BACKWARD_KEYS,
    CONTEXT_KEYS,
    EXCHANGES,
    EXPERTS_KEYS,
    MAX_ROOM,
    METHODS,
    ORDERS,
    OVERFLOWS,
    SIGNAL_KEYS,
    TOP_KEYS,
)

_AXES: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_SPEC: Schema = {
    "description": "The mesh axes of each dim: an axis, a list of axes, null for a dim that is not split, or `...` for several of those.",
    "type": "array",
    "items": {"anyOf": [*_AXES["anyOf"], {"type": "null"}]},
}
_TEXTS = {
    "axes": "Names for mesh axes, or for lists of them. By default, dim 0 of every input is split over the axes of `batch`.",
    "inputs": "The spec of each input, by its path.",
    "params": "The spec of each parameter, by the end of its path.",
    "optimizer": "The spec of each parameter's optimizer state and gradient, where it differs from the parameter's.",
    "signals": "What happens at each signal, by a pattern such as `layers/*`.",
    "default": "Parameters without a rule are replicated. Without this key, they are an error.",
    "tensors": "The spec of each tensor that signal.tensor names.",
    "out": "The spec of the values that are computed inside the signal and used outside.",
    "backward": "Other specs for the cotangents.",
    "overlap": "The mesh axis whose sends run beside the matmuls of the signal, part by part.",
    "experts": "Where the experts are that the signal calls, and how rows travel to them.",
    "context": "The mesh axis that splits the sequence of the signal's attention, and how queries and keys meet.",
    "axis": "The mesh axis that holds the experts, or that splits the sequence.",
    "method": "How keys reach queries: around a ring, all at once, or by an exchange of rows for heads.",
    "order": "The order of the parts of a sequence in which devices compute. In zigzag order all have equal work under a causal mask.",
    "between": "The names of the tensors q, k and v, and of the attention's result.",
    "exchange": "How rows travel: by an all-to-all of arrays with a fixed capacity.",
    "room": "The capacity factor: the rows that each pair of devices has room for, over an equal share.",
    "over": "What becomes of rows beyond the capacity: they are sent in further rounds, or dropped.",
    "save": "What becomes of a named tensor until the backward pass.",
}


def file_schemas(sections: type[Any], keys: Mapping[str, Schema], texts: Mapping[str, str]) -> dict[str, Schema]:
    """The schemas of a run file and of a rules file, by name.

    sections: the class whose fields are the sections of a run. keys: the schemas of keys that `bind` does not read. texts: descriptions.
    """
    rules = file_schema("Rules of jgt", "jgt:rules/NAME", {key: _of_key(key) for key in TOP_KEYS}, _TEXTS)
    inline = {key: value for key, value in rules.items() if not key.startswith("$")}
    keys = {**keys, "rules": {"anyOf": [{"type": "string"}, inline]}}
    return {"run": file_schema("A run of jgt", "jgt:NAME", keys, texts, sections), "rules": rules}


def _described(keys: tuple[str, ...]) -> dict[str, Schema]:
    return {key: {"description": _TEXTS[key], **or_null(_of_key(key))} for key in keys}


def _of_key(key: str) -> Schema:
    if key == "signals":
        return _by_pattern(or_null(mapping_of(_described(SIGNAL_KEYS))))
    if key == "backward":
        return mapping_of(_described(BACKWARD_KEYS))
    if key == "experts":
        return mapping_of(_described(EXPERTS_KEYS))
    if key == "context":
        return mapping_of(_described(CONTEXT_KEYS))
    others: dict[str, Schema] = {
        "method": {"enum": list(METHODS)},
        "order": {"enum": list(ORDERS)},
        "between": {"type": "array", "items": {"type": "string"}, "minItems": 4, "maxItems": 4},
        "axis": {"type": "string"},
        "exchange": {"enum": list(EXCHANGES)},
        "room": {"type": "number", "minimum": 1, "maximum": MAX_ROOM},
        "over": {"enum": list(OVERFLOWS)},
        "axes": _by_pattern(_AXES),
        "default": {"enum": ["replicate"]},
        "save": _by_pattern({"enum": list(ACTIONS)}),
        "out": _SPEC,
        "overlap": {"type": "string"},
        "inputs": {"anyOf": [_SPEC, _by_pattern(_SPEC)]},
    }
    return others.get(key, _by_pattern(_SPEC))


def _by_pattern(schema: Schema) -> Schema:
    return {"type": "object", "additionalProperties": or_null(schema)}
