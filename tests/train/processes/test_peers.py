"""Processes that fail or fall silent are reported to all others. The test controls rounds and time."""

import queue
import threading
from types import SimpleNamespace

import pytest
from stores import Shared

from train.processes.peers import Agreement, Peers

SECONDS = 30
SILENT = "process 2 has been silent for 30 s"


class Turns:
    """Replaces the event that ends the rounds. The test says when a round begins, and continues when it is over."""

    def __init__(self):
        self._orders, self._over = queue.Queue(), queue.Queue()

    def wait(self, seconds):
        self._over.put(None)
        return self._orders.get(timeout=10)

    def set(self):
        self._orders.put(True)

    def take(self):
        self._over.get(timeout=10)
        self._orders.put(False)
        self._over.put(self._over.get(timeout=10))


class Process:
    """One process. lost: the reports that it received about the end of others."""

    def __init__(self, store, number, count):
        self.turns, self.lost, self.agreement = Turns(), [], Agreement(store, number, count)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("train.processes.peers.threading", SimpleNamespace(Event=lambda: self.turns, Thread=threading.Thread))
            self.peers = Peers(store, number, count, self.agreement, seconds=SECONDS, on_loss=self.lost.append)
            self.peers.start()


class Group:
    """Some processes, their store, and the time."""

    def __init__(self, now, count):
        self.now, self.store = now, Shared()
        self.processes = [Process(self.store, number, count) for number in range(count)]

    def __getitem__(self, number):
        return self.processes[number]

    def talk(self, seconds, *numbers):
        """Lets time pass, with two rounds of these processes per second."""
        for _ in range(seconds):
            self.now[0] += 1
            for number in (*reversed(numbers), *numbers):
                self.processes[number].turns.take()

    def lost(self):
        """The reports that each process received, without duplicates."""
        return [sorted(set(process.lost)) for process in self.processes]


@pytest.fixture
def start(monkeypatch):
    """Starts a number of processes."""
    now, groups = [1000.0], []
    monkeypatch.setattr("train.processes.peers.time", SimpleNamespace(monotonic=lambda: now[0]))

    def _start(count):
        groups.append(Group(now, count))
        return groups[-1]

    yield _start
    for group in groups:
        for process in group.processes:
            process.peers.close(done=False)


def test_processes_that_talk_are_not_missed(start):
    group = start(3)
    group.talk(100, 0, 1, 2)
    assert group.lost() == [[], [], []]


def test_silence_is_told_to_all_when_it_lasts_too_long(start):
    group = start(3)
    group.talk(5, 0, 1, 2)
    group.talk(SECONDS, 0, 1)
    assert group.lost() == [[], [], []]
    group.talk(2, 0, 1)
    assert group.lost() == [[SILENT], [SILENT], []]


def test_who_never_came_is_missed_too(start):
    group = start(3)
    group.talk(SECONDS + 2, 0, 1)
    assert group.lost() == [[SILENT], [SILENT], []]


def test_who_comes_back_after_all_gave_up_ends(start):
    group = start(3)
    group.talk(SECONDS + 2, 0, 1)
    group.talk(1, 2)
    assert set(group[2].lost) == {SILENT}


def test_who_says_goodbye_is_not_missed(start):
    group = start(3)
    group.talk(5, 0, 1, 2)
    group[2].peers.close(done=True)
    group.talk(3 * SECONDS, 0, 1)
    assert group.lost() == [[], [], []]


def test_who_ends_without_a_goodbye_is_missed(start):
    group = start(3)
    group.talk(5, 0, 1, 2)
    group[2].peers.close(done=False)
    group.talk(SECONDS + 2, 0, 1)
    assert group.lost() == [[SILENT], [SILENT], []]


def test_a_failure_reaches_all_others_and_not_who_told_it(start):
    group = start(3)
    group.talk(5, 0, 1, 2)
    group[1].peers.report_failure("failed: ValueError: no such thing")
    group.talk(5, 0, 1, 2)
    assert group.lost() == [["process 1 failed: ValueError: no such thing"], [], ["process 1 failed: ValueError: no such thing"]]


def test_who_fails_too_does_not_hear_of_the_others(start):
    group = start(3)
    group[1].peers.report_failure("failed: first")
    group[2].peers.report_failure("failed: second")
    group.talk(1, 0, 1, 2)
    assert group.lost() == [["process 1 failed: first; process 2 failed: second"], [], []]


def test_a_store_that_does_not_answer_is_survived(start):
    group = start(2)
    group.talk(3, 0, 1)
    before = group[1].peers.answered
    group.store.broken = True
    group.talk(5, 0, 1)
    group[1].peers.report_failure("failed")
    assert group[1].peers.answered == before
    group.store.broken = False
    group.talk(1, 0, 1)
    assert group[1].peers.answered == before + 6
    assert group.lost() == [[], []]


def test_after_its_own_suspension_the_first_process_gives_the_others_another_chance(start):
    group = start(3)
    group.talk(5, 0, 1, 2)
    group.talk(1, 0)
    group.now[0] += 1000
    group.talk(1, 0)
    group.talk(SECONDS - 1, 0, 1)
    assert group.lost() == [[], [], []]
    group.talk(2, 0, 1)
    assert group.lost() == [[SILENT], [SILENT], []]


def test_a_request_to_stop_travels_with_the_rounds(start):
    group = start(3)
    group.talk(1, 0, 1, 2)
    assert group[0].agreement.may_begin(1) and group[1].agreement.may_begin(1) and group[1].agreement.may_begin(2)
    group[2].agreement.request_stop()
    group.talk(2, 0, 1, 2)
    assert [[group[i].agreement.may_begin(step) for step in (2, 3)] for i in range(3)] == [[True, False]] * 3


def test_the_first_process_knows_what_the_others_do(start):
    group = start(3)
    group[1].peers.doing = "step 7"
    group[2].peers.doing = "save"
    group.talk(1, 0, 1, 2)
    assert group[0].peers.describe_others() == "process 1: step 7, process 2: save"


def test_thousands_of_processes_ask_less_often(monkeypatch):
    waits = []

    class Never(Turns):
        def wait(self, seconds):
            waits.append(seconds)
            return True

    agreement = Agreement(None)
    monkeypatch.setattr("train.processes.peers.threading", SimpleNamespace(Event=Never, Thread=threading.Thread))
    for count in (2, 2048):
        peers = Peers(Shared(), 1, count, agreement, seconds=SECONDS, on_loss=print)
        peers.start()
        peers.close(done=False)
    assert waits == [0.5, 4.0]
