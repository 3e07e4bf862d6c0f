"""The output in the terminal."""

import contextlib
import os
import pty
import re
import sys
import threading

import pytest

from train.records.console import Screen, folded_rows
from train.records.summary import describe_data
from train.run.train import train


def test_a_step_is_a_line_of_80_columns_in_a_file(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    screen = Screen(enabled=True)
    metrics = {
        "loss": 2.0,
        "grad_norm": 1.5,
        "lr": 3e-4,
        "tokens": 12_345,
        "step_time_s": 0.25,
        "tokens_per_s": 12345.6,
        "mfu": None,
        "eta_s": 9.0,
    }
    screen.step(3, 100, metrics)
    monkeypatch.setenv("COLUMNS", "40")
    screen.step(100, 100, metrics)
    screen.step(100, 100, {"eval_loss": 2.0})
    assert capsys.readouterr().out.splitlines() == [
        "step   3/100  loss 2.0000  grad_norm 1.5000  12.3k tok  12.3k/s  eta     9s",
        "step 100/100  loss 2.0000  12.3k tok",
        "step 100/100  eval_loss 2.0000",
    ]


def test_markup_in_names_and_long_lines_are_printed_as_they_are(capsys):
    screen = Screen(enabled=True)
    screen.say("[red]" + "x" * 500)
    screen.table("T", ["name", "count"], [["[bold]a", "1"], ["b", "22"]], numbers=1)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "[red]" + "x" * 500,
        "T",
        "name     count",
        "[bold]a      1",
        "b           22",
    ]


def test_other_processes_say_nothing(capsys):
    screen = Screen(enabled=False)
    screen.say("x")
    screen.step(1, 3, {"loss": 1.0})
    assert capsys.readouterr().out == ""


def captured(columns, call, monkeypatch):
    """What `call` prints on a terminal with so many columns, without colours, as lines."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    ours, theirs = pty.openpty()
    pieces = []

    def read():
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 65536):
                pieces.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    with monkeypatch.context() as patch, os.fdopen(theirs, "w") as terminal:
        patch.setattr(sys, "stdout", terminal)
        call()
    reader.join(10)
    os.close(ours)
    text = b"".join(pieces).decode()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "").splitlines(), text


def assert_readable(lines, columns):
    assert [line for line in lines if len(line) > columns] == []
    # Nothing that is only for machines.
    assert not re.search(r"[0-9a-f]{16}|crc32|sha256", "\n".join(lines))
    steps = [line for line in lines if line.startswith("step")]
    assert [line.split()[1] for line in steps] == ["1/3", "2/3", "3/3", "3/3"]
    assert all(" tok" in line and "loss" in line for line in steps[:3])
    assert lines[0].startswith("jgt ") and "jax" in lines[0]
    for part in ("Data: text, 1 file, ", "37,024 parameters. A step is 512 tokens", "Trained for ", "Best evaluation: ", "goodput"):
        assert any(part in line for line in lines), part


@pytest.mark.parametrize(("columns", "no_color"), [(80, False), (120, True)])
def test_a_run_on_a_terminal_breaks_no_line(columns, no_color, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    run = tiny("train.steps=3", "data.eval_tokens=1000", "run.dir=runs/tiny")
    lines, text = captured(columns, lambda: train(run), monkeypatch)
    assert_readable(lines, columns)
    if no_color:
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]", text)


def test_a_run_in_a_file_has_the_same_lines(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    train(tiny("train.steps=3", "data.eval_tokens=1000", "run.dir=runs/tiny"))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    lines = [line.rstrip() for line in out.splitlines()]
    assert_readable(lines, 160)
    assert all(len(line) <= 80 for line in lines if line.startswith("step"))


def test_a_long_line_continues_below_between_two_words(monkeypatch):
    path = "/a/" + "long-name/" * 12
    lines, _ = captured(60, lambda: Screen(enabled=True).say(f"  {'word ' * 20}{path}"), monkeypatch)
    assert lines[0] == "  " + " ".join(["word"] * 11)
    assert lines[1].startswith("    word word")
    assert "".join(lines).endswith(path)


@pytest.mark.parametrize(
    ("fingerprint", "line"),
    [
        (
            {
                "source": "stdlib",
                "files": 734,
                "bytes": 12_118_641,
                "files_sha256": "ab" * 32,
                "train_tokens": 11_618_641,
                "eval_tokens": 0,
            },
            "Data: stdlib, 734 files, 12.1 MB: 11,618,641 tokens to train on",
        ),
        (
            {
                "source": "mixture",
                "mixture[0].source": "text",
                "mixture[0].files": 2,
                "mixture[0].bytes": 1000,
                "mixture[1].source": "jsonl",
                "mixture[1].files": 1,
                "mixture[1].bytes": 500,
                "mixture[1].eval_files": 1,
                "mixture[1].eval_bytes": 500,
                "train_tokens": 1500,
                "eval_tokens": 50,
            },
            "Data: mixture of text, jsonl, 4 files, 2.0 KB: 1,500 tokens to train on, 50 to evaluate on",
        ),
        ({"source": "my_data:open", "checksum": "ab" * 32}, "Data: my_data:open"),
    ],
)
def test_the_data_in_a_line(fingerprint, line):
    assert describe_data(fingerprint) == line


def test_equal_layers_of_a_loop_are_one_row():
    """A row for each layer whose shape or spec differs; the bytes are those of all, and names of other numbers stay."""
    rows = [
        (f"blocks/{n}/{name}", f"block_{n}", "8x8", spec, 4)
        for n in range(48)
        for name, spec in (("up", "[null, x]"), ("down", "[x, null]"))
    ]
    rows[7 * 2] = ("blocks/7/up", "block_7", "8x9", "[null, x]", 5)
    rows += [("head/w2", "head", "8", "[]", 1), ("layer_3/w", "", "8", "[]", 1)]
    assert folded_rows(rows) == [
        ("blocks/*/up (47)", "block_*", "8x8", "[null, x]", 47 * 4),
        ("blocks/*/down (48)", "block_*", "8x8", "[x, null]", 48 * 4),
        ("blocks/7/up", "block_7", "8x9", "[null, x]", 5),
        ("head/w2", "head", "8", "[]", 1),
        ("layer_3/w", "", "8", "[]", 1),
    ]
