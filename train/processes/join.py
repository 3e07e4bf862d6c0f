"""Joining a run: the processes find each other before JAX connects them.

JAX's coordination service counts whoever connects. A second process 1 ends both members of a run, a port that is taken ends process 0 with
a segmentation fault, and a process that never comes lets the others wait without a word. So the processes first meet without JAX. Process 0
listens at the coordinator's port. Each other process states its number and the facts that all must have in common; a wrong statement is
refused with the reason. When all have joined, process 0 closes the port and says `start`, and JAX opens its service there.

Both sides sign with the run's token: an HMAC over a random number of the other side, so that nothing that was overheard can be used again,
and over the side's name, so that neither can be made to sign the other's answer. Without a token this keeps mistakes out, but no attacker.
A connection has five seconds and one line; only a right statement with a number that has not joined changes anything for the others.

A process may come before process 0, whose machine may still be starting. So an unknown host, a closed port and a silent one are tried again
until the time is over. Two answers are final: a refusal, and ten seconds of another protocol or of a listener without the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from io import BufferedRWPair
from typing import Any

from jgt import __version__
from jgt.document import InputError, shown

from ..files.ends import EndError, Exit
from ..files.streams import say

_GREETING = "jgt-join-2"
_MAX_LINE, _MAX_NAMED, _BACKLOG = 4_096, 16, 512
_STATEMENT_SECONDS = 5.0
_RETRY_SECONDS = 0.25
_TAKEN_SECONDS = 10.0
"""How long to try again where another program listens. It may be an earlier start that is ending."""
_REPORT_SECONDS, _SILENT_SECONDS = 10.0, 30.0
"""Process 0 says every ten seconds who is missing. After 30 seconds without a word it is gone."""


class JoinError(EndError):
    """The processes of the run have not found each other; the message says which one is missing, or what is in the way."""

    code = Exit.UNJOINED


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the processes of a run meet: `host` and `port` to connect to, and the address at which process 0 listens (`::` for all)."""

    host: str
    port: int
    listen: str = "::"


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A process's proof that it belongs to a run, and the seconds that the processes wait for each other.

    facts: plain values by name that all its processes have in common, such as a checksum of the config. token: its secret.
    """

    facts: Mapping[str, str | int] = field(default_factory=dict[str, str | int])
    token: bytes = b""
    seconds: float = 300.0

    def sign(self, *parts: str) -> str:
        """The HMAC of the parts, which only a process with the token can compute."""
        return hmac.new(self.token, "\0".join(parts).encode(), "sha256").hexdigest()


def facts_of(run: str, config: Any) -> dict[str, str | int]:
    """The facts of a process of the run with this name and this config (plain values)."""
    checksum = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
    return {"run.name": run, "code": f"jgt {__version__} with jax {metadata.version('jax')}", "config (checksum)": checksum[:16]}


class Wait:
    """A wait that begins now, with a report every ten seconds. As text: `10 of 30 s`."""

    def __init__(self, seconds: float):
        self.seconds, self._begun, self._reports = seconds, time.monotonic(), 0

    def __str__(self) -> str:
        return f"{time.monotonic() - self._begun:.0f} of {self.seconds:.0f} s"

    @property
    def left(self) -> float:
        """The seconds that are left; 0 if the wait is over."""
        return max(0.0, self._begun + self.seconds - time.monotonic())

    @property
    def must_report(self) -> bool:
        """Whether ten seconds have passed since this was last true, or since the wait began."""
        before, self._reports = self._reports, int((time.monotonic() - self._begun) / _REPORT_SECONDS)
        return self._reports > before


def names(processes: Sequence[int]) -> str:
    """`process 1`, `processes 1, 2`, or the first of them and the number of the others."""
    more = f" and {len(processes) - _MAX_NAMED:,} more" if len(processes) > _MAX_NAMED else ""
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes[:_MAX_NAMED]))}{more}"


def join(place: Address, process: int, count: int, member: Membership) -> None:
    """Returns when all `count` processes of the run have joined, on each of them, and JAX may connect them.

    Raises InputError if this process or, on process 0, a missing one was refused, and JoinError if the processes do not find each other.
    """
    if process == 0:
        asyncio.run(_Gathering(count, member).complete(place))
    else:
        _join_others(place, process, member)


class _Gathering:
    """Process 0's side: the connections of the processes that have joined, and why others of this run were refused."""

    def __init__(self, count: int, member: Membership):
        self._count, self._member, self._wait = count, member, Wait(member.seconds)
        self._joined: dict[int, asyncio.StreamWriter] = {}
        self._refused: dict[int, str] = {}

    async def complete(self, place: Address) -> None:
        """Lets processes join until all have, and says `start` to them."""
        # asyncio would print a traceback for each connection that is still open at the end, and for each that a stranger breaks.
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        # Closed before `start`: whoever finds the port open after it has found JAX's service.
        with contextlib.closing(await self._listen(place)):
            while missing := [process for process in range(1, self._count) if process not in self._joined]:
                if self._wait.left == 0:
                    raise self._failure(missing)
                if self._wait.must_report:
                    say(line := f"waiting for {names(missing)}, {self._wait}")
                    self._tell(line)
                await asyncio.sleep(0.02)
        self._tell("start")

    async def _listen(self, place: Address) -> asyncio.Server:
        host, taken = None if place.listen == "::" else place.listen, Wait(min(_TAKEN_SECONDS, self._wait.left))
        while True:
            try:
                return await asyncio.start_server(self._serve, host, place.port, limit=_MAX_LINE, backlog=_BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or taken.left == 0:
                    where = f"process 0 cannot listen at port {place.port} of {host or 'this machine'}: {os.strerror(error.errno or 0)}"
                    raise JoinError(f"{where}. Name a free port in --coordinator, or end the program that holds it") from None
            await asyncio.sleep(_RETRY_SECONDS)

    def _failure(self, missing: list[int]) -> InputError | JoinError:
        refused = [f"; process {process} was refused: {self._refused[process]}" for process in missing if process in self._refused]
        why = f"{names(missing)} did not come within {self._wait.seconds:.0f} s{''.join(refused[:_MAX_NAMED])}"
        self._tell(f"over {why}")
        # A process of this run that was refused would be refused again.
        return InputError([f"process 0: {why}"]) if refused else JoinError(why)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Whatever a stranger sends, or does not send, its connection is closed.
        with contextlib.closing(writer), contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            async with asyncio.timeout(_STATEMENT_SECONDS):
                process = await self._admit(reader, writer)
            if process is None:
                return
            self._joined[process] = writer
            try:
                # It has nothing more to say. When its connection ends, the process is missing again, and may come again.
                while await reader.read(_MAX_LINE):
                    pass
            finally:
                del self._joined[process]

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        """The number of the process at this connection; None if it is refused. An error of any kind if it makes no statement."""
        nonce, address = secrets.token_hex(16), writer.get_extra_info("peername")[0]
        _send(writer, f"{_GREETING} {nonce}")
        signature, _, text = (await reader.readline()).decode("ascii").strip().partition(" ")
        statement = json.loads(text)
        process, facts = int(statement["process"]), dict[str, object](statement["facts"])
        is_signed = hmac.compare_digest(signature, self._member.sign("member", nonce, text))
        problem = self._problem(process, facts) if is_signed else "its token is not the run's. Give all processes the same JGT_TOKEN"
        if problem is None and process in self._joined:
            first = self._joined[process].get_extra_info("peername")[0]
            problem = f"process {process} has already joined, from {first}. Give each process a number of its own"
        elif problem is None:
            _send(writer, f"yes {self._member.sign('process 0', str(statement['nonce']))}")
            return process
        # A stranger, and a number that was given twice, say nothing about the process that is missing.
        elif is_signed:
            self._refused[process] = problem
        say(f"refused a process that wanted to join from {address}: {problem}")
        _send(writer, f"no {problem}")
        return None

    def _problem(self, process: int, facts: Mapping[str, object]) -> str | None:
        ours = self._member.facts
        wrong = [f"{name} {shown(facts.get(name))}, not {shown(fact)}" for name, fact in ours.items() if facts.get(name) != fact]
        if wrong:
            return f"it has {', '.join(wrong)}. Give all processes of a run the same, and each run a coordinator port of its own"
        if not 0 < process < self._count:
            return f"its number is {process:,}. The numbers to join are 1 to {self._count - 1:,}; process 0 is the one that listens"
        return None

    def _tell(self, line: str) -> None:
        for writer in self._joined.values():
            _send(writer, line)


def _send(writer: asyncio.StreamWriter, line: str) -> None:
    # Without waiting: the few short lines fit into the buffer of any connection.
    writer.write(line.encode("ascii", "backslashreplace")[: _MAX_LINE - 1] + b"\n")


class _StrangerError(Exception):
    """Whoever listens is not process 0 of this run."""


def _join_others(place: Address, process: int, member: Membership) -> None:
    where, wait, strange = f"{place.host}:{place.port}", Wait(member.seconds), None
    while True:
        try:
            with socket.create_connection((place.host, place.port), max(0.001, min(_STATEMENT_SECONDS, wait.left))) as connection:
                connection.settimeout(max(0.001, min(_SILENT_SECONDS, wait.left)))
                with connection.makefile("rwb") as lines:
                    return _take_part(lines, process, member, where)
        except _StrangerError as error:
            why, strange = str(error), strange or Wait(_TAKEN_SECONDS)
            if strange.left == 0:
                raise InputError([f"process {process}: {where}: {why}"]) from None
        except OSError as error:
            why, strange = f"process 0 cannot be reached at {where}: {error.strerror or error}", None
        if wait.left == 0:
            raise JoinError(f"process {process} has not found the others within {wait.seconds:.0f} s: {why}")
        if wait.must_report:
            say(f"process {process} is waiting for process 0, {wait}: {why}")
        time.sleep(min(_RETRY_SECONDS, wait.left))


def _take_part(lines: BufferedRWPair, process: int, member: Membership, where: str) -> None:
    """Makes this process's statement, and returns when process 0 says `start`. Raises OSError if it is gone or silent."""
    # JAX's service, which opens at this port when the run has begun, speaks HTTP/2, which has no lines. One byte shows it.
    if (start := lines.peek(1)) and not start.startswith(_GREETING[:1].encode()):
        raise _StrangerError("something else listens there, or the run has already begun with all its processes")
    _, port_nonce = _read(lines)
    nonce = secrets.token_hex(16)
    text = json.dumps({"process": process, "facts": dict(member.facts), "nonce": nonce})
    lines.write(f"{member.sign('member', port_nonce, text)} {text}\n".encode())
    lines.flush()
    word, text = _read(lines)
    if word == "no":
        raise InputError([f"process {process}: process 0 at {where} refused it: {text}"])
    if not hmac.compare_digest(text, member.sign("process 0", nonce)):
        raise _StrangerError("the process that listens there does not know this run's token")
    while (said := _read(lines))[0] != "start":
        if said[0] == "over":
            raise JoinError(f"process {process} stops, because {said[1]}")
        say(f"process {process} has joined and is {' '.join(said)}")


def _read(lines: BufferedRWPair) -> tuple[str, str]:
    line = lines.readline(_MAX_LINE).decode("ascii", "backslashreplace")
    if not line:
        raise OSError("the connection was closed")
    word, _, text = line.rstrip("\n").partition(" ")
    return word, shown(text, len(text), quotes=False)
