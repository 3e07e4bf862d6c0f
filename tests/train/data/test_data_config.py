"""The data keys: mistakes that `bind` finds, mistakes that only the file system shows, and no import of JAX for either."""

import subprocess
import sys

import pytest

from jgt.document import bind, parse
from train.data.config import DataConfig, MixturePart
from train.data.files import Finder, standard_library
from train.data.paths import path_problems


def bound(text):
    problems = []
    return bind(parse(text, "run.yaml"), DataConfig, problems), problems


def test_the_default_is_the_standard_library():
    config, problems = bound("shuffle: true")
    assert problems == []
    assert config == DataConfig()
    assert config.parts() == (MixturePart(weight=1.0),)
    assert list(path_problems(config)) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("source: text", "run.yaml:1: path: the source text needs a path"),
        ("source: stdlib\npath: x", "run.yaml:2: path: the source stdlib reads no path"),
        ("eval_path: x", "run.yaml:1: eval_path: the source stdlib reads no eval_path"),
        ("source: text\npath: x\nfield: body", "run.yaml:3: field: only the sources jsonl, parquet, arrow have fields"),
        ("source: jsonl\npath: x\ndtype: uint32", "run.yaml:3: dtype: only the source tokens has a dtype"),
        ("eval_tokens: -1", "run.yaml:1: eval_tokens: -1 is too small"),
        ("source: mixture", "run.yaml:1: mixture: the source mixture needs at least one part"),
        ("mixture:\n- {weight: 1}", "run.yaml:1: mixture: has 1 parts, but source is stdlib"),
        ("source: mixture\npath: x\nmixture:\n- {weight: 1}", "run.yaml:2: path: a mixture takes this key in each of its parts"),
        ("source: mixture\nmixture:\n- {weight: 0}", "run.yaml:3: mixture[0].weight: 0.0 is too small"),
        ("source: mixture\nmixture:\n- {source: stdlib}", "run.yaml:3: mixture[0]: the key 'weight' is missing"),
        ("source: mixture\nmixture:\n- {weight: 1, source: mixture}", "mixture[0].source: 'mixture' is not one of"),
        ("source: mixture\nmixture:\n- {weight: 1, source: tokens}", "mixture[0].path: the source tokens needs a path"),
        ("source: mixture\nmixture: [{weight: 1}, {weight: 1, tokenizer: t.json}]", "the parts use different tokenizers: bytes, t.json"),
        (
            "source: parqet\npath: x",
            "tokens, jsonl, parquet, arrow, chat, preferences, mixture. Did you mean 'parquet'?",
        ),
        ("source: mixture\nmixture: [{weight: 1, name: a/b}]", "mixture[0].name: 'a/b' cannot be part of a metric's name"),
        ("source: mixture\nmixture: [{weight: 1, name: a}, {weight: 1, name: a}]", "mixture: several parts have the name a"),
        ("source: mixture\nmixture: [{weight: 1, name: stdlib-1}, {weight: 1}, {weight: 1}]", "several parts have the name stdlib-1"),
        ("source: mixture\nmixture: [{weight: 1}, {weight: 1e-9}]", "differ by more than a factor of 1e+06"),
    ],
)
def test_wrong_keys_are_named_with_their_line(text, expected):
    problems = bound(text)[1]
    assert len(problems) == 1
    assert expected in problems[0]


def test_path_problems(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")

    def found(**keys):
        return list(path_problems(DataConfig(**keys)))

    def only(key, message, **keys):
        ((found_key, found_message),) = found(**keys)
        assert found_key == key
        assert message in found_message

    only("path", "no such file or folder", source="text", path=str(tmp_path / "absent"))
    only("path", "has no files", source="text", path=str(tmp_path / "empty"))
    only("path", "no file matches", source="text", path=str(tmp_path / "*.json"))
    only("path", "is not a token file", source="tokens", path=str(tmp_path / "notes.txt"))
    only("tokenizer", "no such file", source="text", path=str(tmp_path / "notes.txt"), tokenizer="absent.json")
    only("eval_path", "no such file", source="text", path=str(tmp_path / "notes.txt"), eval_path="absent")
    only("eval_path", "is training data too", source="text", path=str(tmp_path), eval_path=str(tmp_path / "*.txt"))
    part = MixturePart(weight=1.0, source="text", path="absent")
    only("mixture[1].path", "no such file", source="mixture", mixture=(MixturePart(weight=1.0), part))
    assert found(source="text", path=str(tmp_path)) == []


def test_a_format_needs_its_package_and_its_suffix(tmp_path, monkeypatch):
    for name in ("a.parquet", "b.json", "c.arrow", "d.jsonl.zst", "e.bin", "e.idx"):
        (tmp_path / name).write_text("x")

    def found(source, name):
        return [f"{key}: {message}" for key, message in path_problems(DataConfig(source=source, path=str(tmp_path / name)))]

    monkeypatch.setattr("train.data.paths.is_installed", lambda package: True)
    assert found("parquet", "*.parquet") == found("arrow", "c.arrow") == found("jsonl", "*.zst") == found("tokens", "e.*") == []
    (problem,) = found("parquet", "[ab].*")
    assert "b.json is not a file of the source parquet: its name must end in .parquet or .pq" in problem
    assert found("tokens", "e.idx") == [f"path: {tmp_path}/e.idx is only an index. Name the .bin file beside it"]
    monkeypatch.setattr("train.data.paths.is_installed", lambda package: False)
    assert found("parquet", "*.parquet") == ["source: parquet needs the package pyarrow. Install it: pip install 'jgt[data]'"]
    assert found("arrow", "c.arrow") == ["source: arrow needs the package pyarrow. Install it: pip install 'jgt[data]'"]
    packed = f"path: {tmp_path}/d.jsonl.zst needs the package zstandard. Install it (pip install 'jgt[data]'), or unpack the file"
    assert found("jsonl", "*.zst") == found("text", "*.zst") == [packed]


def test_parts_have_names_for_their_metrics():
    def names(*parts):
        return DataConfig(source="mixture", mixture=tuple(MixturePart(weight=1.0, **part) for part in parts)).part_names()

    text = {"source": "text"}
    assert names({}, {"path": "my notes/*.md", **text}, {"path": "b/c.tar.gz", **text}) == ("stdlib", "my-notes", "c")
    assert names({"path": "a/x.txt", **text}, {"path": "b/x.txt", **text}, {"path": "**/*", **text}) == ("x-0", "x-1", "text")
    assert names({"path": "a/x.txt", **text}, {"path": "b/x.txt", "name": "x", **text}) == ("x-0", "x")
    assert DataConfig().part_names() == ("stdlib",)


def test_a_path_is_a_file_a_folder_or_a_glob(tmp_path):
    for name in ("b.txt", "a/c.txt", "a/x[1].txt", ".hidden", ".git/object"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def names(path):
        found = Finder().files(str(tmp_path / path))
        return [file.relative_to(tmp_path).as_posix() for file in found.paths]

    assert names("b.txt") == ["b.txt"]
    assert names("a/x[1].txt") == ["a/x[1].txt"]
    assert names(".") == ["a/c.txt", "a/x[1].txt", "b.txt"]
    assert names("**/*.txt") == ["a/c.txt", "a/x[1].txt", "b.txt"]
    assert names("*.txt") == ["b.txt"]
    assert names("*.json") == []


def test_the_digest_follows_names_and_sizes_but_not_the_place(tmp_path):
    for place in ("one", "two"):
        (tmp_path / place / "sub").mkdir(parents=True)
        (tmp_path / place / "sub/a.txt").write_text("text")
    first, second = (Finder().files(str(tmp_path / place)) for place in ("one", "two"))
    assert first.digest() == second.digest()
    (tmp_path / "two/sub/a.txt").write_text("longer text")
    assert first.digest() != second.digest()


def test_the_standard_library_has_no_tests_and_no_installed_packages():
    library = standard_library()
    relative = {path.relative_to(library.root).as_posix() for path in library.paths}
    assert {"os.py", "json/decoder.py"} <= relative
    excluded = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert not any(excluded & set(name.split("/")) for name in relative)


def test_checking_a_config_loads_neither_jax_nor_numpy():
    code = (
        "import sys; from train.data.paths import DataConfig, path_problems; list(path_problems(DataConfig())); "
        "assert not {'jax', 'numpy', 'grain'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
