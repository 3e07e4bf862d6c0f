"""The JSON Schema of a run file: the schema of `Config`, and of the parts of the file that other rooms read."""

from __future__ import annotations

from typing import Any

from jgt.document.schema import DIALECT, Schema, mapping_of, or_null, schema_of
from jgt.mesh.sizes import MAX_DEVICES
from jgt.planner import Budget
from jgt.rules.schema import rules_schema

from ..config import Config

_NUMBER: Schema = {"type": "number", "minimum": 0}
_TEXTS = {
    "mesh": "The axes of the mesh and their sizes, outermost first. One size may be -1: the remaining devices.",
    "rules": "The path of a rules file, relative to this one, jgt:NAME for one that jgt ships, or the rules themselves. null: one device.",
    "budget": "The limits of `jgt plan`: of the whole step, or of a signal in GB.",
    "sync": "How often the devices along an axis of the mesh agree, and what they send.",
    "pipeline": "Distributes the layers under a signal over the stages of a mesh axis.",
}


def run_schema() -> Schema:
    """The schema of a run file."""
    sections: dict[str, Schema] = schema_of(Config)["properties"]
    own: dict[str, Schema] = {
        # null removes an axis of the file that this one extends.
        "mesh": {"type": "object", "additionalProperties": or_null({"type": "integer", "minimum": -1, "maximum": MAX_DEVICES})},
        "rules": {"anyOf": [{"type": "string"}, {key: value for key, value in rules_schema().items() if not key.startswith("$")}]},
        "budget": _budget(),
    }
    # These two are optional in `Config`.
    sections |= {name: sections[name]["anyOf"][0] for name in ("pipeline", "sync")}
    extends: Schema = {"type": "string", "description": "A file that this one overrides, relative to this one, or jgt:NAME."}
    texts = {name: _TEXTS.get(name, f"The `{name}:` section.") for name in sections}
    described = {name: {"description": texts[name], **or_null(own.get(name, section))} for name, section in sections.items()}
    return {"$schema": DIALECT, "title": "A run of jgt", **mapping_of({"extends": extends, **described})}


def _budget() -> dict[str, Any]:
    limits = dict.fromkeys(Budget.KEYS, _NUMBER)
    return {"type": "object", "properties": limits, "additionalProperties": {"type": "object", "additionalProperties": _NUMBER}}
