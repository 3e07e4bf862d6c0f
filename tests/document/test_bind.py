"""Nodes to dataclasses, and documents over each other: what is filled, what is refused, and where the message points."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from problems import problems_of

from jgt.document import Bound, Node, bind, merge, override, parse
from jgt.document.bind import ReadBy

# -- merge and override


def test_merge_puts_the_child_first_and_lets_null_remove():
    child = parse("b: 2\ns: {y: 1, z: null}\ngone: null", "c.yaml")
    parent = parse("a: 1\nb: 1\ns: {x: 0, y: 0, z: 0}\ngone: 1", "p.yaml")
    merged = merge(child, parent).plain()
    assert merged == {"b": 2, "s": {"y": 1, "x": 0}, "a": 1}
    assert list(merged) == ["b", "s", "a"]
    assert list(merged["s"]) == ["y", "x"]


def test_merge_replaces_lists_whole_and_keeps_a_null_that_removes_nothing():
    assert merge(parse("l: [1]\nn: null", "c"), parse("l: [1, 2, 3]", "p")).plain() == {"l": [1], "n": None}


def test_merge_lets_a_scalar_replace_a_mapping():
    assert merge(parse("a: 1", "c"), parse("a: {b: 1}", "p")).plain() == {"a": 1}


def test_override_sets_one_key_and_keeps_the_order():
    root = parse("a: 1\ntrain: {steps: 1, lr: 2}\nz: 0", "f.yaml")
    changed = override(root, "train.steps=[3, x]")
    assert changed.plain() == {"a": 1, "train": {"steps": [3, "x"], "lr": 2}, "z": 0}
    assert list(changed.value) == ["a", "train", "z"]
    assert changed.find("train.steps").where == "command line: train.steps=[3, x]"
    assert changed.find("train.lr").where == "f.yaml:2"


def test_override_makes_sections_and_writes_null():
    changed = override(parse("a: 1", "f"), "b.c=null")
    assert changed.plain() == {"a": 1, "b": {"c": None}}
    assert changed.find("b.c").key == "b.c"


def test_override_takes_text_with_equals():
    assert override(parse("a: 1", "f"), "a=x=y").plain() == {"a": "x=y"}


@pytest.mark.parametrize("assignment", ["a", "=1", "a..b=1", "a.=1", ""])
def test_override_refuses_what_is_no_assignment(assignment):
    (problem,) = problems_of(override, parse("a: 1", "f"), assignment)
    assert "an override is written key.sub=value" in problem


@pytest.mark.parametrize("key", [".".join("a" * 33), "a" * 1_001, ".".join("a" * 100_000)])
def test_override_refuses_keys_without_end(key):
    (problem,) = problems_of(override, parse("a: 1", "f"), f"{key}=1")
    assert "characters; the limits are 32 levels and 1,000 characters" in problem and len(problem) < 400


def test_override_refuses_bad_yaml():
    assert problems_of(override, parse("a: 1", "f"), "a=[")[0].startswith("command line: a=[:1: not valid YAML")


# -- bind


@dataclass(frozen=True)
class Inner:
    x: int = 1

    def problems(self):
        if self.x == 13:
            yield "x", "must not be 13"


@dataclass(frozen=True)
class Outer:
    flag: bool = False
    count: int = 0
    rate: float = 0.0
    name: str = ""
    kind: Literal["a", "b"] = "a"
    bounded: Annotated[int, Bound(low=1, high=9)] = 1
    positive: Annotated[float, Bound(above=0)] = 1.0
    inner: Inner = dataclasses.field(default_factory=Inner)
    items: tuple[int, ...] = ()
    table: dict[str, Inner] = dataclasses.field(default_factory=dict)
    maybe: int | None = None
    either: str | tuple[int, ...] = ""
    part: Node | None = None


@dataclass(frozen=True)
class Needs:
    x: int
    y: int


def bound(text, cls=Outer):
    problems = []
    return bind(parse(text, "f.yaml"), cls, problems), problems


def test_bind_fills_every_type():
    text = (
        "flag: true\ncount: 2\nrate: 3\nname: n\nkind: b\nbounded: 9\npositive: 0.1\ninner: {x: 5}\nitems: [1, 2]\n"
        "table: {k: {x: 6}}\nmaybe: 7\neither: [8]"
    )
    value, problems = bound(text)
    assert problems == []
    assert value == Outer(True, 2, 3.0, "n", "b", 9, 0.1, Inner(5), (1, 2), {"k": Inner(6)}, 7, (8,))
    assert type(value.rate) is float


@pytest.mark.parametrize(("text", "value"), [("count: 1e3", 1000), ("bounded: 2.0", 2), ("maybe: 1.0e1", 10), ("items: [1e0]", (1,))])
def test_a_whole_number_may_be_written_as_a_float(text, value):
    filled, problems = bound(text)
    found = getattr(filled, text.split(":")[0])
    assert problems == [] and found == value and type(found) is type(value)


def test_a_float_beyond_the_exact_ones_is_not_a_whole_number():
    assert bound("count: 1e16")[1] == ["f.yaml:1: count: must be a whole number, not the number 1e+16"]


def test_where_a_float_is_allowed_it_stays_one():
    @dataclass(frozen=True)
    class Flags:
        flags: dict[str, bool | int | float | str]

    filled, _ = bound("flags: {a: 1.0, b: 1, c: true}", Flags)
    assert [type(value) for value in filled.flags.values()] == [float, int, bool]


def test_a_key_of_a_section_that_is_written_outside():
    @dataclass(frozen=True)
    class Two:
        one: Inner = dataclasses.field(default_factory=Inner)
        two: Inner = dataclasses.field(default_factory=Inner)

    assert bound("x: 1")[1] == ["f.yaml:1: x: unknown key. Did you mean 'inner.x'?"]
    assert bound("x: 1", Two)[1] == ["f.yaml:1: x: unknown key. Did you mean 'one.x' or 'two.x'?"]
    assert "Did you mean 'inner'?" in bound("innr: 1")[1][0]


def test_bind_hands_a_node_through():
    value, _ = bound("part: {a: [1]}")
    assert value.part.plain() == {"a": [1]}


def test_bind_takes_null_where_none_is_allowed():
    assert bound("maybe: null") == (Outer(), [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("flag: yes", "f.yaml:1: flag: must be true or false, not the text 'yes' (write true or false)"),
        ("flag: 1", "f.yaml:1: flag: must be true or false, not the whole number 1"),
        ("count: 1.5", "f.yaml:1: count: must be a whole number, not the number 1.5"),
        ("count: true", "f.yaml:1: count: must be a whole number, not true"),
        ("count: null", "f.yaml:1: count: must be a whole number, not null"),
        ("rate: x", "f.yaml:1: rate: must be a number, not the text 'x'"),
        ("rate: .nan", "f.yaml:1: rate: must be a finite number, not nan"),
        ("rate: .inf", "f.yaml:1: rate: must be a finite number, not inf"),
        ("name: 1", "f.yaml:1: name: must be text, not the whole number 1"),
        ("name: [a]", "f.yaml:1: name: must be text, not a list"),
        ("kind: c", "f.yaml:1: kind: 'c' is not one of a, b."),
        ("kind: [a]", "f.yaml:1: kind: ['a'] is not one of a, b"),
        ("bounded: 0", "f.yaml:1: bounded: 0 is too small; it must be at least 1"),
        ("bounded: 10", "f.yaml:1: bounded: 10 is too large; it must be at most 9"),
        ("bounded: x", "f.yaml:1: bounded: must be a whole number, not the text 'x'"),
        ("positive: 0", "f.yaml:1: positive: 0.0 is too small; it must be greater than 0"),
        ("inner: 1", "f.yaml:1: inner: must be a mapping of keys to values, not the whole number 1"),
        ("inner:\n  y: 1", "f.yaml:2: inner.y: unknown key. Known: x"),
        ("inner:\n  x: 13", "f.yaml:2: inner.x: must not be 13"),
        ("items: 1", "f.yaml:1: items: must be a list, not the whole number 1"),
        ("items:\n- 1\n- x", "f.yaml:3: items[1]: must be a whole number, not the text 'x'"),
        ("table: [1]", "f.yaml:1: table: must be a mapping, not a list"),
        ("table:\n  k:\n    x: y", "f.yaml:3: table.k.x: must be a whole number, not the text 'y'"),
        ("maybe: x", "f.yaml:1: maybe: must be a whole number, not the text 'x'"),
        ("either: 1", "f.yaml:1: either: must be text, not the whole number 1"),
        ("either: [x]", "f.yaml:1: either[0]: must be a whole number, not the text 'x'"),
        ("name: n\ncuont: 1", "f.yaml:2: cuont: unknown key. Did you mean 'count'?"),
        ("5", "f.yaml:1: file: must be a mapping of keys to values, not the whole number 5"),
    ],
)
def test_bind_says_what_is_wrong(text, problem):
    value, problems = bound(text)
    assert value is None or "must not be 13" in problem
    assert len(problems) == 1
    assert problems[0].startswith(problem)


def test_bind_reports_missing_keys_and_all_else_at_once():
    value, problems = bound("x: a\nz: 1", Needs)
    assert value is None
    assert [p.split(": ", 1)[1] for p in problems] == [
        "x: must be a whole number, not the text 'a'",
        "z: unknown key. Known: x, y.",
        "file: the key 'y' is missing",
    ]


def read_times(node, problems, times):
    if not isinstance(node.value, int):
        problems.append(node.problem("is not a number"))
        return 0
    return node.value * times


@dataclass(frozen=True)
class Short:
    VALUE = "x"
    x: Annotated[int, ReadBy(read_times, {"type": "integer"})]
    where: str = ""


@dataclass(frozen=True)
class Named:
    """A named one.

    short: the number.
    """

    NAME = "name"
    name: str
    short: Short
    pair: tuple[str, str] = ("a", "b")
    where: str = ""


@dataclass(frozen=True)
class Table:
    entries: tuple[Named, ...] = ()
    shorts: tuple[Named, ...] | None = None


def bound_times(text):
    problems = []
    return bind(parse(text, "f.yaml"), Table, problems, 10), problems


def test_a_mapping_fills_a_tuple_of_classes_that_know_their_names_and_places():
    value, problems = bound_times("entries:\n  first: {short: 3}\n  second:\n    pair: [c, d]\n    short: 4\nshorts: null")
    assert problems == []
    one, two = Named("first", Short(30, "f.yaml:2"), where="f.yaml:2"), Named("second", Short(40, "f.yaml:5"), ("c", "d"), "f.yaml:3")
    assert value == Table((one, two), None)
    assert bound_times("entries: null") == (Table(), [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("entries: [a]", "f.yaml:1: entries: must be a mapping of keys to values, not a list"),
        ("entries: {a: {short: x}}", "f.yaml:1: entries.a.short: is not a number"),
        ("entries: {a: null}", "f.yaml:1: entries.a: the key 'short' is missing: the number"),
        ("entries: {a: {short: 1, name: b}}", "f.yaml:1: entries.a.name: unknown key. Known: short, pair."),
        ("entries: {a: {short: 1, where: b}}", "f.yaml:1: entries.a.where: unknown key. Known: short, pair."),
        ("entries: {a: {short: 1, pair: [b]}}", "f.yaml:1: entries.a.pair: must be a list of 2, not of 1"),
        ("entries: {a: {short: 1, pair: [b, c, d]}}", "f.yaml:1: entries.a.pair: must be a list of 2, not of 3"),
    ],
)
def test_a_mistake_in_a_mapping_of_classes_is_named(text, problem):
    assert bound_times(text) == (None, [problem])
