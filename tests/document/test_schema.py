"""A schema says what `bind` reads: types, bounds, choices, defaults, and the docstring's text."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from jgt.document import Bound, Node, bind, parse
from jgt.document.keys import descriptions
from jgt.document.schema import or_null, schema_of

jsonschema = pytest.importorskip("jsonschema")


@dataclass(frozen=True, kw_only=True)
class Item:
    """An item.

    weight: how much; a: note in the text.
    """

    weight: Annotated[float, Bound(above=0, high=2)]
    name: str = "x"


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section.

    count, size: two numbers
    over two lines.
    kind: which one. flag: is inside of a line.
    other: is not a field.

    Another paragraph.
    """

    count: Annotated[int, Bound(low=1, high=9)] = 1
    size: Annotated[int, Bound(low=1)] | None = None
    kind: Literal["a", "b", 3] = "a"
    flag: bool = False
    flags: dict[str, bool | float | str] = field(default_factory=dict)
    items: tuple[Item, ...] = ()
    inner: Item = field(default_factory=lambda: Item(weight=1.0))
    part: Node | None = None
    hidden: int = field(default=0, init=False)


def test_the_text_of_a_field_ends_where_the_next_one_begins():
    assert descriptions(Section) == {
        "count": "two numbers over two lines.",
        "size": "two numbers over two lines.",
        "kind": "which one. flag: is inside of a line. other: is not a field.",
    }


def test_the_schema_is_json_and_has_the_defaults():
    schema = schema_of(Section)
    jsonschema.Draft7Validator.check_schema(json.loads(json.dumps(schema)))
    assert "hidden" not in schema["properties"]
    assert schema["properties"]["count"] == {
        "type": "integer", "minimum": 1, "maximum": 9, "description": "two numbers over two lines.", "default": 1
    }  # fmt: skip


RIGHT = ["{}", "count: 9", "count: 1e0", "size: null", "kind: 3", "flags: {a: true, b: 1.5, c: x}"]
RIGHT += ["items: [{weight: 1}]", "inner: {weight: 2}", "part: [1]"]
WRONG = ["count: 0", "count: 10", "count: 1.5", "count: '1'", "kind: c", "flag: 1", "flags: {a: []}"]
WRONG += ["items: [{}]", "items: [{weight: 0}]", "x: 1", "hidden: 1"]


@pytest.mark.parametrize("text", RIGHT + WRONG)
def test_the_schema_and_the_reader_agree(text):
    problems = []
    bind(parse(text, "f.yaml"), Section, problems)
    is_valid = jsonschema.Draft7Validator(schema_of(Section)).is_valid(parse(text, "f.yaml").plain())
    assert is_valid == (not problems) == (text in RIGHT), problems


def test_null_removes_what_a_base_file_has():
    validator = jsonschema.Draft7Validator(or_null(schema_of(Section)))
    assert validator.is_valid(None) and validator.is_valid({}) and not validator.is_valid([])
