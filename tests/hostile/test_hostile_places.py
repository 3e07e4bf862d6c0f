"""Paths that lead to pipes, devices, loops of links and the like: only regular files are read, and only a limited number of them."""

import json
import shutil

import pytest
from hostile import PLACES, command, diagonal, refused, watched

# How a command comes to read the file "odd".
READERS = {
    "config": ["--config", "odd"],
    "extends": ["--config", "extends.yaml"],
    "rules": ["--config", "base.yaml", "mesh={data: 1}", "rules=odd"],
    "schedule": [
        "--config",
        "base.yaml",
        "mesh={stage: 1}",
        "rules={}",
        "pipeline={signal: a, microbatches: 1, schedule: odd.csv}",
    ],
    "text": ["--config", "base.yaml", "data={source: text, path: odd}"],
    "held-out text": ["--config", "base.yaml", "data={source: text, path: a.txt, eval_path: odd}"],
    "tokens": ["--config", "base.yaml", "data={source: tokens, path: odd.npy}"],
    "jsonl": ["--config", "base.yaml", "data={source: jsonl, path: odd.jsonl.gz}"],
    "tokenizer": ["--config", "base.yaml", "data={source: text, path: a.txt, tokenizer: odd}"],
}
SUFFIXES = {"schedule": ".csv", "tokens": ".npy", "jsonl": ".jsonl.gz"}


@pytest.mark.parametrize(("place", "reader"), diagonal(PLACES, READERS, 4))
def test_only_regular_files_are_read(folder, empty, place, reader):
    for name in ("a.txt", "base.yaml"):
        shutil.copy(folder / name, empty / name)
    PLACES[place](empty / f"odd{SUFFIXES.get(reader, '')}")
    (empty / "extends.yaml").write_text("extends: odd")
    assert refused(empty, *READERS[reader], "--print-config")


SYSTEM = ["/dev/zero", "/dev/random", "/dev/stdin", "/sys", "/proc/self/mem", "/proc/kmsg", "\0", "a" * 300, "a/" * 3_000, "~root", ""]
# These exist, or are folders: whether they can be read is found out when the data is opened, after --print-config.
NOT_CHECKED = {"text": ["/sys", "/proc/self/mem", "/proc/kmsg", ""], "tokenizer": ["/proc/self/mem", "/proc/kmsg"]}


@pytest.mark.parametrize(
    ("reader", "name"),
    [(reader, name) for reader in ("config", "rules", "text", "tokenizer") for name in SYSTEM if name not in NOT_CHECKED.get(reader, [])],
)
def test_devices_and_impossible_names_are_not_read(folder, reader, name):
    quoted = json.dumps(name)
    overrides = {
        "rules": ["mesh={data: 1}", f"rules={quoted}"],
        "text": [f"data={{source: text, path: {quoted}}}"],
        "tokenizer": [f"data={{source: text, path: a.txt, tokenizer: {quoted}}}"],
    }
    refused(folder, "--config", name if reader == "config" else "base.yaml", *overrides.get(reader, []), "--print-config")


def test_each_odd_file_in_a_data_folder_is_reported(empty):
    (empty / "data").mkdir()
    for place, make in PLACES.items():
        make(empty / "data" / f"{place}.bin")
    (empty / "data" / "a\nb\udcff.bin").write_bytes(b"abcd")
    (empty / "run.yaml").write_text("data: {source: tokens, path: data}")
    for path in ("data", "data/*", "**/*.bin", "dat?/**"):
        problems = refused(empty, "--config", "run.yaml", f"data.path={path}", "--print-config")
        assert sum("cannot be read" in problem for problem in problems) == 7, problems


@pytest.mark.slow
def test_patterns_do_not_follow_links_in_circles(empty):
    for name in "abcd":
        (empty / name).symlink_to(".")
    (empty / "x.txt").write_text("text " * 100)
    (empty / "run.yaml").write_text("data: {source: text, path: '**/*.txt'}")
    with watched(empty):
        assert command("--config", "run.yaml", "--print-config")[0] == 0
        assert command("--config", "run.yaml", "data.path='**/**/nothing'", "--print-config")[0] == 2
        assert command("--config", "run.yaml", f"data.path='{'**/a/' * 20}*.txt'", "--print-config")[0] == 0
        assert command("--config", "run.yaml", f"data.path='{'*/' * 20}*.nothing'", "--print-config")[0] == 2
    refused(empty, "--config", "run.yaml", f"data.path='{'*/' * 40}*.txt'", "--print-config")


@pytest.mark.parametrize("path", [".", "*.py", "**/*.py"])
def test_a_path_with_too_many_names_to_look_at_is_refused(empty, monkeypatch, path):
    monkeypatch.setattr("train.data.files.MAX_NAMES", 40)
    for name in range(60):
        (empty / f"{name}.txt").touch()
    (empty / "run.yaml").write_text(f"data: {{source: text, path: '{path}'}}")
    problems = refused(empty, "--config", "run.yaml", "--print-config")
    assert len(problems) == 1 and "more than 40 names in all would have to be looked at" in problems[0], problems
