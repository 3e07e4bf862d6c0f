"""Every wait ends: the ways in which a process can be absent, stuck or unwanted, each with its code, its line and its time."""

import contextlib
import signal
import socket
import sys
import threading
import time

import pytest
from runs import Processes, flags, free_port, rows, wait_for_step

from train.files.ends import Exit

JOIN, START, PEER = 2, 20, 4
STARTING = 45
"""Seconds for what is not measured here, on a busy machine: to start, to open the data, to compile and to leave."""
RULES = 'rules={axes: {batch: [data]}, signals: {"layers/*": {out: [batch, null, null]}}, default: replicate}'
WATCHDOG = f"watchdog={{join_seconds: {JOIN}, start_seconds: {START}, peer_seconds: {PEER}, step_seconds: 5}}"
MANY = 100_000
RUBBISH = [b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 50_000, b"{}\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]


@pytest.fixture
def command(tiny_file, tmp_path):
    """The arguments of a run with two devices for each process."""

    def _command(*overrides, steps=MANY):
        constant = ["mesh={data: -1}", RULES, "devices.virtual_cpu=2", WATCHDOG, f"train.steps={steps}", f"run.dir={tmp_path / 'run'}"]
        return ["--config", str(tiny_file), *constant, *overrides]

    return _command


@pytest.fixture
def start(command, nursery, tmp_path, pytestconfig):
    """Starts processes of a run with these numbers. first: by process, Python code to break something before."""

    def _start(*numbers, count=2, port=None, host="localhost", overrides=(), first=None, **options):
        port = port or free_port()
        joined = [["--coordinator", f"{host}:{port}", *flags(port, count, number)[2:]] if count > 1 else [] for number in numbers]
        commands = [[*command(*overrides, **options), *one] for one in joined]
        first = {numbers.index(number): code for number, code in (first or {}).items()}
        return Processes(tmp_path, commands, pytestconfig.rootpath, nursery=nursery, first=first)

    return _start


# -- a process that does not come -----------------------------------------------------------------------------------


def nobody(port):
    return contextlib.nullcontext()


def taken(port):
    """Another program listens at the port and says nothing."""
    return socket.create_server(("127.0.0.1", port))


@contextlib.contextmanager
def black_hole(port):
    """No packet to the port is answered: its queue of connections is full."""
    with contextlib.ExitStack() as closing:
        listener = closing.enter_context(socket.create_server(("127.0.0.1", port), backlog=1))
        for _ in range(8):
            one = closing.enter_context(socket.socket())
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(("127.0.0.1", port))
        assert listener
        yield


ABSENT = [
    pytest.param(0, nobody, "localhost", f"jgt: process 1 did not come within {JOIN} s", id="no process 1"),
    pytest.param(1, nobody, "localhost", f"jgt: process 1 has not found the others within {JOIN} s: process 0", id="no process 0"),
    pytest.param(0, taken, "localhost", "jgt: process 0 cannot listen at port ", id="port taken"),
    pytest.param(
        1,
        nobody,
        "nowhere.invalid",
        f"within {JOIN} s: process 0 cannot be reached at nowhere.invalid:",
        id="no such host",
        marks=pytest.mark.slow,
    ),
    pytest.param(1, taken, "localhost", ": timed out", id="silent port", marks=pytest.mark.slow),
    pytest.param(1, black_hole, "localhost", ": timed out", id="black hole", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("process", "obstacle", "host", "expected"), ABSENT)
def test_a_process_without_its_peers_ends(start, process, obstacle, host, expected):
    port = free_port()
    with obstacle(port), start(process, port=port, host=host) as processes:
        begun = time.monotonic()
        assert processes.wait(0, JOIN + STARTING) == Exit.UNJOINED
        assert time.monotonic() - begun < JOIN + STARTING
        assert expected in processes.output(0)


@pytest.mark.slow
def test_what_is_waited_for_is_said_every_ten_seconds(start):
    with start(0, count=3, overrides=["watchdog.join_seconds=22"]) as processes:
        assert processes.wait(0, 22 + STARTING) == Exit.UNJOINED
        lines = [line for line in processes.output(0).splitlines() if line.startswith("jgt: waiting")]
    assert lines == [f"jgt: waiting for processes 1, 2, {seconds} of 22 s" for seconds in (10, 20)]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_while_it_joins_is_missed(start, victim):
    with start(0, 1, count=3, overrides=["watchdog.join_seconds=15"]) as processes:
        time.sleep(5)
        processes.send(victim, signal.SIGKILL)
        assert processes.wait(1 - victim, 15 + STARTING) == Exit.UNJOINED
        expected = "jgt: processes 1, 2 did not come within 15 s" if victim else "jgt: process 1 has not found the others within 15 s"
        assert expected in processes.output(1 - victim)


# -- a process that is stuck ----------------------------------------------------------------------------------------

STUCK = "import time; time.sleep(10_000)"
DEAD = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def instead(module, name, what):
    """Code that does something else in the place of a function, after the function's own work if it needs the other processes."""
    return f"import {module}\ndef broken(*_, **__):\n    {what}\n{module}.{name} = broken\n"


def after(module, name, what):
    """Code that does something after a function."""
    return f"import {module}\nplain = {module}.{name}\ndef broken(*a, **b):\n    plain(*a, **b)\n    {what}\n{module}.{name} = broken\n"


COMPILE = ("train.setup.setup", "Setup.compile_train_step")
SAVE = ("train.checkpoint.checkpoint", "Checkpoints.save")
RESTORE = ("train.run.start", "restore_state")
CONNECT = ("jax.distributed", "initialize")
DEVICES = ("jax", "devices")

# What is broken in the last process, the number of processes, the codes of all of them, and the seconds in which they end.
WAYS = [
    pytest.param(instead(*COMPILE, STUCK), 1, [{Exit.HUNG}], START, id="stuck in compile, alone"),
    pytest.param(instead(*SAVE, STUCK), 1, [{Exit.HUNG}], START, id="stuck in save, alone"),
    pytest.param(instead(*RESTORE, STUCK), 1, [{Exit.HUNG}], START, id="stuck in restore, alone"),
    pytest.param(instead(*DEVICES, STUCK), 1, [{Exit.HUNG}], START, id="stuck in the start of the devices, alone"),
    pytest.param(instead(*COMPILE, STUCK), 2, [{Exit.PEER, Exit.HUNG}] * 2, START, id="stuck in compile"),
    pytest.param(instead(*SAVE, STUCK), 2, [{Exit.PEER, Exit.HUNG}] * 2, START, id="stuck in save"),
    pytest.param(instead(*RESTORE, STUCK), 2, [{Exit.PEER, Exit.HUNG}] * 2, START, id="stuck in restore"),
    pytest.param(instead(*DEVICES, STUCK), 2, [{Exit.PEER, Exit.HUNG}] * 2, START, id="stuck in the start of the devices"),
    pytest.param(instead(*COMPILE, DEAD), 2, [{Exit.PEER}, {-signal.SIGKILL}], PEER + 10, id="dead in compile"),
    pytest.param(instead(*CONNECT, DEAD), 2, [{Exit.UNJOINED}, {-signal.SIGKILL}], 20, id="dead before JAX connects"),
    pytest.param(after(*CONNECT, DEAD), 2, [{Exit.PEER}, {-signal.SIGKILL}], PEER + 10, id="dead when JAX has connected"),
    pytest.param(after(*CONNECT, STUCK), 2, [{Exit.PEER}], PEER + 10, id="stuck when JAX has connected"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "count", "codes", "seconds"), WAYS)
def test_a_process_that_is_stuck_or_dead_ends_all(start, tmp_path, broken, count, codes, seconds):
    overrides = [f"watchdog={{join_seconds: 15, start_seconds: {START}, peer_seconds: {PEER}, step_seconds: 5}}", "checkpoint.every=2"]
    if "restore" in broken:
        with start(*range(count), count=count, overrides=overrides, steps=4) as processes:
            assert processes.wait_all() == [Exit.DONE] * count
    with start(*range(count), count=count, overrides=overrides, steps=8, first={count - 1: broken}) as processes:
        begun = time.monotonic()
        for process, expected in enumerate(codes):
            assert processes.wait(process, seconds + STARTING) in expected, processes.output(process)
            if -signal.SIGKILL not in expected:
                assert "jgt: " in processes.output(process)
                assert "most recent call first" in processes.output(process)
        print(f"\n{count} processes ended after {time.monotonic() - begun:.0f} s", file=sys.__stderr__)


@pytest.mark.slow
def test_processes_that_are_suspended_for_a_minute_go_on(start, tmp_path):
    with start(0, 1) as processes:
        wait_for_step(tmp_path / "run", 3)
        for number, seconds in ((signal.SIGSTOP, 60), (signal.SIGCONT, 0)):
            for process in (0, 1):
                processes.send(process, number)
            time.sleep(seconds)
        wait_for_step(tmp_path / "run", rows(tmp_path / "run" / "metrics.jsonl")[-1]["step"] + 20)
        processes.send(1, signal.SIGTERM)
        assert processes.wait_all(STARTING) == [Exit.DONE] * 2


# -- a process that is not wanted -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_strangers_are_refused_while_a_run_waits_and_it_begins_nevertheless(start, tmp_path, command, nursery, pytestconfig):
    secret, guess, port = tmp_path / "secret", tmp_path / "guess", free_port()
    secret.write_text("a long random text\n")
    guess.write_text("another one\n")
    overrides = ["watchdog.join_seconds=100", "--token-file", str(secret)]
    uninvited = [
        ([overrides[0], "--token-file", str(guess), *flags(port, 2, 1)], "its token is not the run's"),
        ([*overrides, *flags(port, 3, 2)], "--processes 3, not 2"),
        (["optimizer.lr=1.0", *overrides, *flags(port, 2, 1)], "it has config (checksum) "),
    ]
    with start(0, port=port, overrides=overrides, steps=3) as first:
        (tmp_path / "uninvited").mkdir()
        commands = [[*command(steps=3), *own] for own, _ in uninvited]
        with Processes(tmp_path / "uninvited", commands, pytestconfig.rootpath, nursery=nursery) as others:
            assert others.wait_all(STARTING) == [Exit.INPUT] * len(uninvited)
            for number, (_, expected) in enumerate(uninvited):
                assert expected in others.output(number)
        (tmp_path / "invited").mkdir()
        commands = [[*command(*overrides, steps=3), *flags(port, 2, 1)]]
        with Processes(tmp_path / "invited", commands, pytestconfig.rootpath, nursery=nursery) as second:
            assert first.wait_all() + second.wait_all() == [Exit.DONE] * 2


@pytest.mark.slow
def test_a_second_process_1_is_refused_while_a_run_trains_and_harms_nobody(start, tmp_path, command, nursery, pytestconfig):
    port = free_port()
    (tmp_path / "second").mkdir()
    with start(0, 1, port=port) as processes:
        wait_for_step(tmp_path / "run", 3)
        again = [[*command("watchdog.join_seconds=60"), *flags(port, 2, number)] for number in (1, 0)]
        with Processes(tmp_path / "second", again, pytestconfig.rootpath, nursery=nursery) as second:
            assert second.wait_all(STARTING) == [Exit.INPUT, Exit.UNJOINED]
            assert "the run has already begun with all its processes" in second.output(0)
            assert "process 0 cannot listen at port" in second.output(1)
        processes.send(1, signal.SIGTERM)
        assert processes.wait_all(STARTING) == [Exit.DONE] * 2


@pytest.mark.slow
def test_three_hundred_strangers_at_any_time_end_no_run(start, tmp_path):
    port, over, met = free_port(), threading.Event(), []
    thread = threading.Thread(target=_disturb, args=(port, over, met))
    thread.start()
    try:
        with start(0, 1, port=port, overrides=["watchdog.join_seconds=100"]) as processes:
            wait_for_step(tmp_path / "run", 30)
            processes.send(1, signal.SIGTERM)
            assert processes.wait_all(STARTING) == [Exit.DONE] * 2
    finally:
        over.set()
        thread.join()
    assert len(met) > 300


def _disturb(port, over, met):
    """Keeps 300 connections open that say nothing, rubbish, or a byte now and then."""
    open_ones = []
    while not over.wait(0.01):
        with contextlib.suppress(OSError):
            one = socket.create_connection(("127.0.0.1", port), timeout=0.2)
            one.settimeout(0)
            met.append(one)
            open_ones.append(one)
            one.send(RUBBISH[len(met) % len(RUBBISH)])
        for one in open_ones[::7]:
            with contextlib.suppress(OSError):
                one.send(b"x")
        while len(open_ones) > 300:
            open_ones.pop(0).close()
    for one in open_ones:
        one.close()
