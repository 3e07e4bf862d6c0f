"""`--profile`: what it writes, and which steps it accepts."""

import contextlib
import io
import itertools
import json

import pytest

from jgt.document import InputError
from jgt.schedule.balance import MeasuredCosts
from train.__main__ import main
from train.config import load
from train.processes.watch import Watch
from train.records.step_range import MAX_STEPS, StepRange
from train.run.train import train
from train.watch.__main__ import trace


@pytest.fixture(scope="module")
def profiled(tiny_file, tmp_path_factory):
    """The directory of a run of six steps, three of them profiled, and what the run printed."""
    folder, out = tmp_path_factory.mktemp("profiled"), io.StringIO()
    with contextlib.redirect_stdout(out):
        train(load(tiny_file, [f"run.dir={folder}", "train.steps=6"]), profiled=StepRange(first=3, last=5))
    return folder, out.getvalue()


def test_a_run_is_profiled(profiled, read_rows):
    run, out = profiled
    folder = run / "profile"
    found = json.loads((folder / "signals.json").read_text())
    assert (found["first"], found["last"], found["num_steps"]) == (3, 5, 3)
    assert (folder / found["trace"]).is_file()
    rows = {row["signal"]: row for row in found["signals"]}
    assert {"embed", "layers/attn", "layers/mlp", "head", "optimizer"} <= rows.keys()
    assert all(rows["layers/mlp"][key] > 0 for key in ("forward_ms", "backward_ms"))
    assert rows["optimizer"]["backward_ms"] == 0
    busy = sum(row[key] for row in rows.values() for key in ("forward_ms", "backward_ms", "recompute_ms", "exposed_ms"))
    assert busy + found["idle_ms"] == pytest.approx(found["step_ms"])
    assert found["idle_ms"] >= found["between_ms"] >= found["late_ms"] >= 0
    assert [device["device"] for device in found["devices"]] == [0]
    assert "Profile of steps 3 to 5: milliseconds per device and step" in out and "idle, host is late" in out
    assert out.index("step 5/6") < out.index("Profile of steps") < out.index("step 6/6")
    assert [e["step"] for e in read_rows(run / "events.jsonl") if e["phase"] == "profile"] == [5]
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_run_stopped_while_tracing_profiles_the_steps_until_then(tiny, monkeypatch):
    plain = Watch.may_begin
    monkeypatch.setattr(Watch, "may_begin", lambda self, step: step < 4 and plain(self, step))
    run = tiny("train.steps=6")
    train(run, profiled=StepRange(first=2, last=6))
    found = json.loads((run.config.run.path / "profile" / "signals.json").read_text())
    assert (found["first"], found["last"]) == (2, 3)


def test_resuming_past_the_steps_is_an_error(profiled, tiny_file):
    again = load(tiny_file, [f"run.dir={profiled[0]}", "train.steps=8"])
    with pytest.raises(
        InputError,
        match=r"--profile: 5:8: the run resumes after step 6\. Name later steps, or start the run from the beginning with --resume never",
    ):
        train(again, profiled=StepRange(first=5, last=8))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("5", "is not a range of steps. Write A:B"),
        ("-1:3", "is not a range of steps"),
        (
            "0:3",
            "there is no step 0. Steps are counted from 1. The first two after a start are slower (warm-up), so 3 is a good first step",
        ),
        ("7:5", "step 5 comes before step 7. Write 5:7"),
        ("15:21", "the run has 20 steps (train.steps). Name earlier ones, or set train.steps=21"),
        (f"1:{MAX_STEPS + 1}", f"these are {MAX_STEPS + 1} steps, but a trace has at most {MAX_STEPS}. Name fewer, such as 1:10"),
    ],
)
def test_ranges_that_are_refused(tiny_file, tmp_path, capsys, steps, message):
    more = ["train.steps=200"] if steps.startswith("1:") else []
    assert main(["--config", str(tiny_file), f"run.dir={tmp_path}/run", *more, f"--profile={steps}"]) == 2
    assert f"command line: --profile: {steps}: {message}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_profile_of_a_pipeline_has_the_costs_of_its_layers(tiny_file, tmp_path):
    more = ["train.steps=4", "model.layers=3", "mesh={data: 4, fsdp: 1, stage: 2, tensor: 1}", "rules=jgt:pipeline"]
    stages = "pipeline={signal: layers, microbatches: 4, layers: [1, 2]}"
    train(load(tiny_file, [f"run.dir={tmp_path}", *more, stages]), profiled=StepRange(first=3, last=4))
    costs = MeasuredCosts.read(tmp_path, "test")
    assert [cost.stage for cost in costs.layers] == [0, 1, 1]
    assert all(cost.forward_ms > 0 and cost.backward_ms > 0 for cost in costs.layers) and costs.ends_ms > 0
    # Both stages are busy in the plan for as long as their layers have taken.
    planned = load(tiny_file, [f"run.dir={tmp_path}", *more, stages]).pipeline.planned(str(tmp_path))
    for stage in (0, 1):
        layers = [cost for cost in costs.layers if cost.stage == stage]
        assert sum(ms for at, _, _, ms in planned if at == stage) == pytest.approx(4 * sum(c.forward_ms + c.backward_ms for c in layers))
    assert trace([str(tmp_path), "--step", "3", "--output", str(tmp_path / "step.json")]) == 0
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {e["name"] for e in events if e.get("cat") == "plan"} == {f"{kind}{m}" for kind in "FB" for m in range(4)}
    signals = {signal for device in range(8) for signal in signals_of(events, device)}
    assert {"embed", "layers/mlp", "head", "optimizer"} <= signals


def signals_of(events, device):
    """The signals of a device's slices, none of which overlap."""
    slices = sorted((e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (0, 2_000_000 + device)), key=lambda e: e["ts"])
    assert slices and all(one["ts"] + one["dur"] <= two["ts"] + 0.2 for one, two in itertools.pairwise(slices))
    return {one["cat"] for one in slices}
