"""Random hostile input: values that break programs, and mutations that keep most of a valid file.

A reader refuses a file of random bytes at its first line. A valid file with a few changes finds more faults, so
`mutated` changes a tree of dicts, lists and scalars, and `spoiled` changes bytes. A fuzz test draws the same few examples each time;
`JGT_FUZZ=5000 pytest -n 0 tests/hostile/test_fuzz_*.py` draws 5,000 new ones for each test.
"""

import json
import os

from hostile import SECONDS
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from jgt import document

_RANDOM_EXAMPLES = int(os.environ.get("JGT_FUZZ", "0"))


def fuzz(examples):
    """The settings of a fuzz test: the same examples each time, unless JGT_FUZZ asks for a number of random ones."""
    return settings(
        max_examples=_RANDOM_EXAMPLES or examples,
        derandomize=not _RANDOM_EXAMPLES,
        database=None,
        deadline=SECONDS * 1000,
        suppress_health_check=list(HealthCheck),
        # Explaining a failure would trace every line of the others.
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )


def as_yaml(tree):
    return document.dump(tree).encode("utf-8", "surrogatepass")


def as_json(tree):
    return json.dumps(tree).encode()


NUMBERS = [
    -1,
    0,
    2,
    2**31,
    2**32,
    2**63,
    10**18,
    10**30,
    10**390,
    -(10**390),
    1e308,
    5e-324,
    -0.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    0.5,
]
TEXTS = [
    "",
    " ",
    "a\nb",
    "\x1b[31mred",
    "a\0b",
    "\x85\u2028\u202e",
    "..",
    "../../up",
    "/dev/zero",
    "/dev/null/x",
    "a" * 300,
    "a/" * 300,
    "x" * 70_000,
    "9" * 5_000,
    "1e999",
    "*" * 60 + "x",
    "**/" * 60 + "x",
    "{,a}" * 60 + "x",
    "{" * 60,
    "[" * 60,
    "!!python/object/apply:os.system [touch canary]",
    "<<",
    "extends",
    "%s%n{0}${HOME}",
    "gpipe",
    ".csv",
    "nan",
    "2024-01-01",
]


def nested(depth, inner=None):
    """A list nested `depth` levels deep."""
    for _ in range(depth):
        inner = [inner]
    return inner


TREES = [
    [],
    {},
    {"": 1},
    {"<<": {"a": 1}},
    {"a\nb": 1},
    {"x" * 3000: [1] * 50},
    nested(20),
    nested(40),
    [[]] * 50,
    dict.fromkeys(map(str, range(50))),
]
values = st.sampled_from([None, True, False, *NUMBERS, *TEXTS, *TREES]) | st.integers(-3, 70) | st.text(max_size=8)


def _places(tree, path=()):
    yield path
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield from _places(child, (*path, key))


def _changed(tree, path, change):
    """The tree with `change` applied to the container and key at a path."""
    tree = tree.copy()
    if len(path) == 1:
        change(tree, path[0])
    else:
        tree[path[0]] = _changed(tree[path[0]], path[1:], change)
    return tree


@st.composite
def mutated(draw, tree, most=3):
    """A tree of dicts, lists and scalars with up to `most` values replaced, removed, doubled, moved or renamed."""
    for _ in range(draw(st.integers(1, most))):
        places = [path for path in _places(tree) if path]
        if not places:
            return draw(values)
        value, name, kind = (
            draw(values),
            draw(st.sampled_from(TEXTS)),
            draw(st.sampled_from(["set", "set", "set", "drop", "wrap", "name", "move"])),
        )
        other = draw(st.sampled_from(places))

        def change(container, key, value=value, name=name, kind=kind, other=other, tree=tree):
            if kind == "drop":
                del container[key]
            elif kind == "wrap":
                container[key] = [container[key]] if draw(st.booleans()) else {"a": container[key]}
            elif kind == "name" and isinstance(container, dict):
                container[name] = container.pop(key)
            elif kind == "move":
                moved = tree
                for part in other:
                    moved = moved[part]
                container[key] = moved
            else:
                container[key] = value

        tree = _changed(tree, draw(st.sampled_from(places)), change)
    return tree


PIECES = [
    b"",
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\n",
    b"\r",
    b"\t",
    b": ",
    b"- ",
    b"[",
    b"]" * 9,
    b"{" * 40,
    b"[" * 3000,
    b"&a ",
    b"*a ",
    b"!!x ",
    b"<<: ",
    b"---\n",
    b"...\n",
    b'"',
    b"'",
    b"|\n",
    b"%",
    b"#",
    b"1e999",
    b"9" * 5000,
    b"\xed\xa0\x80",
    b"\\ud800",
    b",",
]


@st.composite
def spoiled(draw, data, most=3):
    """Bytes with up to `most` parts replaced, removed, doubled or cut off."""
    for _ in range(draw(st.integers(1, most))):
        start = draw(st.integers(0, len(data)))
        stop = min(start + draw(st.sampled_from([0, 0, 1, 1, 2, 7, 50])), len(data))
        kind = draw(st.sampled_from(["piece", "piece", "bytes", "double", "flip", "cut"]))
        if kind == "piece":
            data = data[:start] + draw(st.sampled_from(PIECES)) + data[stop:]
        elif kind == "bytes":
            data = data[:start] + draw(st.binary(max_size=4)) + data[stop:]
        elif kind == "double":
            data = data[:stop] + data[start:]
        elif kind == "flip" and start < len(data):
            data = data[:start] + bytes([data[start] ^ (1 << draw(st.integers(0, 7)))]) + data[start + 1 :]
        elif kind == "cut":
            data = data[:start]
    return data
