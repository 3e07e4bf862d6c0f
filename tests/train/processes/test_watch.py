"""The watchdog ends a process with the right exit code and message. The test controls its time, and is not ended itself."""

import contextlib
import os
import queue
import resource
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from stores import Shared

from jgt.document import InputError
from train.checkpoint.saved import find_checkpoint
from train.files.ends import Exit
from train.processes.config import WatchdogConfig
from train.processes.watch import Watch
from train.run.faults import Faults
from train.run.train import train

TICK = 0.5
"""The most seconds that the watchdog counts at a time, so that suspended time does not count."""


class LeftError(BaseException):
    """The process would have ended here."""


class Turns:
    """Replaces the watchdog's socket. The test says when the watchdog looks, and continues when it has looked or ended the process."""

    def __init__(self):
        self._orders, self._over = queue.Queue(), queue.Queue()
        self.codes = []
        self.released = False

    def socketpair(self):
        self._wake, waker = socket.socketpair()
        return self, waker

    def settimeout(self, seconds):
        assert seconds is not None and seconds <= TICK

    def recv(self, size):
        if not self.released:
            self._over.put(None)
            self._orders.get(timeout=10)
        self._wake.settimeout(0.01 if self.released else 0)
        with contextlib.suppress(BlockingIOError):
            return self._wake.recv(size)
        raise TimeoutError

    def close(self):
        self._wake.close()

    def leave(self, code):
        self.codes.append(code)
        self.released = True
        self._over.put(None)
        raise LeftError

    def take(self):
        self._over.get(timeout=10)
        if not self.released:
            self._orders.put(None)
            self._over.put(self._over.get(timeout=10))

    def release(self):
        self.released = True
        self._orders.put(None)


class Scene:
    """A watchdog and its clock."""

    def __init__(self, watch, now, turns):
        self.watch, self._now, self._turns = watch, now, turns
        self.reasons = []
        watch.on_end = self.reasons.append

    @property
    def codes(self):
        """The exit codes with which the process would have ended."""
        return self._turns.codes

    def wait(self, seconds):
        """Lets time pass in ticks."""
        for _ in range(round(seconds / TICK)):
            self.jump(TICK)

    def jump(self, seconds):
        """Lets time pass at once, as for a process that is suspended."""
        self._now[0] += seconds
        if not self.codes:
            self._turns.take()

    def steps(self, first, last, seconds):
        """Trains steps of this many seconds each. The last step only begins."""
        for step in range(first, last + 1):
            assert self.watch.may_begin(step)
            self.wait(seconds if step < last else 0)

    def signal(self, number):
        """Sends this process a signal, for which the watchdog has set a handler."""
        assert signal.getsignal(number).__module__ == "train.processes.watch"
        os.kill(os.getpid(), number)
        for _ in range(100):
            self.jump(0)
            if self.codes or self.watch.stop_signal:
                break
            time.sleep(0.01)


@pytest.fixture
def watched(monkeypatch, tmp_path):
    """Starts a watchdog with these limits."""
    now, turns = [1000.0], Turns()
    clock = SimpleNamespace(monotonic=lambda: now[0], strftime=time.strftime, sleep=lambda seconds: None)
    monkeypatch.setattr("train.processes.watch.time", clock)
    monkeypatch.setattr("train.processes.peers.time", clock)
    monkeypatch.setattr("train.processes.peers._ROUND_SECONDS", 0.01)
    monkeypatch.setattr("train.processes.watch.socket", turns)
    monkeypatch.setattr("os._exit", turns.leave)
    plain = threading.excepthook
    monkeypatch.setattr(threading, "excepthook", lambda args: None if args.exc_type is LeftError else plain(args))

    @contextlib.contextmanager
    def _watched(store=None, stopped_code=Exit.DONE, owns_process=True, **limits):
        with Watch(WatchdogConfig(**limits), tmp_path, store, stopped_code, owns_process=owns_process) as watch:
            try:
                yield Scene(watch, now, turns)
            finally:
                turns.release()

    return _watched


def test_a_step_that_does_not_end_is_ended_with_its_stacks(watched, tmp_path, capfd):
    with watched(step_seconds=60) as scene:
        scene.steps(1, 5, 1)
        scene.wait(60)
        assert scene.codes == []
        scene.wait(1)
        assert scene.codes == [Exit.HUNG]
    assert scene.reasons == ["process 0 hangs: step 5 has taken more than 60 s"]
    for text in ((tmp_path / "stacks-0.txt").read_text(), capfd.readouterr().err):
        assert "process 0 hangs: step 5 has taken more than 60 s" in text
        assert "test_a_step_that_does_not_end_is_ended_with_its_stacks" in text


def test_a_signal_arrives_with_more_descriptors_than_select_can_read(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    with contextlib.ExitStack() as closing:
        closing.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1_100):
            closing.callback(os.close, os.dup(2))
        watch = closing.enter_context(Watch(WatchdogConfig(), tmp_path, None))
        assert watch.may_begin(1)
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while watch.stop_signal is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert watch.stop_signal == "SIGTERM"


def test_a_process_ends_without_a_further_thread(watched, monkeypatch):
    with watched(step_seconds=60) as scene:
        scene.steps(1, 5, 1)
        monkeypatch.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
        scene.wait(61)
        assert scene.codes == [Exit.HUNG]


def test_the_kernels_repeated_warning_of_cpu_time_is_one_request(watched):
    with watched() as scene:
        scene.steps(1, 3, 1)
        scene.signal(signal.SIGXCPU)
        scene.wait(2)
        scene.signal(signal.SIGXCPU)
        scene.wait(2)
        assert scene.codes == [] and scene.watch.stop_signal == "SIGXCPU"
        assert not scene.watch.may_begin(4)


def test_a_step_may_take_ten_times_as_long_as_the_slowest_one(watched):
    with watched(step_seconds=60) as scene:
        scene.steps(1, 4, 2)
        scene.steps(5, 6, 7)
        scene.steps(7, 9, 3)
        scene.wait(70)
        assert scene.codes == []
        scene.wait(1)
    assert scene.reasons == ["process 0 hangs: step 9 has taken more than 70 s"]


def test_each_step_has_its_own_time(watched):
    with watched(step_seconds=60) as scene:
        scene.steps(1, 5, 1)
        for step in range(6, 10):
            scene.wait(59)
            scene.watch.may_begin(step)
        assert scene.codes == []


def test_the_first_steps_have_the_time_of_a_start_and_are_no_measure(watched):
    """The host runs two steps ahead of the devices, so the third step is the first in which it waits."""
    with watched(step_seconds=60, start_seconds=200) as scene:
        scene.steps(1, 3, 0.5)
        scene.wait(190)
        assert scene.codes == []
        scene.steps(4, 4, 1)
        scene.wait(1900)
        assert scene.codes == []
        scene.wait(1)
    assert scene.reasons == ["process 0 hangs: step 4 has taken more than 1900 s"]


def test_anything_else_has_the_time_of_a_start(watched):
    with watched(step_seconds=10, start_seconds=100) as scene:
        scene.steps(1, 5, 1)
        with scene.watch.phase("save"):
            scene.wait(100)
        scene.wait(100)
        with scene.watch.phase("eval"):
            scene.wait(100)
            assert scene.codes == []
            scene.wait(1)
    assert scene.codes == [Exit.HUNG]
    assert scene.reasons == ["process 0 hangs: eval has taken more than 100 s"]


def test_a_step_with_a_phase_is_no_measure(watched):
    with watched(step_seconds=60, start_seconds=1000) as scene:
        scene.steps(1, 5, 1)
        with scene.watch.phase("save"):
            scene.wait(500)
        scene.steps(6, 6, 0)
        scene.wait(61)
    assert scene.reasons == ["process 0 hangs: step 6 has taken more than 60 s"]


def test_opening_data_may_take_any_time(watched):
    with watched(step_seconds=1, start_seconds=1) as scene:
        scene.watch.begin_unlimited("opening model and data")
        scene.wait(500)
        assert scene.codes == []


def test_devices_that_do_not_start_are_waited_for_as_long_as_for_a_start(watched):
    with watched(start_seconds=20) as scene:
        scene.wait(20)
        assert scene.codes == []
        scene.wait(1)
    assert scene.codes == [Exit.HUNG]
    assert scene.reasons == ["process 0 hangs: starting the devices has taken more than 20 s"]


def test_a_suspended_step_is_not_a_slow_one(watched):
    with watched(step_seconds=60) as scene:
        scene.steps(1, 5, 1)
        scene.jump(100_000)
        scene.steps(6, 7, 1)
        scene.wait(60)
        assert scene.codes == []
        scene.wait(1)
    assert scene.codes == [Exit.HUNG]


def test_time_in_which_the_process_is_suspended_does_not_count(watched):
    with watched(step_seconds=60) as scene:
        scene.steps(1, 5, 1)
        for _ in range(3):
            scene.jump(100_000)
        scene.wait(58)
        assert scene.codes == []


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_the_step_under_way(watched, number, capfd):
    with watched() as scene:
        scene.steps(1, 3, 1)
        assert scene.watch.stop_signal is None
        scene.signal(number)
        assert scene.watch.stop_signal == signal.Signals(number).name
        assert not scene.watch.may_begin(4)
    assert scene.codes == []
    assert (
        f"{signal.Signals(number).name}: the steps under way are finished and saved, then the run stops. "
        "A second signal stops at once, without saving" in capfd.readouterr().err
    )


def test_a_second_signal_stops_at_once(watched, tmp_path):
    with watched() as scene:
        scene.steps(1, 3, 1)
        scene.signal(signal.SIGTERM)
        scene.wait(0.5)
        scene.signal(signal.SIGINT)
        scene.wait(1)
    assert scene.codes == [128 + signal.SIGINT]
    assert scene.reasons == ["second signal (SIGINT): stopping at once, without saving"]
    assert not (tmp_path / "stacks-0.txt").exists()


def test_two_signals_at_once_are_one(watched):
    with watched() as scene:
        scene.steps(1, 3, 1)
        scene.signal(signal.SIGTERM)
        scene.signal(signal.SIGTERM)
        scene.wait(1)
        assert not scene.watch.may_begin(4)
    assert scene.codes == []


def test_a_second_interrupt_is_raised_in_a_process_of_others(watched, capfd):
    with watched(owns_process=False) as scene:
        scene.steps(1, 3, 1)
        scene.signal(signal.SIGINT)
        scene.wait(0.5)
        with pytest.raises(KeyboardInterrupt):
            scene.signal(signal.SIGINT)
            scene.wait(1)
        # The kernel of a notebook may send more of them.
        scene.signal(signal.SIGINT)
        scene.wait(1)
    assert scene.codes == []
    assert capfd.readouterr().err.count("second signal (SIGINT): stopping at once, without saving") == 1


def test_an_interrupt_before_the_first_step_is_raised_in_a_process_of_others(watched):
    with watched(owns_process=False) as scene:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100):
                scene.jump(0)
                time.sleep(0.01)
        assert scene.watch.stop_signal is None
    assert scene.codes == []


@pytest.mark.parametrize("stopped_code", [Exit.DONE, 99])
def test_before_the_first_step_there_is_nothing_to_save(watched, stopped_code):
    with watched(stopped_code=stopped_code) as scene:
        scene.signal(signal.SIGTERM)
        scene.wait(1)
    assert scene.codes == [stopped_code]
    assert scene.reasons == ["stopped by SIGTERM before the first step: there is nothing to save"]


def test_handlers_are_as_before_afterwards(watched):
    def own(number, frame):
        pass

    before = {number: signal.signal(number, own) for number in (signal.SIGTERM, signal.SIGINT)}
    wake_up = signal.set_wakeup_fd(-1)
    try:
        with contextlib.suppress(ValueError), watched() as scene:
            assert all(signal.getsignal(number) is not own for number in before)
            scene.wait(1)
            raise ValueError
        assert all(signal.getsignal(number) is own for number in before)
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(wake_up)
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_run_that_is_asked_to_stop_saves_the_step_under_way(tiny, monkeypatch, capsys, read_rows):
    plain = Faults.inject

    def inject(self, step, batch):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
        return plain(self, step, batch)

    monkeypatch.setattr(Faults, "inject", inject)
    run = tiny("train.steps=6")
    train(run)
    assert "Stopped at step 3 of 6 by SIGTERM; the same command resumes from there" in " ".join(capsys.readouterr().out.split())
    assert [row["step"] for row in read_rows(run.config.run.path / "metrics.jsonl")] == [1, 2, 3]
    assert find_checkpoint(run.config.run.path)[0].manifest.step == 3
    stop = read_rows(run.config.run.path / "events.jsonl")[-1]
    assert (stop["phase"], stop["step"], stop["why"]) == ("stop", 3, "SIGTERM")


# -- several processes -----------------------------------------------------------------------------------------------


def test_a_hang_is_told_to_the_others(watched):
    store = Shared()
    with watched(store, step_seconds=60, peer_seconds=1000) as scene:
        scene.steps(1, 5, 1)
        scene.wait(61)
    assert scene.codes == [Exit.HUNG]
    assert store["failed/0"] == "hangs: step 5 has taken more than 60 s"


def test_an_error_is_told_to_the_others(watched):
    store = Shared()
    with pytest.raises(ValueError, match="first"), watched(store):
        raise ValueError("first\nsecond")
    assert store["failed/0"] == "failed: ValueError: first"


def test_wrong_input_is_found_by_all_alike_and_not_told(watched):
    store = Shared()
    with pytest.raises(InputError), watched(store):
        raise InputError(["wrong"])
    assert not store.below("failed")


def test_who_is_done_says_goodbye(watched):
    store = Shared()
    with watched(store):
        pass
    assert store["alive/0"] == "done"


def test_a_failure_elsewhere_ends_this_process(watched, tmp_path):
    store = Shared()
    with watched(store) as scene:
        store["failed/1"] = "failed: ValueError: first"
        for _ in range(500):
            if scene.codes:
                break
            time.sleep(0.01)
    assert scene.codes == [Exit.PEER]
    assert scene.reasons == ["process 0 stops, because process 1 failed: ValueError: first"]
    assert "Thread" in (tmp_path / "stacks-0.txt").read_text()


def test_after_a_suspension_the_coordinator_gets_its_time_again(watched):
    store = Shared()
    store.broken = True
    with watched(store, peer_seconds=30) as scene:
        scene.wait(20)
        scene.jump(100_000)
        scene.wait(14)
        assert scene.codes == []
        scene.wait(3)
    assert scene.codes == [Exit.PEER]


def test_a_coordinator_that_does_not_answer_ends_this_process(watched):
    store = Shared()
    store.broken = True
    with watched(store, peer_seconds=30) as scene:
        scene.wait(35)
        assert scene.codes == []
        scene.wait(1)
    assert scene.codes == [Exit.PEER]
    assert scene.reasons == ["process 0 stops, because the coordinator, in process 0, has not answered for 35 s"]
