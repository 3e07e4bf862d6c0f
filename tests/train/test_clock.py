"""Step times, with a clock that the test sets."""

import pytest

from train.records.clock import InFlight, StepClock


@pytest.fixture
def time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def test_laps_after_the_warmup_are_seconds_a_step(time):
    clock = StepClock()
    laps = []
    for step, seconds in ((10, 5.0), (20, 3.0), (30, 2.0), (34, 1.0)):
        time[0] += seconds
        laps.append(clock.lap(step, time[0]))
    assert laps == [None, pytest.approx(0.3), pytest.approx(0.2), pytest.approx(0.25)]


def test_pauses_do_not_count(time):
    clock = StepClock()
    for step in (1, 2):
        clock.lap(step, time[0])
    time[0] += 1
    with clock.paused():
        time[0] += 50
    time[0] += 2
    assert clock.lap(3, time[0]) == pytest.approx(3)
    time[0] += 4
    assert clock.lap(4, time[0]) == pytest.approx(4)


def test_the_host_runs_two_steps_ahead_at_most(monkeypatch):
    waited = []
    monkeypatch.setattr("jax.block_until_ready", waited.append)
    flight = InFlight(limit=2)
    for step in range(5):
        flight.add(step)
    assert waited == [0, 1, 2]
