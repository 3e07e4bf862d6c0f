"""The timeline of a run: each second in one slice, causes as in the report, and a file that a viewer can read, whatever the files say."""

import collections
import contextlib
import gzip
import itertools
import json
import subprocess
from collections import Counter

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.journal.accounts import read_accounts
from train.journal.status import events_file
from train.watch.__main__ import compare, plot, trace

FORMAT = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["ph", "name", "pid"],
                "properties": {"ph": {"enum": ["X", "i", "C", "M", "s", "f"]}, "name": {"type": "string"}, "pid": {"type": "integer"}},
                "allOf": [
                    {
                        "if": {"properties": {"ph": {"const": "X"}}},
                        "then": {
                            "required": ["ts", "dur", "tid"],
                            "properties": {"ts": {"type": "number"}, "dur": {"type": "number", "minimum": 0}},
                        },
                    },
                    {
                        "if": {"properties": {"ph": {"const": "i"}}},
                        "then": {"required": ["ts", "s"], "properties": {"s": {"enum": ["g", "p", "t"]}}},
                    },
                    {"if": {"properties": {"ph": {"const": "C"}}}, "then": {"required": ["ts", "args"]}},
                    {"if": {"properties": {"ph": {"enum": ["s", "f"]}}}, "then": {"required": ["ts", "id", "tid"]}},
                    {"if": {"properties": {"ph": {"const": "M"}}}, "then": {"required": ["args"]}},
                ],
            },
        }
    },
}
"""What the description of the Trace Event format asks of the kinds of events that are written here."""


def event(phase, time, seconds=0.0, **details):
    return {"phase": phase, "time": time, "seconds": seconds, **details}


def steps(time, seconds, first, last):
    return event("step", time, seconds, first=first, last=last, steps=last + 1 - first, busy=1.0)


def start(time, process, clock=0.0):
    return event("start", time, 2.0, processes=2, process=process, devices=8, host=f"host{process}", clock=clock)


def of_process(process, ahead):
    """The events of a process whose clock is ahead. The run is killed in step 30, and continues from step 20 after ten seconds."""
    rows = [
        start(100.0, process, ahead),
        event("open", 102.0, 3.0),
        event("init", 105.0, 5.0),
        event("compile", 110.0, 20.0, what="step"),
        steps(130.0, 20.0, 1, 20),
        event("save", 150.0, 1.0, step=20),
        event("write", 150.0, 4.0, step=20),
        steps(151.0, 9.5, 21, 30),
        start(170.5, process, ahead),
        event("verify", 172.5, 0.5),
        event("restore", 173.0, 1.0, step=20),
        steps(174.0, 20.0, 21, 40),
        event("spike", 180.0, step=25, loss="NaN"),
        event("stop", 194.0, step=40, why="done"),
    ]
    return [{**row, "time": row["time"] + ahead} for row in rows]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for process, ahead in ((0, 0.0), (1, 5.0)):
        events_file(folder, process).write_text("".join(json.dumps(row) + "\n" for row in of_process(process, ahead)))
    launcher = [event("run", 98.0, 63.0), event("exit", 161.0, codes=[-9, -6], first=0), event("pause", 161.0, 8.0)]
    events_file(folder, "launcher").write_text("".join(json.dumps(row) + "\n" for row in launcher))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, "loss": 3.0 - n / 100, "time": 130.5 + n}) + "\n" for n in range(1, 41))
    )
    return folder


def traced(run, tmp_path, *flags, name="out.json"):
    assert trace([str(run), "--output", str(tmp_path / name), *flags]) == 0
    data = (tmp_path / name).read_bytes()
    return json.loads(gzip.decompress(data) if name.endswith(".gz") else data, parse_constant=pytest.fail)


def phases(events, pid):
    return sorted((e for e in events if e["ph"] == "X" and e["pid"] == e["tid"] == pid), key=lambda e: e["ts"])


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_each_second_is_in_one_slice_and_causes_add_up_to_the_report(name, run, tmp_path):
    found = traced(run, tmp_path, name=name)
    jsonschema.validate(found, FORMAT)
    events = found["traceEvents"]
    for pid in (0, 1):
        slices = phases(events, pid)
        for one, other in itertools.pairwise(slices):
            assert one["ts"] + one["dur"] == pytest.approx(other["ts"], abs=1)
    seconds = Counter()
    for one in phases(events, 0):
        seconds[one["cat"]] += one["dur"] / 1e6
    causes = read_accounts(run).causes
    assert seconds == pytest.approx({cause: share.seconds for cause, share in causes.items() if share.seconds}, rel=1e-3)
    assert [one["name"] for one in phases(events, 0) if one["cat"] == "redone"] == ["lost steps 21 to 30"]


@pytest.mark.parametrize("output", ["out.json", "out.json.gz", "out.png"])
def test_a_full_disk_is_one_line_and_leaves_what_was_there(output, run, tmp_path, capsys):
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    try:
        (folder / output).write_text("before")
        with contextlib.suppress(OSError):
            (folder / "full").write_bytes(bytes(8192))
        command = plot if output.endswith("png") else trace
        assert command([str(run), "--output", str(folder / output)]) == 1
        assert capsys.readouterr().err == f"{folder / output}: No space left on device\n"
        assert (folder / output).read_text() == "before" and len([*folder.iterdir()]) == 2
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_numbers_of_any_length_have_no_place(run, tmp_path, capsys):
    # JSON has whole numbers that are no floats.
    for row in ({"step": 41, "loss": 10**400, "time": 171.5}, {"step": 42, "loss": 1.0, "time": 1e308}, {"step": 43, "loss": -(10**400)}):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    traced(run, tmp_path)
    assert compare([str(run), str(run)]) == 0 and plot([str(run), "--terminal"]) == 0
    assert plot([str(run), "--over", "hours", "--terminal"]) == 0


def test_clocks_are_aligned_and_names_say_who_is_who(run, tmp_path):
    events = traced(run, tmp_path)["traceEvents"]
    ends = [[one["ts"] + one["dur"] for one in phases(events, pid) if one["name"].startswith("compile")] for pid in (0, 1)]
    assert ends[0] == pytest.approx(ends[1], abs=20_000)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "process 0 (host0)", 1: "process 1 (host1)", 999_999: "launcher"}


def test_no_slice_is_one_that_viewers_leave_out(run, tmp_path):
    # Moments and lengths are rounded, so a phase may seem to begin before the one before it has ended.
    rows = [
        start(100.0, 0),
        event("open", 102.0, 3.000_004),
        event("init", 105.0, 5.0),
        event("write", 104.0, 9.0),
        event("export", 112.0, took=6.0),
    ]
    events_file(run, 0).write_text("".join(json.dumps(row) + "\n" for row in rows))
    profiled(run, 0, 103.0, [[0, 0.0, 10.04, "a", "forward"], [0, 10.0, 5.0, "b", "forward"]])
    lanes = collections.defaultdict(list)
    for one in traced(run, tmp_path)["traceEvents"]:
        if one["ph"] == "X":
            lanes[one["tid"]].append((one["ts"], one["ts"] + one["dur"], one["pid"]))
    for slices in lanes.values():
        assert all(0 <= begin <= end for begin, end, _ in slices)
        # A lane of one process alone, where each slice ends before the next one begins.
        assert len({pid for _, _, pid in slices}) == 1
        assert all(round(one[1], 1) <= two[0] for one, two in itertools.pairwise(slices))
    assert {0, 1, 999_999, 2_000_000, 3_000_000, 3_000_001, 4_000_000} == lanes.keys()


def test_an_arrow_leads_from_a_save_to_the_restart_that_used_it(run, tmp_path):
    events = traced(run, tmp_path)["traceEvents"]
    arrows = [(e["ph"], e["pid"], round(e["ts"] / 1e6, 3)) for e in events if e["ph"] in "sf"]
    assert arrows == [("s", 0, 56.0), ("f", 0, 75.0), ("s", 1, 56.0), ("f", 1, 75.0)]
    assert [e["name"] for e in events if e["ph"] == "i" and e["pid"] == 0] == ["spike 25", "stop 40"]
    assert [e["args"]["loss"] for e in events if e["ph"] == "C"][-1] == 2.6


def test_the_last_part_alone(run, tmp_path):
    events = traced(run, tmp_path, "--last", "20s")["traceEvents"]
    assert [one["name"] for one in phases(events, 0)] == ["restore", "steps 21 to 40"]


@pytest.mark.parametrize("text", ["0s", "x", "1", "1y", "99999999h", ""])
def test_a_wrong_time_is_said(text, run, capsys):
    with pytest.raises(SystemExit) as error:
        trace([str(run), "--last", text])
    assert error.value.code == 2 and "must be a number and s, m, h or d" in capsys.readouterr().err


def test_what_is_no_run_directory_has_no_timeline(tmp_path, capsys):
    assert trace([str(tmp_path / "none"), "--output", str(tmp_path / "out.json")]) == 2
    assert "is not a run directory" in capsys.readouterr().err and not list(tmp_path.iterdir())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
KEYS = ["phase", "time", "seconds", "step", "first", "last", "clock", "host", "took", "what"]
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "phase": st.sampled_from(["start", "init", "step", "restore", "write", "export", "stop"]),
            "time": st.floats(0, 1e3),
            "seconds": st.floats(0, 9),
        },
        optional={
            "step": st.integers(0, 9),
            "first": st.integers(0, 9),
            "last": st.integers(0, 9),
            "clock": st.floats(),
            "host": st.text(),
            "took": JSON,
        },
    )
    | st.dictionaries(st.sampled_from(KEYS), JSON),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(ROWS, ROWS, st.binary(max_size=10))
def test_whatever_the_files_say_a_viewer_can_read_the_timeline(tmp_path_factory, first, second, rest):
    folder = tmp_path_factory.mktemp("hostile")
    for process, rows in ((0, first), (1, second)):
        events_file(folder, process).write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode() + rest)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": 1, "time": 1.0, **row}) + "\n" for row in second))
    jsonschema.validate(traced(folder, folder), FORMAT)


def profiled(run, process, begin, slices):
    (run / "profile").mkdir(exist_ok=True)
    rows = {"begin": begin, "first": 12, "last": 14, "slices": slices}
    (run / "profile" / f"slices-{process}.json").write_text(json.dumps(rows))


def test_the_devices_of_a_profile_have_lanes_by_the_first_clock(run, tmp_path):
    before = traced(run, tmp_path)["traceEvents"]
    begin = min(json.loads(line)["time"] for line in (run / "events.jsonl").read_text().splitlines() if "time" in line)
    ahead = next(json.loads(line)["clock"] for line in reversed((run / "events-1.jsonl").read_text().splitlines()) if "clock" in line)
    profiled(run, 0, begin + 50, [[0, 1000.0, 500.0, "layers/attn", "forward"], [1, 1500.0, 250.0, "head", "backward"]])
    profiled(run, 1, begin + 50 + ahead, [[2, 1000.0, 500.0, "layers/attn", "forward"]])
    found = traced(run, tmp_path)
    jsonschema.validate(found, FORMAT)
    lanes = [e for e in found["traceEvents"] if e["ph"] == "X" and 2_000_000 <= e["tid"] < 3_000_000]
    assert [(e["pid"], e["tid"], e["cat"], e["dur"]) for e in lanes] == [
        (0, 2_000_000, "layers/attn", 500),
        (0, 2_000_001, "head", 250),
        (1, 2_000_002, "layers/attn", 500),
    ]
    # The launcher began two seconds earlier.
    assert [e["ts"] for e in lanes] == pytest.approx([52.001e6, 52.0015e6, 52.001e6], abs=2)
    assert len(found["traceEvents"]) == len(before) + 6
    step = traced(run, tmp_path, "--step", "13")["traceEvents"]
    assert [e for e in step if e["ph"] == "X" and 2_000_000 <= e["tid"] < 3_000_000] == lanes
    assert len(phases(step, 0)) == 1


def test_a_step_without_a_profile_is_an_error(run, tmp_path, capsys):
    assert trace([str(run), "--step", "3"]) == 2
    assert "--step: 3: the profile does not exist" in capsys.readouterr().err
    profiled(run, 0, 1e9, [[0, 1.0, 1.0, "a", "forward"]])
    assert trace([str(run), "--step", "15"]) == 2
    assert "--step: 15: the profile has steps 12 to 14" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", '{"slices": 3}', '{"begin": 1e9, "first": 1, "last": 2, "slices": [[0, NaN, 1, "a", "b"]]}', "[" * 100_000),
        f'{{"begin": 1e9, "first": 1, "last": 2, "slices": [[0, {10**400}, 1, "a", "b"]]}}',
    ],
)
def test_a_damaged_profile_is_none(run, tmp_path, text):
    before = traced(run, tmp_path)
    (run / "profile").mkdir()
    (run / "profile" / "slices-0.json").write_text(text)
    assert traced(run, tmp_path) == before
