"""Processes meet at a port and check each other there. Processes are threads here, and strangers are sockets."""

import contextlib
import dataclasses
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from runs import free_port

from jgt.document import InputError
from train.processes import join
from train.processes.cluster import Cluster
from train.processes.connect import start_jax
from train.processes.join import Address, JoinError, Membership, Wait, names

SECONDS = 20
FACTS = {"run.name": "tiny", "code": "jgt 1 with jax 2", "config": "c0ffee", "--processes": 3}
MAX_LINE = 4_096
RUN = Membership(facts=FACTS, token=b"secret", seconds=SECONDS)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Shortens the times after which something is said or given up."""
    monkeypatch.setattr(join, "_REPORT_SECONDS", 0.5)
    monkeypatch.setattr(join, "_STATEMENT_SECONDS", 0.5)
    monkeypatch.setattr(join, "_TAKEN_SECONDS", 0.5)
    monkeypatch.setattr(join, "_SILENT_SECONDS", 3)


@pytest.fixture
def run():
    """Starts the processes of a run in threads: run(process, membership, count, **changes of the membership) returns a future."""
    place = Address(host="127.0.0.1", port=free_port(), listen="127.0.0.1")

    class Run:
        port = place.port

        def __call__(self, process, member=RUN, count=3, **changes):
            return pool.submit(self._join, process, count, dataclasses.replace(member, **changes))

        @staticmethod
        def _join(process, count, member):
            join.join(place, process, count, member)
            if process == 0:
                # Stands for JAX's service, whose first bytes are a frame of HTTP/2.
                listener = closing.enter_context(socket.create_server(("127.0.0.1", place.port), backlog=100))
                served = threading.Thread(target=serve, args=(listener,), daemon=True)
                served.start()
                # A close alone does not wake the thread that accepts. Last in, first out.
                closing.callback(served.join, SECONDS)
                closing.callback(listener.shutdown, socket.SHUT_RDWR)

    def serve(listener):
        with contextlib.suppress(OSError), contextlib.ExitStack() as visitors:
            while True:
                connection = visitors.enter_context(listener.accept()[0])
                with contextlib.suppress(OSError):
                    connection.sendall(b"\x00\x00\x18\x04\x00\x00\x00\x00\x00")

    with contextlib.ExitStack() as closing, ThreadPoolExecutor(16) as pool:
        yield Run()


def listening(port):
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
        time.sleep(0.02)
    raise TimeoutError(port)


def until(reached):
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def refusal(future):
    with pytest.raises(InputError) as refused:
        future.result(SECONDS)
    (problem,) = refused.value.problems
    return problem


# -- who comes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_go_when_all_are_there(run, order, caplog):
    waiting = []
    for process in order:
        assert not any(one.done() for one in waiting)
        waiting.append(run(process))
        time.sleep(0.2)
    for one in waiting:
        one.result(SECONDS)
    assert not caplog.records


def test_a_process_alone_needs_nobody(run):
    run(0, count=1).result(SECONDS)


def test_who_is_missing_is_said_to_all_and_in_the_end_too(run, capfd):
    first, second = run(0, seconds=2), run(1)
    with pytest.raises(JoinError, match=r"^process 2 did not come within 2 s$"):
        first.result(SECONDS)
    with pytest.raises(JoinError, match=r"^process 1 stops, because process 2 did not come within 2 s$"):
        second.result(SECONDS)
    said = capfd.readouterr().err
    assert "jgt: waiting for process 2, 1 of 2 s\n" in said
    assert "jgt: process 1 has joined and is waiting for process 2, " in said


def test_who_waits_for_the_first_process_says_so(run, capfd):
    with pytest.raises(JoinError, match=r"^process 1 has not found the others within 2 s: process 0 cannot be reached at .*refused"):
        run(1, seconds=2).result(SECONDS)
    assert "jgt: process 1 is waiting for process 0, 1 of 2 s: process 0 cannot be reached at " in capfd.readouterr().err


def test_a_host_without_an_address_is_tried_until_the_time_is_over():
    with pytest.raises(JoinError, match=r"cannot be reached at nowhere\.invalid:1: "):
        join.join(Address(host="nowhere.invalid", port=1), 1, 3, dataclasses.replace(RUN, seconds=0.3))


def test_a_member_that_dies_is_missing_again_and_may_come_back(run, capfd):
    first = run(0)
    with listening(run.port) as dying:
        state(dying, RUN, 2)
        until(lambda: "jgt: waiting for process 1," in capfd.readouterr().err)
    until(lambda: "jgt: waiting for processes 1, 2," in capfd.readouterr().err)
    for one in (first, run(1), run(2)):
        one.result(SECONDS)


def test_a_first_process_that_dies_is_looked_for_again(run):
    with socket.create_server(("127.0.0.1", run.port)) as listener:
        second = run(1, count=2)
        connection, _ = listener.accept()
        connection.sendall(b"jgt-join-2 1234\n")
        connection.close()
    run(0, count=2).result(SECONDS)
    second.result(SECONDS)


def test_a_port_that_is_taken_is_named(run):
    with (
        socket.create_server(("127.0.0.1", run.port)),
        pytest.raises(JoinError, match=rf"process 0 cannot listen at port {run.port} of 127.0.0.1: Address already in use\. Name a free"),
    ):
        run(0).result(SECONDS)


def test_a_port_that_becomes_free_is_taken(run):
    with socket.create_server(("127.0.0.1", run.port)):
        alone = run(0, count=1)
        time.sleep(0.1)
        assert not alone.done()
    alone.result(SECONDS)


def test_whoever_listens_without_a_word_is_waited_for(run):
    with socket.create_server(("127.0.0.1", run.port)), pytest.raises(JoinError, match=r"cannot be reached at .*timed out"):
        run(1, seconds=1.5).result(SECONDS)


# -- who may come ------------------------------------------------------------------------------------------------


STRANGERS = [
    (1, {"token": b"guess"}, "its token is not the run's. Give all processes the same JGT_TOKEN"),
    (1, {"token": b""}, "its token is not the run's"),
    (1, {"facts": {"--processes": 4}}, "it has --processes 4, not 3. Give all processes of a run the same"),
    (7, {}, "its number is 7. The numbers to join are 1 to 2"),
    (
        1,
        {"facts": {"run.name": "other\x1b[2J", "config": "beef"}},
        r"it has run.name 'other\x1b[2J', not 'tiny', config 'beef', not 'c0ffee'",
    ),
    (1, {"facts": {"code": "jgt 1 with jax 3"}}, "it has code 'jgt 1 with jax 3', not 'jgt 1 with jax 2'"),
]


def test_strangers_are_refused_with_the_reason_and_harm_nobody(run, capfd):
    first, said = run(0), []
    for process, other, expected in STRANGERS:
        problem = refusal(run(process, **{**other, "facts": {**FACTS, **other.get("facts", {})}}))
        assert problem.startswith(f"process {process}: process 0 at 127.0.0.1:{run.port} refused it: {expected}")
    second = run(1)
    until(lambda: said.append(capfd.readouterr().err) or "waiting for process 2," in said[-1])
    assert "process 1 has already joined, from 127.0.0.1. Give each process a number of its own" in refusal(run(1))
    for one in (first, second, run(2)):
        one.result(SECONDS)
    refusals = "".join(said) + capfd.readouterr().err
    assert refusals.count("jgt: refused a process that wanted to join from 127.0.0.1: ") == len(STRANGERS) + 1


def test_the_right_process_with_another_config_is_wrong_input_for_the_first_too(run):
    first = run(0, seconds=1.5)
    refusal(run(1, facts={**FACTS, "config": "beef"}))
    assert "; process 1 was refused: it has config 'beef', not 'c0ffee'. Give all processes of a run the same" in refusal(first)


def test_a_process_that_comes_when_the_run_has_begun_is_refused(run):
    for one in [run(process) for process in range(3)]:
        one.result(SECONDS)
    assert "something else listens there, or the run has already begun with all its processes" in refusal(run(1))


def test_a_process_0_without_the_token_is_not_joined(run):
    with socket.create_server(("127.0.0.1", run.port)) as listener:
        coming = run(1)

        def impostor():
            while not coming.done():
                # The last visitor only wakes this thread, and shows nothing.
                with listener.accept()[0] as connection, contextlib.suppress(OSError, ValueError):
                    connection.sendall(b"jgt-join-2 1234\n")
                    statement = json.loads(connection.recv(MAX_LINE).partition(b" ")[2])
                    connection.sendall(f"yes {Membership().sign('process 0', statement['nonce'])}\nstart\n".encode())

        thread = threading.Thread(target=impostor, daemon=True)
        thread.start()
        assert "the process that listens there does not know this run's token" in refusal(coming)
        listening(run.port).close()
        thread.join(SECONDS)


def statement(member, process, nonce="00"):
    return json.dumps({"process": process, "facts": dict(member.facts), "nonce": nonce})


def state(connection, member, process, change=lambda line: line):
    """Makes a statement to process 0, whose random number it returns."""
    word, nonce = connection.recv(MAX_LINE).decode().split()
    assert word == "jgt-join-2"
    text = statement(member, process)
    connection.sendall(change(f"{member.sign('member', nonce, text)} {text}\n").encode())
    return nonce


def test_a_statement_that_was_overheard_or_changed_is_worthless(run):
    first, heard = run(0), []
    with listening(run.port) as connection:
        state(connection, RUN, 1, lambda line: heard.append(line) or line)
        assert connection.recv(MAX_LINE).startswith(b"yes ")
    for change in (lambda line: heard[0], lambda line: line.replace('"process": 1', '"process": 2')):
        with listening(run.port) as connection:
            state(connection, RUN, 1, change)
            assert connection.recv(MAX_LINE).startswith(b"no its token")
    # Its own signature is not the answer of process 0.
    assert RUN.sign("member", "00") != RUN.sign("process 0", "00")
    for one in (first, run(1), run(2)):
        one.result(SECONDS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "null",
        "[" * 4000,
        '{"process": 1}',
        "\xff",
        "1" * 5000,
        statement(RUN, 1).replace("1", '"x"', 1),
        statement(RUN, 1).replace("{", "["),
    ],
)
def test_what_is_not_a_statement_ends_the_connection(run, text):
    first = run(0)
    with listening(run.port) as connection:
        nonce = connection.recv(MAX_LINE).decode().split()[1]
        connection.sendall(f"{RUN.sign('member', nonce, text)} {text}\n".encode())
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(MAX_LINE) == b""
    for one in (first, run(1), run(2)):
        one.result(SECONDS)


RUBBISH = [b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, b"[" * 4000 + b"\n", b"x" * 5000, b"{}\n", b"PRI * HTTP/2.0\r\n\r\n"]


def test_three_hundred_strangers_at_once_harm_nobody(run):
    first = run(0)
    with contextlib.ExitStack() as closing:
        strangers = [closing.enter_context(listening(run.port)) for _ in range(300)]
        for number, stranger in enumerate(strangers):
            with contextlib.suppress(OSError):
                stranger.setblocking(False)
                stranger.send(RUBBISH[number % len(RUBBISH)])
        for one in (first, run(1), run(2)):
            one.result(SECONDS)


def test_connections_are_short(run):
    first = run(0)
    with contextlib.ExitStack() as closing:
        strangers = [closing.enter_context(listening(run.port)) for _ in range(100)]

        def ended(stranger):
            stranger.settimeout(0)
            try:
                while data := stranger.recv(100):
                    assert data.startswith(b"jgt-join-2 ")
            except BlockingIOError:
                return False
            except OSError:
                return True
            return True

        # Also those that say a byte now and then.
        until(lambda: [slow(stranger) for stranger in strangers[20:]] and all(map(ended, strangers)))
    for one in (first, run(1), run(2)):
        one.result(SECONDS)


def slow(stranger):
    with contextlib.suppress(OSError):
        stranger.send(b"x")


# -- the time ----------------------------------------------------------------------------------------------------


def test_a_line_every_ten_seconds_and_an_end(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("train.processes.join.time.monotonic", lambda: now[0])
    monkeypatch.setattr(join, "_REPORT_SECONDS", 10.0)
    wait, lines = Wait(30), []
    for _ in range(100):
        if wait.must_report:
            lines.append(str(wait))
        if wait.left == 0:
            break
        now[0] += 1
    assert lines == ["10 of 30 s", "20 of 30 s", "30 of 30 s"]


@pytest.mark.parametrize(
    ("processes", "expected"),
    [([3], "process 3"), ([1, 2], "processes 1, 2"), (range(1, 1001), "processes " + ", ".join(map(str, range(1, 17))) + " and 984 more")],
)
def test_missing_processes_are_named(processes, expected):
    assert names(list(processes)) == expected


@pytest.mark.parametrize("address", ["a..b:8476", "10.0.0.1", "host:port"])
def test_what_is_no_address_is_wrong_input(address, monkeypatch):
    with pytest.raises(InputError, match=r"is not HOST:PORT, as in 10\.0\.0\.1:8476"):
        start_jax(Cluster(coordinator=address, num_processes=2, process=0), None)
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", address)
    with pytest.raises(InputError, match="is not HOST:PORT"):
        start_jax(Cluster(coordinator="localhost:8476", num_processes=2, process=0), None)
