"""Processes that are asked to stop all stop after the same step, in whatever order they act."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import Shared

from train.processes.peers import Agreement

AHEAD = 3
"""The number of steps that a process may be ahead of the slowest one, because its devices wait for those of the others."""
TURNS = ("train", "look", "ask", "look while training")


class WaitsError(Exception):
    """A training thread would wait here."""


class Condition:
    """Raises WaitsError instead of waiting."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def wait(self):
        raise WaitsError

    def notify_all(self):
        pass


class Process:
    """One process with its two threads. The test says when each of them continues."""

    def __init__(self, store, number, count, first):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading, "Condition", Condition)
            self.agreement = Agreement(store, number, count)
        self.begun, self.stopped = first - 1, False

    def train(self, others):
        """Begins the next step, unless the process has to wait or was stopped."""
        if self.stopped or self.begun + 1 - min(other.begun for other in others) > AHEAD:
            return
        try:
            if self.agreement.may_begin(self.begun + 1):
                self.begun += 1
            else:
                self.stopped = True
        except WaitsError:
            pass


def take(process, turn, processes, store):
    if turn == "train":
        process.train(processes)
    elif turn == "look":
        process.agreement.exchange_reports()
    elif turn == "ask":
        process.agreement.request_stop()
    else:
        store.meanwhile = lambda: process.train(processes)
        process.agreement.exchange_reports()
        del store.meanwhile


@settings(max_examples=400, deadline=None)
@given(
    count=st.integers(2, 5),
    first=st.integers(1, 9),
    turns=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(TURNS)), max_size=60),
    asks=st.integers(0, 4),
)
def test_all_processes_stop_behind_the_same_step(count, first, turns, asks):
    store = Shared()
    processes = [Process(store, number, count, first) for number in range(count)]
    last = None
    for number, turn in [
        *turns,
        (asks, "ask"),
        *((number, turn) for _ in range(20) for turn in ("look", "train") for number in range(count)),
    ]:
        take(processes[number % count], turn, processes, store)
        newest = max(process.begun for process in processes)
        if last is None and len(store) == count:
            last = newest
        assert last is None or newest == last, "a step that none had begun when all had reported"
    assert all(process.stopped for process in processes), "some process waits for ever"
    assert {process.begun for process in processes} == {last}
    assert {process.agreement.is_before_first_step for process in processes} == {last == first - 1}


def test_without_a_request_training_goes_on():
    store = Shared()
    agreements = [Agreement(store, number, 2) for number in range(2)]
    for step in range(1, 5):
        for agreement in agreements:
            agreement.exchange_reports()
            assert agreement.may_begin(step)
    assert not any(agreement.is_before_first_step for agreement in agreements)


def test_a_process_alone_stops_after_the_step_under_way():
    alone = Agreement(None)
    assert alone.may_begin(5)
    alone.request_stop()
    alone.request_stop()
    alone.exchange_reports()
    assert not alone.may_begin(6)
    assert not alone.is_before_first_step


def test_a_process_alone_that_has_begun_nothing_has_nothing_to_stop_after():
    alone = Agreement(None)
    alone.request_stop()
    assert alone.is_before_first_step
    assert not alone.may_begin(1)


def test_a_training_thread_waits_for_the_reports_of_the_others():
    store = Shared()
    mine, other = (Agreement(store, number, 2) for number in range(2))
    assert mine.may_begin(1) and other.may_begin(1) and other.may_begin(2)
    mine.request_stop()
    mine.exchange_reports()
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(mine.may_begin(step) for step in (2, 3)), daemon=True)
    thread.start()
    thread.join(timeout=0.05)
    assert answers == [] and thread.is_alive()
    other.exchange_reports()
    mine.exchange_reports()
    thread.join(timeout=10)
    assert answers == [True, False]
