"""The JSON Schemas of run files and rules files, for editors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jgt.document.schema import Schema, file_schema, is_optional, or_null, schema_of
from jgt.rules.load import RulesFile

_SPLIT = {"params": "The axes over which parameters are split.", "optimizer": "The axes over which their optimizer state alone is split."}


def file_schemas(sections: type[Any], keys: Mapping[str, Schema], texts: Mapping[str, str]) -> dict[str, Schema]:
    """The schemas of a run file and of a rules file, by name.

    sections: the class whose fields are the sections of a run. keys: the schemas of keys that `bind` does not read. texts: descriptions.
    """
    by_key: dict[str, Schema] = {key: _nullable(schema) for key, schema in schema_of(RulesFile)["properties"].items()}
    # One spec may stand in the place of a mapping.
    by_input = by_key["inputs"]["anyOf"][0]
    by_key["inputs"]["anyOf"][0] = {"anyOf": [by_input["additionalProperties"]["anyOf"][0], by_input]}
    rules = file_schema("Rules of jgt", "jgt:rules/NAME", by_key, {})
    inline = {key: value for key, value in rules.items() if not key.startswith("$")}
    keys = {**keys, "rules": {"anyOf": [{"type": "string"}, inline]}}
    return {"run": file_schema("A run of jgt", "jgt:NAME", keys, texts, sections), "rules": rules}


def _nullable(schema: Schema) -> Schema:
    """The schema of a part of rules: at any depth, null removes what an extended file has, and nothing has a default."""
    said = {key: value for key, value in schema.items() if key == "description"}
    inside: Schema = schema["anyOf"][0] if is_optional(schema) else {k: v for k, v in schema.items() if k not in ("description", "default")}
    if "properties" in inside:
        inside = {**inside, "properties": {name: _nullable(part) for name, part in inside["properties"].items()}}
    elif isinstance(inside.get("additionalProperties"), dict):
        inside = {**inside, "additionalProperties": _nullable(inside["additionalProperties"])}
    return {**said, **or_null(inside)}
