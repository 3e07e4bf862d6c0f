"""YAML text → nodes → dataclasses: what is read, what is refused, and where the message points."""

import math
import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from problems import file_problems, plain, problems_of

from jgt import document
from jgt.document import InputError, Node, compose, dump, files, parse, read, reader

# -- scalars


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E3", 1000.0),
        ("3", 3),
        ("-3", -3),
        ("007", 7),
        ("1_000", 1000),
        ("0.5", 0.5),
        (".5", 0.5),
        ("1.", 1.0),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'1e-4'", "1e-4"),
        ('"null"', "null"),
        ("...x", "...x"),
        ("0x10", "0x10"),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("e5", "e5"),
        ("[a, ..., null]", ["a", "...", None]),
    ],
)
def test_a_scalar_is_read_by_the_core_schema(text, value):
    read = plain(text)
    assert read == value
    assert type(read) is type(value)


def test_not_a_number_is_read():
    assert math.isnan(plain(".nan"))


def test_a_very_long_number_stays_text():
    assert isinstance(plain("9" * 5000), str)


def test_a_node_knows_its_line_and_key():
    node = parse("a:\n  b:\n  - x\n  - c: 1\n", "f.yaml").value["a"].value["b"].value[1].value["c"]
    assert (node.where, node.key) == ("f.yaml:4", "a.b[1].c")


def test_find_goes_as_far_as_was_written():
    root = parse("a:\n  b: 1\n  c:\n  - d: 2\n  -\n    - 3\n", "f.yaml")
    assert root.find("a.b").where == "f.yaml:2"
    assert root.find("a.x.y").where == "f.yaml:1"
    assert (root.find("a.c[0].d").key, root.find("a.c[0].d").where) == ("a.c[0].d", "f.yaml:4")
    assert root.find("a.c[1][0]").value == 3
    for beyond in ("a.c[2].d", "a.c[-1]", "a.c[x]", "a.c.d"):
        assert root.find(beyond).key == "a.c"
    assert root.find("a[0]").key == "a"


# -- refusals


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: !!str 2", "f.yaml:2: b: the tag tag:yaml.org,2002:str is not allowed"),
        ("a: !x 2", "f.yaml:1: a: the tag !x is not allowed"),
        ("a: &x 2", "f.yaml:1: a: the anchor &x is not allowed"),
        ("a: [*x]", "f.yaml:1: a[0]: the alias *x is not allowed"),
        ("a: 1\nb: 2\na: 3", "f.yaml:3: a: this key is given twice; the first is at f.yaml:1"),
        ("x: {a: 1, a: 2}", "f.yaml:1: x.a: this key is given twice; the first is at f.yaml:1"),
        ("a: 1\n---\nb: 2", "f.yaml:2: a second document starts here"),
        ("a: [1", "f.yaml:1: not valid YAML: "),
        ("a: 1\n\tb: 2", "f.yaml:2: not valid YAML: "),
        ("a: b: c", "f.yaml:1: not valid YAML: mapping values are not allowed in this context"),
        ("a\0b", "f.yaml:1: not valid YAML: "),
        ("a: 1\nb: \ud800", "f.yaml:2: not Unicode text: '\\ud800' at character 8"),
        ("? [a]\n: 1", "f.yaml:1: file: a key must be plain text"),
        ("? {a: [b]}\n: 1\nb: 1", "f.yaml:1: file: a key must be plain text"),
        ("!!str a: 1", "f.yaml:1: file: tags and anchors are not allowed on keys"),
        ("&x a: 1", "f.yaml:1: file: tags and anchors are not allowed on keys"),
        ("%YAML 3.0\n---\na", "f.yaml:1: not valid YAML: "),
        ("*x", "f.yaml:1: file: the alias *x is not allowed"),
    ],
)
def test_text_outside_of_the_subset_is_refused(text, problem):
    assert problems_of(parse, text, "f.yaml")[0].startswith(problem)


def test_depth_is_limited():
    assert plain("[" * 32 + "]" * 32)
    (problem,) = problems_of(parse, "[" * 33 + "]" * 33, "f.yaml")
    assert problem.endswith("nested deeper than 32 levels")


@pytest.mark.parametrize("opening", ["[", "{a: ", "{", "- ", "? "])
def test_depth_without_end_is_refused_too(opening):
    assert problems_of(parse, opening * 3000, "f.yaml")


def test_what_follows_too_deep_a_part_is_still_read():
    found = problems_of(parse, "a: " + "[" * 40 + "]" * 40 + "\nb: !x 1", "f.yaml")
    assert found[1].startswith("f.yaml:2: b: the tag !x")


@pytest.mark.parametrize("opening", ["[", "{a: "])
def test_open_brackets_take_no_time(opening):
    started = time.perf_counter()
    assert problems_of(parse, opening * 200_000, "f.yaml")
    assert time.perf_counter() - started < 2


def test_values_are_counted():
    assert len(plain("[" + "a, " * (reader.MAX_VALUES - 1) + "]")) == reader.MAX_VALUES - 1
    (problem,) = problems_of(parse, "a:\n" + "- {}\n" * reader.MAX_VALUES, "f.yaml")
    assert problem == f"f.yaml:{reader.MAX_VALUES - 1}: more than 10,000 keys and values, which is the limit; the rest was not read"


def test_the_length_of_a_key_is_limited_with_those_around_it():
    assert plain("x" * 900 + ": {y: 1}") == {"x" * 900: {"y": 1}}
    (problem,) = problems_of(parse, "x" * 900 + ": {" + "y" * 100 + ": 1}", "f.yaml")
    assert problem.endswith(f"the key {'y' * 100!r} is longer than 1,000 characters, including the keys around it")


def test_a_merge_key_is_refused_and_its_text_is_not():
    (problem,) = problems_of(parse, "a:\n  <<: {b: 1}", "f.yaml")
    assert problem == "f.yaml:2: a: the merge key << is not allowed; write the values out, or use extends:"
    assert plain("a: <<\n'<<': b") == {"a": "<<", "<<": "b"}


@pytest.mark.parametrize("text", ["9" * 301, "1" * 100_000 + "x", "1" + "_" * 100_000, "." * 100_000, "1." * 50_000, "1e" + "9" * 100_000])
def test_what_is_too_long_for_a_number_is_text(text):
    started = time.perf_counter()
    assert plain(text) == text
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize(
    "text", ['"\\ud800"', '"\\UFFFFFFFF"', "%YAML " + "9" * 5_000 + ".1\n---\n", "a: !x 1", "[" * 2_000, "\0", "a: *x", "a: 1\na: 2"]
)
def test_the_loader_in_python_refuses_the_same(monkeypatch, text):
    monkeypatch.setattr(reader, "_Loader", yaml.SafeLoader)
    assert all(problem.startswith("f.yaml:") for problem in problems_of(parse, text, "f.yaml"))


def test_all_problems_come_at_once():
    found = problems_of(parse, "a: !x 1\nb: &y 2\nb: 3\nc: [*z]", "f.yaml")
    assert [p.split(":")[1] for p in found] == ["1", "2", "3", "4"]


def test_a_message_is_all_problems():
    with pytest.raises(InputError, match=r"(?s)^f.yaml:1: a: .*\nf.yaml:2: b: ") as caught:
        parse("a: !x 1\nb: !x 2", "f.yaml")
    assert isinstance(caught.value, ValueError)


def test_a_problem_is_one_line_that_can_be_shown():
    (problem,) = InputError(["a\nb\x1b[31m\u202e\ud800\x85" + "x" * 5_000]).problems
    assert problem.startswith("a\\nb\\x1b[31m\\u202e\\ud800\\x85xx") and problem.isprintable() and len(problem) < 2_100


def test_of_many_problems_the_first_are_shown():
    found = InputError(f"f:{line}: x" for line in range(5_000, 0, -1)).problems
    assert found[:2] == ("f:1: x", "f:2: x") and found[-1] == "and 4,000 more problems" and len(found) == 1_001


def test_a_line_that_is_no_number_is_no_place():
    assert len(InputError([f"f:{'9' * 5_000}: x", "f:1: x"]).problems) == 2


# -- files


def test_a_missing_file(tmp_path):
    (problem,) = problems_of(read, tmp_path / "no.yaml")
    assert problem == f"{tmp_path}/no.yaml: cannot be read: No such file or directory"


def test_a_folder(tmp_path):
    assert "cannot be read" in problems_of(read, tmp_path)[0]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a: " + b"x" * compose.MAX_BYTES, "a.yaml: the file is larger than 1,000,000 bytes"),
        (b"a: 1\nb: \xff", "a.yaml:2: not UTF-8: byte 0xff at offset 8"),
        (b"- 1", "a.yaml:1: the file must be a mapping of keys to values, not a list"),
        (b"\n5", "a.yaml:2: the file must be a mapping of keys to values, not the whole number 5"),
        (b"extends: a.yaml", "a.yaml: extends: the files extend each other in a circle: a.yaml -> a.yaml"),
        (b"x: 1\nextends: no.yaml", "a.yaml:2: extends: no such file: no.yaml"),
        (b"extends: [a]", "a.yaml:1: extends: must be the path of a file, not a list"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, content, problem):
    (found,) = file_problems(tmp_path, {"a.yaml": content})
    assert found.startswith(problem)


def test_a_circle_of_two_files_is_refused(tmp_path):
    (found,) = file_problems(tmp_path, {"a.yaml": "extends: b.yaml", "b.yaml": "extends: a.yaml"})
    assert "in a circle: a.yaml -> b.yaml -> a.yaml" in found


def test_problems_of_a_file_and_its_parent_come_together(tmp_path):
    found = file_problems(tmp_path, {"a.yaml": "x: !t 1\nextends: b.yaml", "b.yaml": "\ny: !t 1"})
    assert [p.split(": ")[0] for p in found] == ["a.yaml:1", "b.yaml:2"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "null\n", "---\n"])
def test_an_empty_file_is_a_mistake(tmp_path, text):
    expected = "the file is empty. Write its keys, or name another file"
    assert file_problems(tmp_path, {"a.yaml": text}) == [f"a.yaml: {expected}"]
    assert file_problems(tmp_path, {"a.yaml": "extends: b.yaml", "b.yaml": text}) == [f"b.yaml: {expected}"]


def test_a_mapping_without_keys_is_not_empty(tmp_path):
    (tmp_path / "a.yaml").write_text("{}")
    assert read(tmp_path / "a.yaml").plain() == {}


@pytest.mark.parametrize(("name", "near"), [("rn.yaml", "run.yaml"), ("run.yml", "run.yaml"), ("run.txt", None), ("no/run.yaml", None)])
def test_a_missing_file_has_its_nearest_name(tmp_path, name, near):
    (tmp_path / "run.yaml").write_text("{}")
    end = f". Did you mean '{near}'?" if near else ""
    assert problems_of(read, tmp_path / name) == [f"{tmp_path / name}: cannot be read: No such file or directory{end}"]
    (tmp_path / "child.yaml").write_text(f"extends: {name}")
    (found,) = problems_of(read, tmp_path / "child.yaml")
    assert found.endswith(f"no such file: {tmp_path / name}{end or '.'}")


@pytest.mark.parametrize("loader", ["CSafeLoader", "SafeLoader"])
@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a:\n\tb: 1\n", 2, "there is a tab where YAML allows only spaces. Replace it with spaces"),
        ("a:\n  b: 1\n\tc: 2\n", 3, "there is a tab where YAML allows only spaces. Replace it with spaces"),
        ("a: *.md", 1, "text that begins with * or & must be in quotes, because YAML reads it as an alias or an anchor"),
    ],
)
def test_mistakes_that_yaml_describes_by_their_consequence(monkeypatch, loader, text, line, said):
    monkeypatch.setattr("jgt.document.reader._Loader", getattr(yaml, loader))
    assert problems_of(parse, text, "f.yaml") == [f"f.yaml:{line}: not valid YAML: {said}"]


def test_a_byte_order_mark_is_read_over(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfa: 1")
    assert read(tmp_path / "a.yaml").plain() == {"a": 1}


def test_extends_is_relative_to_the_file(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("a: 1\nb: 2")
    (tmp_path / "sub" / "child.yaml").write_text("extends: ../base.yaml\nb: 3")
    node = read(tmp_path / "sub" / "child.yaml")
    assert node.plain() == {"b": 3, "a": 1}
    assert node.find("a").where == f"{tmp_path}/sub/../base.yaml:1"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "it is a named pipe, not a file"),
        (Path.mkdir, "it is a folder, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a file"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
        (lambda path: None, "No such file or directory"),
    ],
)
def test_only_a_file_is_read(tmp_path, make, said):
    path = tmp_path / "a.yaml"
    make(path)
    assert problems_of(read, path) == [f"{path}: cannot be read: {said}"]
    assert files.path_problem(path) and (files.path_problem(path, "folder") is None) == path.is_dir()


@pytest.mark.parametrize("name", ["\0", "a" * 300, "a/" * 5_000])
def test_what_can_be_no_name_is_no_file(name):
    assert files.path_problem(name) and files.path_problem(name, "folder")
    assert "cannot be read: " in problems_of(read, name)[0]


def test_a_file_has_as_many_bytes_as_may_be(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert files.read_bytes(tmp_path / "a", 5) == b"12345"
    assert problems_of(files.read_bytes, tmp_path / "a", 4) == [
        f"{tmp_path}/a: the file is larger than 4 bytes, which is the limit for such a file"
    ]


def test_files_that_extend_each_other_are_counted(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.yaml").write_text(f"a{number}: 1\nextends: {number + 1}.yaml")
    (tmp_path / "40.yaml").write_text("b: 1")
    assert read(tmp_path / "10.yaml").plain()["b"] == 1
    assert "more than 32 files extend each other" in problems_of(read, tmp_path / "0.yaml")[0]


# -- any text, any value

scalars = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(max_size=12)
numbers_as_text = st.from_regex(r"[-+]?[0-9_.]{1,4}([eE][-+]?[0-9]{1,2})?", fullmatch=True)
words = st.sampled_from(["no", "null", "~", "true", "1e-4", ".inf", "0o7", "...", "---", "2020-01-01", "=", "<<", "? a", "- a", "#", "'"])
values = st.recursive(
    scalars | numbers_as_text | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6) | words, inner, max_size=4),
    max_leaves=15,
)


@given(values)
def test_what_is_dumped_is_read_back(value):
    assert plain(dump(value)) == value


@given(values)
def test_python_values_become_the_same_nodes_as_their_text(value):
    assert Node.of(value, "f.yaml").plain() == value


def test_a_value_that_stands_twice_is_written_twice():
    shared = [1]
    assert dump({"a": shared, "b": shared}) == "a: [1]\nb: [1]\n"


@given(st.text(max_size=60) | st.text(st.sampled_from("ab:-?[]{}&*!|>'\"%@#, \n\t"), max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        parse(text, "f.yaml")
    except InputError as error:
        assert error.problems
        assert all(p.startswith("f.yaml:") for p in error.problems)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "a.yaml"
    path.write_bytes(data)
    try:
        read(path)
    except InputError as error:
        assert error.problems


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("stpes", ["steps", "batch"], "Did you mean 'steps'?"),
        ("zzz", ["steps", "batch"], "Known: steps, batch."),
        ("zzz", [], "There is none."),
        ("zzz", [f"k{i}" for i in range(30)], "Known: " + ", ".join(f"k{i}" for i in range(24)) + ", ..."),
        # Case makes no difference.
        ("1F1B", ["gpipe", "1f1b"], "Did you mean '1f1b'?"),
    ],
)
def test_nearest(name, known, said):
    assert document.nearest(name, known) == said
