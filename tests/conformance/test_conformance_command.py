"""`jgt conformance`: what it prints and how it ends."""

import json
import time

import pytest
from drawn import drawn

from jgt.__main__ import main
from jgt.conformance import __main__ as command
from jgt.conformance.campaign import Counts
from jgt.conformance.classes import Classes, WrongClass
from jgt.conformance.listing import listing


class Searched:
    """A finished search with two classes. One was not found again with XLA's own flags."""

    def __init__(self, seed):
        program = drawn("jnp.cumsum(x0, 0)", specs={"x0": (("a",), ())}, salt=seed)
        self.classes, self.crashes, self.drawn = Classes(), {"Check failed": 2}, [[{"number": n}] for n in range(4)]
        for what, is_confirmed in (("value", True), ("gradient", False)):
            example = listing(program, 0)
            made = WrongClass(
                program=program, what=what, special=False, one_device=False, example=example, is_confirmed=is_confirmed, error=1.5
            )
            self.classes.add(made)
        self.counts = {"chain": Counts(programs=12, right=9, wrong=3), "single": Counts(programs=64, right=60, refused=2, crashed=2)}

    def run(self, is_over):
        assert not is_over()


@pytest.fixture
def searched(monkeypatch):
    ran = []

    def through(drawn, is_over):
        ran.extend(drawn)
        return Counts(programs=5, right=4, wrong=1, changed=7), ["wrong", "right"]

    monkeypatch.setattr(command, "Search", Searched)
    monkeypatch.setattr(command, "run_through_jgt", through)
    return ran


def test_the_json_has_each_class_with_its_program(searched, capsys):
    assert main(["conformance", "--minutes", "1", "--seed", "4", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert {"jax", "jaxlib"} < read.keys()
    assert (read["programs"], read["right"], read["wrong"], read["refused"]) == (76, 69, 3, 2)
    (known,) = read["classes"]
    assert (known["name"], known["count"], known["error"], known["through_jgt"]) == ("cumsum: value, 1 mesh axis", 1, 1.5, "wrong")
    assert known["example"].count("\n") <= 15 and "jnp.cumsum" in known["example"]
    assert read["through_jgt"] == {"programs": 5, "right": 4, "wrong": 1, "refused": 0, "crashed": 0, "changed": 7}
    assert read["crashes"] == {"Check failed": 2}
    # The examples of the classes come first, then the programs in their order.
    assert searched[0][0]["salt"] == 4 and [each[0]["number"] for each in searched[1:]] == [0, 1, 2, 3]


def test_a_person_reads_each_class_with_its_program(searched, capsys):
    assert main(["conformance", "--minutes=2"]) == 0
    text = capsys.readouterr().out
    assert "76 programs, each in a layout, 3 wrong, 2 refused, 2 of which XLA's compiler died" in text
    assert "cumsum: value, 1 mesh axis: 1 programs, off by up to 1.5 of the largest number. Through jgt.shard: wrong" in text
    assert "    def f(W, x0):\n" in text and "cumsum: gradient" not in text
    assert text.rstrip().splitlines()[-1].startswith("Through jgt.shard: 5 of these programs, 1 wrong, 0 refused")


def test_a_terminal_shows_how_far_the_search_is(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert not command._until(time.monotonic() + 60, lambda: "12 programs")()
    assert command._until(time.monotonic() - 1, lambda: "12 programs")()
    assert capsys.readouterr().err == "\r\x1b[K12 programs\r\x1b[K"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--minutes", "soon"], "--minutes: must be a number of minutes, 0.1 or more, not 'soon'"),
        (["--minutes", "0"], "--minutes: must be a number of minutes, 0.1 or more, not '0'"),
        (["--minutes=inf"], "--minutes: must be a number of minutes, 0.1 or more, not 'inf'"),
        (["--minutes=nan"], "--minutes: must be a number of minutes, 0.1 or more, not 'nan'"),
        (["--seed", "x"], "--seed: must be a whole number, not 'x'"),
    ],
)
def test_wrong_flags_are_one_line(arguments, said, searched, capsys):
    try:
        code = main(["conformance", *arguments])
    except SystemExit as left:
        code = left.code
    out, error = capsys.readouterr()
    assert code == 2 and not out and said in error and error.count("\n") == 1
    assert not searched


@pytest.mark.slow
def test_a_short_search_draws_programs_and_runs_them_through_jgt(capsys):
    assert main(["conformance", "--minutes", "0.5", "--seed", "1", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["programs"] >= 3
    assert read["programs"] >= read["right"] + read["wrong"] + read["refused"] > 0
