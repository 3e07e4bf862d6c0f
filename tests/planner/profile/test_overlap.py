"""Time divided among overlapping intervals, compared with a count of every instant."""

import collections
import random

import pytest

from jgt.planner.hlo.origin import Origin
from jgt.planner.profile.overlap import Interval, divide_time

A, B, C = Origin("attn", "forward"), Origin("mlp", "forward"), Origin("mlp", "backward")


def counted(spans):
    """Foreground, background and idle time, instant by instant."""
    foreground, background, idle = collections.Counter(), collections.Counter(), 0
    for instant in range(min(int(s.start) for s in spans), max(int(s.end) for s in spans)):
        running = [s for s in spans if s.start <= instant < s.end]
        first = [s for s in running if not s.in_background] or running
        idle += not running
        for span in first:
            (background if span.in_background else foreground)[span.origin] += 1 / len(first)
    return foreground, background, idle


@pytest.mark.parametrize("seed", range(20))
def test_every_instant_counts_once(seed):
    draw = random.Random(seed)
    spans = [
        Interval(start, start + draw.randrange(1, 9), draw.choice([A, B, C]), draw.random() < 0.3)
        for start in draw.choices(range(40), k=12)
    ]
    foreground, background, idle = counted(spans)
    found = divide_time(spans)
    assert found.foreground == pytest.approx(foreground) and found.background == pytest.approx(background)
    assert found.idle == idle
    assert all(not any(s.start < end and start < s.end for s in spans) for start, end in found.gaps)


def test_a_collective_counts_only_while_nothing_else_runs():
    found = divide_time([Interval(0, 4, A), Interval(2, 10, B, in_background=True), Interval(6, 7, C)])
    assert (found.foreground, found.background, found.idle) == ({A: 4, C: 1}, {B: 5}, 0)


def test_no_intervals():
    found = divide_time([])
    assert (found.foreground, found.background, found.gaps) == ({}, {}, [])
