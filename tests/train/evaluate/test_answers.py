"""Stored answers: found again by their question, and never trusted when they are damaged. Needs no lm-evaluation-harness."""

import json
import os
import pickle
import stat

import pytest

from train.checkpoint.manifest import sealed
from train.evaluate.answers import StoredAnswers
from train.journal.sink import AppendedFile

STORED = [
    ("loglikelihood", ("a question", "an answer"), (-1.2345678901234567, True)),
    ("loglikelihood", ("a question", "another"), (float("-inf"), False)),
    ("loglikelihood_rolling", ("a text",), -0.1 - 0.2),
    ("generate_until", ("a text", {"until": ["\n"], "max_gen_toks": 4}), "é \u2028 \U0001f600"),
]


@pytest.fixture
def path(tmp_path):
    answers = StoredAnswers(path := tmp_path / "answers.jsonl", "model")
    for kind, question, answer in STORED:
        assert answers.find(kind, question) is None
        answers.add(kind, question, answer)
    return path


def found(path, model="model"):
    """The answers of a new start, as the evaluation has them: None where it has to compute one."""
    answers = StoredAnswers(path, model)
    return [tuple(x) if isinstance(x := answers.find(kind, question), list) else x for kind, question, _ in STORED]


RIGHT = [answer for *_, answer in STORED]


def test_answers_are_found_again(path, capsys):
    assert found(path) == RIGHT
    assert found(path, "other") == [None] * 4
    assert StoredAnswers(path).find("loglikelihood", ("a question", "unknown")) is None
    # Without a file nothing is stored, as for a run, whose model changes.
    StoredAnswers().add(*STORED[0])
    assert StoredAnswers().find(*STORED[0][:2]) is None


def test_a_line_that_a_kill_has_cut_off_is_no_damage(path, capsys):
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    assert found(path) == [*RIGHT[:3], None]
    assert capsys.readouterr().err == "" and [*path.parent.iterdir()] == [path]
    StoredAnswers(path, "model").add(*STORED[3])
    assert path.read_bytes() == content and found(path) == RIGHT


def test_no_flipped_bit_gives_another_answer(path, capsys):
    content = path.read_bytes()
    for place in range(0, 8 * len(content), 7):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        answers = found(path)
        assert all(a is None or a == b for a, b in zip(answers, RIGHT, strict=True))
        # The end of a line may become one of two lines.
        assert answers.count(None) <= 2
        for aside in path.parent.glob("*.broken*"):
            aside.unlink()


def test_a_damaged_file_is_set_aside(path, capsys):
    content = path.read_bytes()
    path.write_bytes(content.replace(b"true", b"false"))
    assert found(path) == [None, *RIGHT[1:]]
    said = capsys.readouterr().err
    assert f"{path}: 1 of 4 stored answers are damaged, or are another model's. They are computed again; see {path}.broken" in said
    assert path.with_name("answers.jsonl.broken").read_bytes() == content.replace(b"true", b"false")
    StoredAnswers(path, "model").add(*STORED[0])
    assert found(path) == RIGHT and capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["pickle", "folder", "pipe", "link", "nested", "forged"])
def test_a_hostile_file_runs_nothing_and_blocks_nothing(kind, path, tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    path.rename(other := tmp_path / "other")
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Evil()) + b"\n")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(other)
    elif kind == "nested":
        path.write_bytes(b"[" * 100_000 + b"\n")
    else:
        rows = [json.loads(line) for line in other.read_bytes().splitlines()]
        odd = [[[-1.0]], {"a": 1}, None, [1.0, True]]
        lines = [json.dumps(sealed({**row, "answer": answer})) for row, answer in zip(rows, odd, strict=True)]
        path.write_text("".join(f"{line}\n" for line in lines))
    before = other.read_bytes()
    assert found(path) == [None] * 4
    StoredAnswers(path, "model").add(*STORED[0])
    assert found(path)[0] == RIGHT[0] and stat.S_ISREG(path.lstat().st_mode)
    assert other.read_bytes() == before and not (tmp_path / "ran").exists()


def test_an_answer_that_cannot_be_stored_names_its_file(tmp_path):
    """The command ends with a line and exit code 1."""
    with pytest.raises(FileNotFoundError, match=r"none/a\.jsonl"):
        StoredAnswers(tmp_path / "none" / "a.jsonl", "model").add(*STORED[0])
    (full := tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        AppendedFile(full).write(b"line")
    assert caught.value.filename == str(full)
