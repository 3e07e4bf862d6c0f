"""Sinks: what cannot be written is counted and told once, and a file has whole records whatever happened to a write."""

import contextlib
import errno
import io
import os
import sys
import threading
import time

import pytest

from train.files import streams
from train.files.streams import StandardStream, discard_unwritten, say
from train.journal.sink import AppendedFile, Sink, Stdout, describe_lost


@pytest.fixture
def half(monkeypatch):
    """Makes writes fail after half of their data, for as long as the list has items."""
    errors, plain = [], os.write

    def write(descriptor, data):
        if errors:
            plain(descriptor, bytes(data)[: len(data) // 2])
            raise OSError(errors.pop(0), "no")
        return plain(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    return errors


def test_a_stream_is_written_without_a_further_thread(tmp_path, monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with (tmp_path / "f").open("w") as file:
        stream = Sink("f", StandardStream(lambda: file).write)
        stream.put("one\n"), stream.put("two\n")
    assert (tmp_path / "f").read_text() == "one\ntwo\n" and stream.lost == 0


def test_a_line_for_a_person_has_escapes_for_control_characters(capsys):
    say("a\x1b]0;title\x07\nb")
    assert capsys.readouterr().err == "jgt: a\\x1b]0;title\\x07\nb\n"


def test_a_record_is_written_whole_or_not_at_all(tmp_path, half, capsys):
    lines = Sink("a file", AppendedFile(tmp_path / "f").write)
    lines.put(b"one\n")
    half += [errno.ENOSPC, errno.EIO]
    for record in (b"two\n", b"three\n", b"four\n"):
        lines.put(record)
    assert (tmp_path / "f").read_bytes() == b"one\nfour\n"
    assert lines.lost == 2
    assert capsys.readouterr().err == "jgt: a file cannot be written: no. Training continues, and tries again with each record\n"


def test_a_record_that_could_not_be_cut_off_is_cut_off_before_the_next(tmp_path, half, monkeypatch):
    lines = Sink("a file", AppendedFile(tmp_path / "f").write)
    lines.put(b"one\n")
    half.append(errno.ENOSPC)
    with monkeypatch.context() as patch:

        def refuse(descriptor, size):
            raise OSError(errno.EIO, "no")

        patch.setattr(os, "ftruncate", refuse)
        lines.put(b"twotwo\n")
    assert (tmp_path / "f").read_bytes() == b"one\ntwo"
    lines.put(b"three\n")
    assert (tmp_path / "f").read_bytes() == b"one\nthree\n"


def test_a_file_that_was_moved_away_begins_again(tmp_path, half):
    lines = AppendedFile(tmp_path / "f")
    lines.write(b"one\n")
    (tmp_path / "f").rename(tmp_path / "g")
    lines.write(b"two\n")
    assert ((tmp_path / "f").read_bytes(), (tmp_path / "g").read_bytes()) == (b"two\n", b"one\n")


def test_a_reader_that_is_away_costs_one_wait_and_comes_back(monkeypatch):
    monkeypatch.setattr(streams, "PATIENCE_SECONDS", 0.2)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    full = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            full += os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    with os.fdopen(writing, "w") as pipe:
        stream = Sink("stdout", StandardStream(lambda: pipe).write)
        for text in ("1", "2", "3"):
            stream.put(text)
        assert stream.lost == 3
        while full:
            full -= len(os.read(reading, full))
        assert os.read(reading, 10) == b"1"
        # The thread may need a moment until it is free again.
        for _ in range(1000):
            lost = stream.lost
            stream.put("4")
            if stream.lost == lost:
                break
            time.sleep(0.01)
        assert os.read(reading, 10) == b"4"
    os.close(reading)


def test_stdout_never_fails(monkeypatch, capsys):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    stdout = Stdout()
    stdout.write("a\u4e2d\n")
    assert raw.getvalue() == b"a\\u4e2d\n"
    sys.stdout.close()
    stdout.write("b")
    assert stdout.sink.lost == 1
    monkeypatch.setattr(sys, "stdout", None)
    stdout = Stdout()
    stdout.write("c")
    assert stdout.sink.lost == 0 and not stdout.isatty()
    discard_unwritten()


def test_stderr_may_be_gone(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    say("nobody hears this")
    discard_unwritten()


def test_what_was_lost_in_words():
    assert describe_lost({"stdout": 1, "metrics.jsonl": 2000}) == "lost: 1 record of stdout, 2,000 records of metrics.jsonl"


class CellStream(io.TextIOBase):
    """A stream as a notebook has it: its text goes to a cell, and its descriptor to the terminal of the server."""

    def __init__(self, descriptor):
        self.texts, self._descriptor = [], descriptor

    def write(self, text):
        self.texts.append((threading.current_thread(), text))

    def flush(self):
        pass

    def fileno(self):
        return self._descriptor


def test_text_goes_to_the_cell_of_the_thread_that_writes_it(monkeypatch, tmp_path):
    with (tmp_path / "terminal").open("wb") as terminal:
        cell = CellStream(terminal.fileno())
        monkeypatch.setattr(sys, "stdout", cell)
        monkeypatch.setattr(sys, "stderr", cell)
        Stdout().write("a step\n")
        say("a warning")
    me = threading.current_thread()
    assert cell.texts == [(me, "a step\n"), (me, "jgt: a warning\n")]
    assert (tmp_path / "terminal").read_bytes() == b""
