"""Tokens/s, MFU and cost, the schedule of a pipeline, and the step over time: each figure against the arithmetic that it stands for."""

import pytest

from jgt.command.console import amount, two_digits
from jgt.pipeline.config import PipelineConfig
from jgt.planner.hardware.target import Target
from jgt.planner.panels import Span, Track, panels
from jgt.planner.speed import Workload, speed_of


def test_speed_is_the_arithmetic_of_its_inputs():
    target = Target.parse("h100:2x8")
    work = Workload(tokens=4_000_000, flops=16 * 989e12, price=2.0)
    speed = speed_of(work, target, 0.0, 4.0)
    assert speed.tokens_per_s == 1_000_000 and speed.mfu == pytest.approx(0.25)
    assert speed.dollars_per_hour == 32 and speed.dollars_per_million_tokens == pytest.approx(32 / 3600)
    # Without what the model needs, the traced program's FLOPs count; without tokens and price there is neither.
    other = speed_of(Workload(), target, 989e12, 4.0)
    assert other.mfu == pytest.approx(0.25) and other.tokens_per_s is None and other.dollars_per_million_tokens is None


def test_the_bubble_is_that_of_the_textbook():
    # 1f1b in lockstep: (stages - 1) ticks of (microbatches + stages - 1), arXiv 2104.04473.
    work = Workload(pipeline=PipelineConfig(signal="layers", microbatches=8))
    assert work.schedule({"stage": 4}).bubble == pytest.approx(3 / 11)
    assert work.schedule({"stage": 4}, microbatches=16).bubble == pytest.approx(3 / 19)
    assert Workload().schedule({"stage": 4}) is None


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
    assert amount(seconds, "s") == text


def test_numbers_have_two_digits():
    assert [two_digits(x) for x in (5314.98, 0.0312, 1.26, 99.6, 0.0)] == ["5,300", "0.031", "1.3", "100", "0"]
