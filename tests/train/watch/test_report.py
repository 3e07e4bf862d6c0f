"""Where wall time went: hand-written events, and accounts of them that are exact to the second."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.journal.accounts import CAUSES, account, read_accounts
from train.journal.events import Event, read_events
from train.watch.__main__ import main


def event(phase, time, seconds=0.0, **details):
    return {"phase": phase, "time": time, "seconds": seconds, **details}


def stretch(time, seconds, first, last, **details):
    return event("step", time, seconds, first=first, last=last, steps=last - first + 1, **details)


def opening(time, processes=1, process=0, host="a"):
    """The events of a start that takes 4 s: 3 s for the process, 1 s for its checkpoints."""
    start = event("start", time, 3.0, processes=processes, process=process, devices=8, host=host, pid=1, jax="0.10.2")
    return [start, event("verify", time + 3, 1.0)]


UNBROKEN = [
    *opening(100.0),
    event("init", 104.0, 2.0),
    event("compile", 106.0, 5.0),
    stretch(111.0, 10.0, 1, 10, busy=1.0),
    event("compile", 121.0, 1.0, what="evaluation"),
    event("eval", 122.0, 3.0, step=10),
    event("save", 125.0, 0.5, step=10),
    stretch(125.5, 20.0, 11, 20, busy=1.0),
    event("save", 145.5, 1.5, step=20),
    event("stop", 150.0, step=20, why="done"),
]

KILLED_TWICE = [
    *opening(0.0),
    event("init", 4.0, 1.0),
    event("compile", 5.0, 5.0),
    stretch(10.0, 10.0, 1, 10),
    event("save", 20.0, 1.0, step=10),
    stretch(21.0, 10.0, 11, 20),  # killed at 40
    *opening(50.0),
    event("restore", 54.0, 2.0, step=10),
    event("compile", 56.0, 4.0),
    stretch(60.0, 20.0, 11, 30),
    event("fault", 80.0, kind="kill", step=30),  # killed at once
    *opening(90.0),
    event("restore", 94.0, 2.0, step=15),
    event("compile", 96.0, 4.0),
    event("nonfinite", 100.0, step=17),
    event("spike", 101.0, step=18),
    event("save_failed", 102.0, step=18, why="disk full"),
    stretch(100.0, 30.0, 16, 40),
    event("stop", 130.0, step=40, why="SIGTERM"),
]


@pytest.fixture
def write(tmp_path):
    """Writes events files, that of process 0 first. Returns the run directory."""

    def _write(*files, config=None):
        run = tmp_path / "run"
        run.mkdir()
        for process, rows in enumerate(files):
            text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
            (run / (f"events-{process}.jsonl" if process else "events.jsonl")).write_text(text)
        if config is not None:
            (run / "config.yaml").write_text(config)
        return run

    return _write


def events_of(rows):
    return [Event(phase=r.pop("phase"), time=r.pop("time"), seconds=r.pop("seconds"), details=r) for r in map(dict, rows)]


def account_of(rows, **options):
    return account("run", events_of(rows), **options)


def causes(accounts):
    """Seconds by cause, without causes of 0 seconds. They sum exactly to the wall time."""
    assert math.fsum(share.seconds for share in accounts.causes.values()) == accounts.wall_s
    assert sum(share.share for share in accounts.causes.values()) == pytest.approx(1.0)
    assert accounts.goodput == accounts.causes["steps"].share
    return {cause: share.seconds for cause, share in accounts.causes.items() if share.seconds}


def test_an_unbroken_run(write):
    found = read_accounts(write(UNBROKEN, config="train: {batch: 4}\nmodel: {seq: 32}"))
    expected = {"steps": 30.0, "startup": 3.0, "compile": 6.0, "init": 2.0, "restore": 1.0, "save": 2.0, "eval": 3.0, "other": 3.0}
    assert causes(found) == expected
    assert (found.wall_s, found.goodput) == (50.0, 0.6)
    assert (found.steps, found.steps_redone, found.restarts, found.restarts_after) == (20, 0, 0, {})
    (start,) = found.starts
    assert start.to_json() == {
        "begin": 100.0, "end": 150.0, "resumed": 0, "reached": 20, "ended": "done", "processes": 1, "devices": 8, "host": "a",
    }  # fmt: skip
    speed = found.throughput
    assert (speed.tokens_per_step, speed.steps_per_s, speed.steps_per_s_wall) == (128, 20 / 30, 20 / 50)
    assert (speed.tokens_per_s, speed.tokens_per_s_wall) == (128 * (20 / 30), 128 * (20 / 50))
    assert (speed.median_step_s, speed.slowest_step_s, speed.slowest_first, speed.slowest_last) == (1.5, 2.0, 11, 20)
    assert found.stragglers is None


def test_a_run_killed_twice(write):
    found = read_accounts(write(KILLED_TWICE))
    # Lost: 11 to 20 of the first start, and 16 to 30 of the second, three quarters of its stretch.
    assert causes(found) == {
        "steps": 10.0 + 5.0 + 30.0,
        "redone": 10.0 + 15.0,
        "down": (50.0 - 31.0) + (90.0 - 80.0),
        "startup": 9.0,
        "compile": 13.0,
        "init": 1.0,
        "restore": 3.0 + 4.0,
        "save": 1.0,
    }
    assert (found.wall_s, found.steps, found.steps_redone) == (130.0, 40, 25)
    assert [(s.resumed, s.reached, s.ended) for s in found.starts] == [(0, 20, "killed"), (10, 30, "killed"), (15, 40, "SIGTERM")]
    assert (found.restarts, found.restarts_after) == (2, {"killed": 2})
    assert (found.skipped, found.failed_saves, found.faults) == ({"nonfinite": 1, "spike": 1}, 1, {"kill": 1})
    assert found.throughput.tokens_per_s is None and found.throughput.steps_per_s == 40 / 45


def test_a_start_that_goes_on_from_the_beginning_loses_all_before():
    rows = [*opening(0.0), event("init", 4.0), stretch(4.0, 6.0, 1, 6), *opening(10.0), event("init", 14.0), stretch(14.0, 2.0, 1, 2)]
    assert causes(account_of(rows)) == {"steps": 2.0, "redone": 6.0, "startup": 6.0, "restore": 2.0}


def test_a_start_that_dies_before_it_resumes_loses_nothing():
    rows = [*opening(0.0), event("init", 4.0), stretch(4.0, 6.0, 1, 6), *opening(10.0), event("stop", 14.0, why="failed")]
    found = account_of(rows)
    assert causes(found)["steps"] == 6.0 and found.steps == 6
    assert (found.starts[1].resumed, found.starts[1].reached, found.starts[1].ended) == (None, None, "failed")


@pytest.mark.parametrize("cut", [1, 20, 50])
def test_a_last_line_that_was_cut_short(write, cut):
    text = "".join(json.dumps(row) + "\n" for row in UNBROKEN[:-2])
    found = read_accounts(write(text + json.dumps(UNBROKEN[-2])[:-cut]))
    assert found.unreadable_lines == 1
    assert (found.wall_s, found.steps, found.starts[0].ended, found.starts[0].reached) == (45.5, 20, None, 20)


NO_EVENTS = [
    "[1]",
    "3",
    "\x00\x01",
    "[" * 100_000,
    '{"phase": "eval"}',
    '{"phase": 1, "time": 1, "seconds": 1}',
    '{"phase": "eval", "time": NaN, "seconds": 1}',
    '{"phase": "eval", "time": 1, "seconds": -1}',
    '{"phase": "eval", "time": 1e300, "seconds": 1}',
]


@pytest.mark.parametrize("line", NO_EVENTS, ids=lambda line: line[:45])
def test_a_line_that_is_no_event(tmp_path, line):
    path = tmp_path / "events.jsonl"
    path.write_text(f"{line}\n\n{json.dumps(event('eval', 1.0, 2.0, step=1))}\n")
    events, unreadable = read_events(path)
    assert unreadable == 1
    assert events == [Event(phase="eval", time=1.0, seconds=2.0, details={"step": 1})]


def test_the_slowest_of_several_processes(write):
    def one(process, *busy, host):
        rows = opening(10.0 + process / 10, processes=4, process=process, host=host)
        return [*rows, *(stretch(14.0 + 10 * i, 10.0, 1 + 10 * i, 10 + 10 * i, busy=b) for i, b in enumerate(busy))]

    before = [*opening(0.0, processes=5), stretch(4.0, 2.0, 1, 2, busy=2.0), event("stop", 6.0, why="peer")]
    files = [
        [*before, *one(0, 1.0, 1.0, host="a")],
        [*before, *one(1, 1.5, 2.5, host="a")],
        [*before, *one(2, 6.0, 6.0, host="b")],
        [*before, *one(3, 4.0, host="b")],
    ]
    found = read_accounts(write(*files, before)).stragglers
    assert [(b.process, b.host, b.step_s) for b in found.processes] == [(2, "b", 0.6), (3, "b", 0.4), (1, "a", 0.2), (0, "a", 0.1)]
    assert (found.slowest, found.host, found.slowest_s, found.median_s) == (2, "b", 0.6, pytest.approx(0.3))
    assert found.spread == pytest.approx(2.0)


def test_processes_that_did_no_work_of_their_own(write):
    rows = [*opening(0.0, processes=2), stretch(4.0, 2.0, 1, 2, busy=0.0)]
    found = read_accounts(write(rows, rows)).stragglers
    assert (found.slowest, found.spread) == (0, None)


def test_a_clock_that_was_set_back():
    rows = [*opening(100.0), stretch(104.0, 6.0, 1, 6), *opening(109.0), stretch(113.0, 4.0, 7, 10)]
    found = account_of(rows)
    # The second start has 7 s for 8: from the end of the first to its own.
    assert found.wall_s == pytest.approx(17.0)
    assert causes(found)["steps"] == pytest.approx(6.0 + 4.0 * 7 / 8)


def test_events_without_time():
    found = account_of([event("stop", 5.0)])
    assert (found.wall_s, found.goodput, found.restarts) == (0.0, 0.0, 0)


MS = st.integers(0, 30_000).map(lambda ms: ms / 1000)
STEP = st.integers(0, 60)


@st.composite
def timelines(draw):
    """Anything that a run may write, in any order; the clock may be set back."""
    rows, time = [], draw(MS) + 1.7e9
    for _ in range(draw(st.integers(1, 12))):
        phase = draw(
            st.sampled_from(["start", "verify", "init", "restore", "compile", "step", "step", "step", "save", "eval", "stop", "other"])
        )
        first = draw(STEP)
        details = {"step": draw(STEP), "first": first, "last": first + draw(STEP), "busy": draw(MS), "why": "done", "processes": 2}
        kept = draw(st.sets(st.sampled_from(sorted(details))))
        rows.append(event(phase, time, draw(MS), steps=draw(STEP), **{key: details[key] for key in kept}))
        time += draw(MS) - draw(st.sampled_from([0, 0, 0, 5, 100]))
    return rows


@given(timelines(), timelines())
@settings(max_examples=60, deadline=None)
def test_causes_sum_to_wall_time_whatever_happened(rows, others):
    found = account_of(rows, others={1: events_of(others)})
    assert set(found.causes) == set(CAUSES)
    assert found.wall_s == 0 or causes(found)
    assert all(share.seconds >= 0 and 0 <= share.share <= 1 for share in found.causes.values())
    assert 0 <= found.goodput <= 1
    assert found.wall_s == pytest.approx(max(s.end for s in found.starts) - found.starts[0].begin, abs=1e-4)
    assert sum(len(s.stretches) for s in found.starts) <= len(rows)
    assert found.steps >= 0 and found.steps_redone >= 0
    json.dumps(found.to_json(), allow_nan=False)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6))
def test_each_step_counts_once(starts):
    """Each start saves after some steps and is killed after further ones: (saved, lost)."""
    rows, time, saved = [], 0.0, 0
    for more, lost in starts:
        rows += [*opening(time), event("restore", time + 4, 1.0, step=saved)]
        if more + lost:
            rows.append(stretch(time + 5, float(more + lost), saved + 1, saved + more + lost))
        time += 5 + more + lost + 2
        saved += more
    found = account_of(rows)
    expected = saved + starts[-1][1]
    assert (found.steps, found.steps_redone) == (expected, sum(lost for _, lost in starts[:-1]))
    assert causes(found).get("steps", 0.0) == pytest.approx(expected)


# -- the command -------------------------------------------------------------------------------------------------


def test_the_table(write, capsys):
    def one(busy):
        rows = [{**row, "processes": 2} if row["phase"] == "start" else row for row in KILLED_TWICE]
        return [*rows[:6], stretch(31.0, 1.0, 21, 21), *rows[7:], stretch(130.0, 1.0, 41, 41, busy=busy)]

    run = write(one(0.1), one(0.3), config="train: {batch: 4}\nmodel: {seq: 32}")
    assert main([str(run)]) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    found = read_accounts(run)
    assert lines[0] == f"{run}: goodput {found.goodput:.1%}: {found.causes['steps'].seconds:.1f} s of 0:02:11 in 41 steps that count"
    assert f"steps lost to a restart ({found.steps_redone}) 16.0 12.2% ████" in lines
    assert "all 131.0" in lines
    assert "2 1970-01-01 00:00:50 killed 30.0 s 10 30 2 8" in lines
    assert f"tokens/s {found.throughput.tokens_per_s:.0f} {found.throughput.tokens_per_s_wall:.3g}" in lines
    assert "Straggler spread 1.50: process 1 (a) works 300 ms per step, the median process 200 ms" in lines
    assert "2 restarts (killed 2), 2 skipped updates (nonfinite 1, spike 1), 1 failed save, 2 injected faults (kill 2)" in lines
    assert max(len(line) for line in shown.splitlines()) <= 160


def test_the_table_of_many_starts_and_of_little(write, capsys):
    rows = [row for i in range(30) for row in opening(10.0 * i)]
    run = write("".join(json.dumps(row) + "\n" for row in rows) + '{"phase": "st')
    assert main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert "goodput 0.0%" in shown and "Starts, the last 20 of 30" in shown
    assert "\n11  1970" in shown and "\n10  1970" not in shown
    assert "1 line of the events files could not be read" in shown
    assert "initialization" not in shown and "Straggler" not in shown and "median" not in shown


def test_json(write, capsys):
    run = write(KILLED_TWICE, [*opening(90.0, process=1), "cut"])
    assert main([str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(read_accounts(run).to_json()))
    assert found["wall_s"] == 130.0 and found["causes"]["redone"] == {"seconds": 25.0, "share": 25 / 130}
    assert found["starts"][2]["ended"] == "SIGTERM" and found["unreadable_lines"] == 1


@pytest.mark.parametrize(
    "config", [None, "train: {batch: 4", "train: {batch: 4}", "train: [4]\nmodel: 3", "train: {batch: x}\nmodel: {seq: 2}"]
)
def test_a_config_that_does_not_tell_the_tokens(write, config):
    assert read_accounts(write(UNBROKEN, config=config)).throughput.tokens_per_step is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "{run}: is not a run directory: it has no events.jsonl. Name one, such as runs/quickstart\n"),
        ("", "{run}/events.jsonl: has no events: no lines. A run writes its first event when it starts\n"),
        (
            '{"phase\n{}\n',
            "{run}/events.jsonl: has no events: 2 lines, and none can be read. A run writes its first event when it starts\n",
        ),
    ],
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_run_without_events(write, capsys, text, message, options):
    run = write() if text is None else write(text)
    assert main([str(run), *options]) == 2
    assert capsys.readouterr() == ("", message.format(run=run))


def test_no_run_there(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for name in ("absent", "file"):
        assert main([str(tmp_path / name)]) == 2
        assert capsys.readouterr().err == f"{tmp_path / name}: is not a run directory. Name one, such as runs/quickstart\n"


def test_an_events_file_that_cannot_be_opened(write, capsys, monkeypatch):
    run = write(UNBROKEN)

    def refuse(run, process):
        raise PermissionError(13, "Permission denied", str(run / "events.jsonl"))

    monkeypatch.setattr("train.journal.accounts.read_process", refuse)
    assert main([str(run)]) == 2
    assert capsys.readouterr().err == f"{run}/events.jsonl: cannot be read: Permission denied\n"


def test_control_characters_of_an_event_are_shown_as_escapes(write, capsys):
    rows = [*opening(0.0, host="\u009b2J"), event("stop", 9.0, why="\x1b]0;x\x07" + "y" * 1000), *opening(20.0)]
    run = write(rows, [*opening(90.0, process=1)])
    for options in ([], ["--json"]):
        assert main([str(run), *options]) == 0
        shown = capsys.readouterr().out
        assert all(c.isprintable() or c == "\n" for c in shown)
        assert "\\x1b]0;x\\x07yyy" in shown.replace("\\\\", "\\").replace("\n", "") or options == []
        assert "y" * 301 not in shown


def test_incidents_of_every_process_count_and_none_of_them_twice(write):
    begin = [event("start", 100.0, 1.0, processes=3), event("init", 101.0, 1.0)]
    skipped = [event("nonfinite", 110.0, step=3), event("nonfinite", 111.0, step=3), event("spike", 112.0, step=7)]
    end = [stretch(110.0, 20.0, 1, 20), event("stop", 130.0, step=20, why="done")]
    killed = [event("fault", 113.0, step=8, kind="kill")]
    failed = [event("save_failed", 114.0, step=step) for step in (5, 10)]
    run = write([*begin, *skipped, failed[0], *end], [*begin, *skipped, *killed, *end], [*begin, *skipped[1:], *failed, *killed, *end])
    found = read_accounts(run)
    assert (found.skipped, found.failed_saves, found.faults) == ({"nonfinite": 2, "spike": 1}, 2, {"kill": 2})
