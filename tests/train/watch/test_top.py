"""`jgt top`: frames of runs whose files were written by hand, compared with golden ones, and hostile files."""

import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jgt
from train.journal.members import read_member, with_stragglers
from train.journal.status import LAUNCHER, events_file, status_file, take_requests
from train.watch.top.__main__ import main
from train.watch.top.frame import draw_frame, plain
from train.watch.top.view import Watched

GOLDENS = Path(__file__).parent.parent.parent / "goldens" / "top"
NOW = 1_800_000_000.0
SIZES = [(80, 24), (200, 60), (40, 10)]


def status(process, *, age=0.5, phase="step", seconds=30.0, idle=0.4, host=None, windows=((1.9, 0.02, 0.01),) * 2, **values):
    """The status of a process, as its run writes it."""
    recent = [{"seconds": 2 * step, "steps": 2, "busy": 2 * busy, "data": 2 * data} for step, busy, data in windows]
    row = {"phase": phase, "time": NOW - age - seconds, "seconds": seconds}
    known = {
        "process": process,
        "host": host or f"gpu-{process:02}",
        "pid": 1000 + process,
        "time": NOW - age,
        "total": 100_000,
        "finished": 41_249,
    }
    now = {"doing": "step 41250", "idle_s": idle, "limit_s": 19.2, "begun": 41_250, "memory": [[71e9, 80e9]] * 8, "recent": recent}
    return {**known, **now, "row": row, **values}


def write(run, statuses, rows=(), events=(), signals=None):
    run.mkdir(parents=True, exist_ok=True)
    for one in statuses:
        status_file(run, one["process"]).write_text(json.dumps(one))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events_file(run, 0).write_text("".join(json.dumps(row) + "\n" for row in events))
    if signals is not None:
        (run / "profile").mkdir(exist_ok=True)
        (run / "profile" / "signals.json").write_text(json.dumps(signals))
        os.utime(run / "profile" / "signals.json", (NOW - 1300, NOW - 1300))
    return run


def metrics(step):
    speed = {"step_time_s": 1.9 + (step % 5) / 50, "tokens_per_s": 273_000.0, "mfu": 0.41, "grad_norm": 0.4 + (step % 3) / 100}
    return {"step": step, "loss": 3 - step / 50_000, "lr": 2.4e-4, "time": NOW - (41_250 - step) * 2, "memory_bytes": 71e9, **speed}


def event(phase, at, seconds=0.0, **details):
    return {"phase": phase, "time": NOW + at, "seconds": seconds, **details}


EVENTS = [
    event("start", -90_000, 20.0, processes=64, process=0, devices=512, host="gpu-00"),
    event("init", -89_980, 30.0),
    event("step", -89_950, 40_000.0, first=1, last=20_000, steps=20_000, busy=1.0),
    event("start", -49_900, 20.0, processes=64, process=0, devices=512, host="gpu-00"),
    event("restore", -49_880, 60.0, step=20_000),
    event("step", -49_820, 49_000.0, first=20_001, last=41_000, steps=21_000, busy=1.0),
    event("spike", -3_000, step=40_210),
    event("save", -600, 2.1, step=41_000),
    event("write", -600, 40.0, step=41_000),
    event("eval", -500, 8.0, step=41_000),
]
SIGNALS = {
    "last": 41_000,
    "step_ms": 1900.0,
    "idle_ms": 57.0,
    "signals": [{"signal": "layers/mlp", "share": 0.42}, {"signal": "layers/attn", "share": 0.34}, {"signal": "embedding", "share": 0.04}],
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of 64 processes: one is slow because of its data, one is silent."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    statuses = [status(process) for process in range(64)]
    statuses[2] = status(2, windows=((1.9, 0.76, 0.72),) * 2, power_w=402.0)
    statuses[3] = status(3, age=12.0)
    statuses[0] |= {"saving": {"step": 41_000, "since": NOW - 21}, "power_w": 690.4}
    statuses[9] |= {"clock": 5.0, "time": NOW - 0.5 + 5.0, "slowed": "hw thermal"}
    rows = [*(metrics(step) for step in range(40_000, 41_250, 10)), {"step": 41_000, "eval_loss": 2.2}]
    yield write(tmp_path / "llama-8b", statuses, rows, EVENTS, SIGNALS)
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_frame_is_the_golden_one(width, height, run):
    found = plain(draw_frame(Watched(run).read(NOW, lanes=16), width, height)) + "\n"
    path = GOLDENS / f"{width}x{height}.txt"
    if os.environ.get("JGT_WRITE_GOLDENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(found)
    assert found == path.read_text()
    lines = found.splitlines()
    assert len(lines) <= height and max(map(len, lines)) <= width


def test_the_worst_come_first_with_their_cause(run):
    members = Watched(run).read(NOW).members
    assert [(m.process, m.state, list(m.notes)) for m in members[:4]] == [
        (3, "silent", ["no word for 12 s"]),
        (2, "runs", ["straggler 1.6x: data"]),
        (9, "runs", ["slowed: hw thermal"]),
        (0, "runs", []),
    ]


def judged(*windows):
    members = with_stragglers([read_member(status(n, windows=each), n, NOW) for n, each in enumerate(windows)])
    return [(m.process, round(m.slower, 2), m.cause) for m in members if m.slower is not None]


FAST, SLOW = (1.0, 0.1, 0.05), (1.0, 0.5, 0.45)


@pytest.mark.parametrize(
    ("windows", "named"),
    [
        ([(FAST, FAST)] * 4, []),
        ([(FAST, FAST), (SLOW, SLOW), (FAST, FAST), (FAST, FAST)], [(1, 1.67, "data")]),
        ([(FAST, FAST), ((1.0, 0.5, 0.05),) * 2], [(1, 1.67, "host")]),
        # One pause may be chance, and all hosts may be equally busy.
        ([(FAST, FAST), (FAST, SLOW), (FAST, FAST)], []),
        ([(SLOW, SLOW)] * 3, []),
        ([(SLOW, SLOW)], []),
        # A sixth of the step is what a step 1.2 times as long has more.
        ([(FAST, FAST), ((1.0, 0.26, 0.21),) * 2], []),
        ([(FAST, FAST), ((1.0, 0.28, 0.23),) * 2], [(1, 1.22, "data")]),
    ],
    ids=["equal", "data", "host", "one pause", "all slow", "alone", "below 1.2", "above 1.2"],
)
def test_who_holds_the_others_up_is_named(windows, named):
    assert judged(*windows) == named


def test_a_process_of_this_host_is_killed_suspended_or_silent():
    here = socket.gethostname()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for number, state in ((0, "silent"), (19, "suspended")):
            os.kill(child.pid, number)
            deadline = time.monotonic() + 10
            while (found := read_member(status(0, age=3, host=here, pid=child.pid), 0, NOW).state) != state:
                assert time.monotonic() < deadline, found
    finally:
        child.kill()
        child.communicate()
    assert read_member(status(0, age=3, host=here, pid=child.pid), 0, NOW).state == "killed"
    assert read_member(status(0, age=1, host=here, pid=child.pid), 0, NOW).state == "runs"
    assert read_member(status(0, age=300, end="done"), 0, NOW).state == "ended"


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"phase": "compile", "seconds": 75.0, "idle": 75.0}, "now   compile, 75.5s of at most 19.2s"),
        ({"phase": "save", "seconds": 1.0}, "now   save, 1.5s of at most 19.2s"),
        ({"idle": 15.0}, "now   step 41,250, 15.5s of at most 19.2s"),
        ({"idle": 15.0, "limit_s": None}, "now   step 41,250, 15.5s"),
        ({"age": 700.0}, "now   nothing runs; the last word is 11m old"),
    ],
)
def test_what_the_run_does_now(values, shown, tmp_path):
    frame = plain(draw_frame(Watched(write(tmp_path / "run", [status(0, **values)])).read(NOW), 80, 24))
    assert shown in frame.splitlines()
    assert ("no progress, 16 of 19 s" in frame) == (values == {"idle": 15.0})


def test_a_launcher_that_pauses_says_when_it_restarts(tmp_path):
    pause = {"process": LAUNCHER, "time": NOW, "limit_s": 8.0, "row": {"phase": "pause", "time": NOW - 2, "seconds": 2.0}}
    run = write(tmp_path / "run", [status(0, age=30), pause])
    assert "now   the launcher starts the processes again in 6.0s" in plain(draw_frame(Watched(run).read(NOW), 80, 24))


def test_one_frame_for_a_pipe_and_numbers_as_json(run, capsys, monkeypatch):
    monkeypatch.setattr("train.watch.top.view.time.time", lambda: NOW)
    assert main([str(run)]) == 0
    assert capsys.readouterr().out == (GOLDENS / "80x24.txt").read_text()
    assert main([str(run), str(run), "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == second and first["step"] == 41_249 and first["total"] == 100_000
    assert first["processes"][1]["cause"] == "data" and first["goodput"] == pytest.approx(0.9943, abs=1e-4)


@pytest.mark.parametrize("name", ["", "empty", "file"])
def test_what_is_no_run_directory_is_said(name, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / name / "run"), str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.count("is not a run directory") == 2


def test_a_terminal_gets_colours_unless_it_wants_none(run, monkeypatch):
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    frames = []
    for colour in (True, False):
        monkeypatch.delenv("NO_COLOR", raising=False) if colour else monkeypatch.setenv("NO_COLOR", "1")
        file = Terminal()
        console = jgt.Console(file=file, width=80)
        console.print(jgt.Console.styled(draw_frame(Watched(run).read(NOW), 80, 24)), soft_wrap=True)
        frames.append(file.getvalue())
    assert re.search(r"\x1b\[[0-9;]*3[0-9]m", frames[0]) and not re.search(r"\x1b\[[0-9;]*3[0-9]m", frames[1])
    bare = [re.sub(r"\x1b\[[0-9;]*m", "", frame) for frame in frames]
    assert bare[0] == bare[1]
    assert [line.rstrip() for line in bare[0].splitlines()] == (GOLDENS / "80x24.txt").read_text().splitlines()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=8)
    | st.just("\x1b]0;x\x07\x9b31m\u202e"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(status(0))) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=12,
)
VALUES = st.dictionaries(st.sampled_from([*status(0), "end", "saving", "clock", "slowed", "power_w"]), JSON, max_size=8)
EVENT = st.dictionaries(st.sampled_from(["phase", "time", "seconds", "step", "why", "kind", "first", "last", "loss"]), JSON)


@settings(max_examples=150, deadline=None)
@given(st.lists(VALUES, max_size=3), st.lists(EVENT, max_size=4), JSON, st.binary(max_size=20), st.sampled_from(SIZES))
def test_no_file_can_move_the_cursor_or_break_a_frame(tmp_path_factory, statuses, events, signals, rest, size):
    run = tmp_path_factory.mktemp("hostile") / "run\x1b[2J"
    write(run, [{**status(n), **values, "process": n} for n, values in enumerate(statuses)], [*events, metrics(5)], events, signals)
    for path in (run / "metrics.jsonl", events_file(run, 0), status_file(run, 7)):
        with path.open("ab") as file:
            file.write(rest)
    present = Watched(run).read(NOW, lanes=16)
    lines = plain(draw_frame(present, *size)).split("\n")
    assert len(lines) <= size[1] and max(map(len, lines)) <= size[0]
    assert all(line.isprintable() or not line for line in lines)
    json.dumps(present.to_json())


def test_requests_are_taken_once(tmp_path):
    from train.journal.status import ask

    ask(tmp_path, "profile")
    assert take_requests(tmp_path) == {"profile"} and take_requests(tmp_path) == set()
    (tmp_path / "request.json").write_text('{"save": "yes", "profile": 1, "x": true}')
    assert take_requests(tmp_path) == set() and not list(tmp_path.iterdir())


def test_the_page_shows_the_frame_of_the_test(pytestconfig):
    assert (GOLDENS / "80x24.txt").read_text() in (pytestconfig.rootpath / "docs" / "watch.md").read_text()
