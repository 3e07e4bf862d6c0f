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


class Result:
    """A result of a device, which finishes when the test says so."""

    def __init__(self):
        self.ready = False

    def is_ready(self):
        return self.ready


@pytest.fixture
def device(time, monkeypatch):
    """Waiting for a result takes three seconds, unless it is ready."""

    def wait(result):
        if not result.ready:
            time[0] += 3
            result.ready = True
        return result

    monkeypatch.setattr("jax.block_until_ready", wait)


def test_steps_that_are_noticed_together_have_no_time_of_their_own(time, device):
    flight, clock, results = InFlight(limit=2), StepClock(), []

    def add():
        results.append(Result())
        return flight.add(results[-1])

    finished = [add(), add(), add()]
    # The host is busy for a minute. Steps 2 and 3 finish meanwhile, and are noticed together.
    time[0] += 60
    results[1].ready = results[2].ready = True
    finished += [add() for _ in range(5)]
    finished += [flight.next(), flight.next()]
    laps = [clock.lap(step, f.at, f.late) for step, f in enumerate((f for f in finished if f is not None), 1)]
    # The host waits three seconds for each of the others.
    assert laps[:3] == [None, None, None]
    assert all(lap is None or lap > 2.5 for lap in laps)
    assert laps[-1] == pytest.approx(3)


def test_a_slow_host_sees_the_time_of_its_own_loop(time, device):
    flight, clock, laps = InFlight(limit=2), StepClock(), []
    results = []
    for step in range(1, 40):
        time[0] += 0.5
        for result in results:
            result.ready = True
        results.append(Result())
        if (finished := flight.add(results[-1])) is not None:
            laps.append(clock.lap(step - 2, finished.at, finished.late))
    assert laps[:5] == [None] * 5
    assert all(lap is None or lap == pytest.approx(0.5) for lap in laps)
    assert laps[-20:] == [pytest.approx(0.5)] * 20


def test_programs_that_run_inside_their_dispatch_are_timed_from_the_third_step(time, device):
    flight, clock, laps = InFlight(limit=2), StepClock(), []
    for step in range(1, 8):
        time[0] += 0.25
        result = Result()
        result.ready = True
        if (finished := flight.add(result)) is not None:
            laps.append(clock.lap(step - 2, finished.at, finished.late))
    assert laps == [None, None, *[pytest.approx(0.25)] * 3]
