"""Times that add up, against a count of every instant."""

import collections
import random

import pytest

from jgt.profile.spans import Span, shares

A, B, C = ("attn", "forward"), ("mlp", "forward"), ("mlp", "backward")


def counted(spans):
    """Own, alone and idle time, instant by instant."""
    own, alone, idle = collections.Counter(), collections.Counter(), 0
    for instant in range(min(int(s.start) for s in spans), max(int(s.end) for s in spans)):
        running = [s for s in spans if s.start <= instant < s.end]
        first = [s for s in running if not s.beside] or running
        idle += not running
        for span in first:
            (alone if span.beside else own)[span.key] += 1 / len(first)
    return own, alone, idle


@pytest.mark.parametrize("seed", range(20))
def test_every_instant_counts_once(seed):
    draw = random.Random(seed)
    spans = [Span(start, start + draw.randrange(1, 9), draw.choice([A, B, C]), draw.random() < 0.3) for start in draw.choices(range(40), k=12)]
    own, alone, idle = counted(spans)
    found = shares(spans)
    assert found.own == pytest.approx(own) and found.alone == pytest.approx(alone)
    assert found.idle == idle
    assert all(not any(s.start < end and start < s.end for s in spans) for start, end in found.gaps)


def test_a_collective_counts_where_nothing_else_runs():
    found = shares([Span(0, 4, A), Span(2, 10, B, beside=True), Span(6, 7, C)])
    assert (found.own, found.alone, found.idle) == ({A: 4, C: 1}, {B: 5}, 0)


def test_of_nothing_there_is_nothing():
    found = shares([])
    assert (found.own, found.alone, found.gaps) == ({}, {}, [])
