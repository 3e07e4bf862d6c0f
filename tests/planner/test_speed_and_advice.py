"""Tokens/s, MFU and cost, the schedule of a pipeline, and advice: each figure against the arithmetic that it stands for."""

import dataclasses

import pytest

from jgt.console import time_text, two_digits
from jgt.hardware.chip import parse_target
from jgt.hlo.collectives import Collective
from jgt.pipeline.config import PipelineConfig
from jgt.planner.memory import Memory
from jgt.planner.step.advice import Facts, advice
from jgt.planner.step.spans import Span, Track, panels
from jgt.planner.step.speed import Setting, Workload, schedule_of, speed_of

PIPELINE = PipelineConfig(signal="layers", microbatches=8)
GB = 10**9


def workload(rows=4, **values):
    return Workload(rows=rows, settings={key.replace("__", "."): Setting(value=v, where="run.yaml:3") for key, v in values.items()})


def facts(work, **changes):
    """A step of 100 ms that fits into half of 80 GB."""
    memory = Memory(
        args_bytes=10 * GB,
        temp_bytes=30 * GB,
        peak_bytes=40 * GB,
        output_bytes=0,
        host_bytes=0,
        hbm_bytes=80 * GB,
        gradient_bytes=0,
        groups={"parameters": 5 * GB, "optimizer state": 20 * GB},
        activations={"layers/mlp": 24 * GB},
    )
    values = {"work": work, "mesh": {"stage": 4}, "memory": memory, "schedule": None, "step_ms": 100.0, "parts_ms": {}}
    return Facts(**{**values, "exposed_ms": {}, "rows": (), "sent": (), **changes})


def test_speed_is_the_arithmetic_of_its_inputs():
    target = parse_target("h100:2x8")
    work = Workload(tokens=4_000_000, flops=16 * 989e12, price=2.0)
    speed = speed_of(work, target, 0.0, 4.0)
    assert speed.tokens_per_s == 1_000_000 and speed.mfu == pytest.approx(0.25)
    assert speed.dollars_per_hour == 32 and speed.dollars_per_million_tokens == pytest.approx(32 / 3600)
    # Without what the model needs, the traced program's FLOPs count; without tokens and price there is neither.
    other = speed_of(Workload(), target, 989e12, 4.0)
    assert other.mfu == pytest.approx(0.25) and other.tokens_per_s is None and other.dollars_per_million_tokens is None


def test_the_bubble_is_that_of_the_textbook():
    # 1f1b in lockstep: (stages - 1) ticks of (microbatches + stages - 1), arXiv 2104.04473.
    assert schedule_of(PIPELINE, {"stage": 4}).bubble == pytest.approx(3 / 11)
    assert schedule_of(PIPELINE, {"stage": 4}, microbatches=16).bubble == pytest.approx(3 / 19)


def test_more_microbatches_shrink_the_bubble_and_not_the_work():
    work = dataclasses.replace(workload(pipeline__microbatches=8), pipeline=PIPELINE)
    found = advice(facts(work, schedule=schedule_of(PIPELINE, {"stage": 4}), parts_ms={"bubble": 27.0}))
    (one,) = [a for a in found if a.key == "pipeline.microbatches"]
    # 3 idle ticks for 16 half microbatches take half of the time of 3 whole ones.
    assert one.saves_ms == pytest.approx(13.5)
    assert one.text.startswith("run.yaml:3: pipeline.microbatches: 16 instead of 8: the bubble falls from 27.3% to 15.8%")
    odd = dataclasses.replace(work, rows=3)
    assert not [a for a in advice(facts(odd, schedule=schedule_of(PIPELINE, {"stage": 4}), parts_ms={"bubble": 27.0})) if "micro" in a.key]


def test_narrow_gradients_save_half_of_their_waiting():
    def sent(dtype, num_bytes):
        return Collective(
            kind="all-reduce", dtype=dtype, bytes=num_bytes, count=1, axes=("data",), signal="", phase="backward", source="", group=2
        )

    work = workload(optimizer__gradients=None)
    (one,) = advice(facts(work, sent=(sent("f32", 300), sent("bf16", 100)), exposed_ms={"data": 40.0}))
    assert one.key == "optimizer.gradients" and one.saves_ms == pytest.approx(40 * 0.75 / 2)
    assert not advice(facts(workload(optimizer__gradients="bf16"), sent=(sent("f32", 300),), exposed_ms={"data": 40.0}))


def test_a_step_that_does_not_fit_gets_advice_about_memory_only():
    work = workload(rows=8, train__accumulate=1, optimizer__offload="none", train__remat="block")
    memory = dataclasses.replace(facts(work).memory, peak_bytes=90 * GB)
    offload, parts = sorted(advice(facts(work, memory=memory, parts_ms={"recompute": 50.0})), key=lambda a: a.key)
    # 76 of 80 GB are usable: 14 are missing, of which halves of the batch save 12 and quarters 18.
    assert offload.saves_bytes == 20 * GB and "the step would fit" in offload.text
    assert parts.key == "train.accumulate" and parts.saves_bytes == 18 * GB and "4 instead of 1" in parts.text


def test_panels_go_from_the_step_into_its_longest_loop():
    def span(start, end, kind="kernels", signal="a", lane="device", trips=1):
        return Span(lane=lane, start=start, end=end, kind=kind, signal=signal, phase="forward", trips=trips)

    step, body = Track(), Track()
    step.add(span(0, 1))
    step.add(span(1, 9, "loop", "layers", trips=4), "body")
    step.add(span(2, 3, "fsdp", "layers", "links"))
    # Neighbours of one signal are one block, and what is too narrow to see joins its neighbour.
    for one in (span(0, 1), span(1, 1.999), span(1.999, 2, signal="b")):
        body.add(one)
    outer, inner = panels("main", {"main": step, "body": body}, str)
    assert (outer.title, outer.trips, outer.ms, len(outer.spans)) == ("the step", 1, 9000, 3)
    assert (inner.trips, inner.ms) == (4, 2000)
    assert [(s.signal, s.start, s.end) for s in inner.spans] == [("a", 0, 2000)]


@pytest.mark.parametrize(
    ("seconds", "text"), [(13.17, "13 s"), (0.7723, "770 ms"), (0.9996, "1.0 s"), (5e-5, "50 us"), (1234, "1,200 s"), (0, "0 us")]
)
def test_times_have_two_digits(seconds, text):
    assert time_text(seconds) == text


def test_numbers_have_two_digits():
    assert [two_digits(x) for x in (5314.98, 0.0312, 1.26, 99.6, 0.0)] == ["5,300", "0.031", "1.3", "100", "0"]
