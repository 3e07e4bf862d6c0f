"""The door: process 0 lets the other processes of its run in at the coordinator's port, before JAX's own service opens there.

JAX's service counts whoever connects. A second process 1 ends both members of a run, a port that is taken ends process 0 with a
segmentation fault, and a process that never comes lets the others wait without a word. So process 0 first listens at that port itself,
checks the badge of each process (`badge.py`), and says which ones are missing. When all are in, it closes the door, tells them to go, and
JAX opens its service at the same port: a cluster needs no second open port, and a process that comes later finds no door to enter.

Strangers may connect at any time and in any number. One thread serves all connections without ever waiting for one of them. A connection
has a few seconds and a few kilobytes to show its badge, and when too many are waiting, the oldest one goes. The invariant: only a
process with a right badge, whose number is not in yet, changes anything for the others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .badge import GREETING, MAX_LINE, Membership, badge_problem, is_signed, new_nonce, read_badge, welcome
from .waiting import JoinError, Patience, named

_BADGE_SECONDS = 5.0
_MAX_STRANGERS = 128
"""Connections that have not shown a right badge yet. With one more, the oldest one is closed."""
_BACKLOG = 512
_ALL = "::"
_MAX_TOLD = 20
"""Refused processes that stderr names; more are only counted."""
_TAKEN_SECONDS = 10.0
"""How long a taken port is tried again, because the process of an earlier start may just be ending."""
_SILENT_MILLISECONDS = 30_000
_NO_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(kw_only=True)
class _Guest:
    """A connection: where it comes from, what it has sent, and the number of its process once its badge was right."""

    connection: socket.socket
    address: str
    since: float
    nonce: str = field(default_factory=new_nonce)
    received: bytes = b""
    process: int | None = None


class Door:
    """Process 0's door at `address` (host, port). A context manager, which closes it. host: `::` stands for all addresses of the machine.

    say(text) prints a line for a person. Raises JoinError if another program holds the port.
    """

    def __init__(self, address: tuple[str, int], member: Membership, patience: Patience, say: Callable[[str], None]):
        self._member, self._patience, self._say = member, patience, say
        self._guests: dict[int, _Guest] = {}
        self._turned_away = self._told = 0
        self._refused: dict[int, str] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(address, patience)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for guest in list(self._guests.values()):
            self._close(guest)
        self._selector.close()

    @property
    def missing(self) -> list[int]:
        """The numbers of the processes that are not in."""
        inside = {guest.process for guest in self._guests.values()}
        return [process for process in range(1, self._member.count) if process not in inside]

    @property
    def refused(self) -> dict[int, str]:
        """By number: why a process of this run, whose number is still missing, was refused."""
        return {process: why for process, why in self._refused.items() if process in self.missing}

    def wait(self) -> None:
        """Lets processes in until all are there, and tells them to go. Raises JoinError when the time is over."""
        while self.missing:
            for key, _ in self._selector.select(timeout=0.25):
                if key.fileobj is self._listener:
                    self._accept()
                elif guest := self._guests.get(key.fd):
                    self._receive(guest)
            self._close_late()
            if self._patience.is_over:
                why = self._why_not()
                self._tell(f"over {why}")
                raise JoinError(why)
            if self._patience.is_time_to_speak:
                away = f"; {self._turned_away:,} other connections were turned away" if self._turned_away else ""
                self._say(f"waiting for {named(self.missing)}, {self._patience}{away}")
                self._tell(f"wait {named(self.missing)}")
        # First closed: whoever finds the port open after "go" has found JAX's service.
        self._selector.unregister(self._listener)
        self._listener.close()
        self._tell("go")

    def _why_not(self) -> str:
        missing, refused = self.missing, self.refused
        because = "".join(f"; process {process} was refused: {why}" for process, why in sorted(refused.items())[:_MAX_TOLD])
        return f"{named(missing)} did not come within {self._patience.seconds:.0f} s{because}"

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            # Without a free descriptor the next connection would be announced again and again.
            if error.errno in _NO_FILES:
                self._close_oldest()
            return
        connection.setblocking(False)
        with contextlib.suppress(OSError, AttributeError):
            # A machine that lost its power closes no connection. Without this its number stays taken for a quarter of an hour.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MILLISECONDS)
        guest = _Guest(connection=connection, address=str(address[0]), since=time.monotonic())
        self._guests[connection.fileno()] = guest
        self._selector.register(connection, selectors.EVENT_READ)
        self._send(guest, f"{GREETING} {guest.nonce}")
        if sum(1 for _ in self._strangers()) > _MAX_STRANGERS:
            self._close_oldest()

    def _receive(self, guest: _Guest) -> None:
        try:
            received = guest.connection.recv(MAX_LINE)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        # A member has nothing more to say, so its bytes are dropped.
        if received and guest.process is not None:
            return
        guest.received += received
        line, end, _ = guest.received.partition(b"\n")
        if end:
            self._admit(guest, line)
        elif not received or len(guest.received) > MAX_LINE:
            self._turn_away(guest)

    def _admit(self, guest: _Guest, line: bytes) -> None:
        badge = read_badge(line)
        if badge is None:
            self._turn_away(guest)
            return
        problem = badge_problem(badge, self._member, guest.nonce)
        inside = next((other for other in self._guests.values() if other.process == badge.process), None)
        if problem is None and inside is not None:
            problem = f"process {badge.process} has already joined, from {inside.address}. Give each process a number of its own"
        if problem is None:
            guest.process, guest.received = badge.process, b""
            self._send(guest, f"yes {welcome(self._member, badge.nonce, guest.nonce)}")
            return
        # A stranger, and a number that was given twice, say nothing about the process that is missing.
        if inside is None and badge.run == self._member.run and is_signed(badge, self._member, guest.nonce):
            self._refused[badge.process] = problem
        self._note_refusal(guest, problem)
        self._send(guest, f"no {problem}")
        self._close(guest)

    def _note_refusal(self, guest: _Guest, problem: str) -> None:
        self._told += 1
        if self._told <= _MAX_TOLD:
            more = "" if self._told < _MAX_TOLD else ". Further ones are not shown"
            self._say(f"refused a process that wanted to join from {guest.address}: {problem}{more}")

    def _turn_away(self, guest: _Guest) -> None:
        # A member whose connection ends is missing again, and may come again.
        self._turned_away += guest.process is None
        self._close(guest)

    def _close_late(self) -> None:
        now = time.monotonic()
        for guest in [guest for guest in self._strangers() if now - guest.since > _BADGE_SECONDS]:
            self._turn_away(guest)

    def _close_oldest(self) -> None:
        # Dictionaries keep the order of insertion.
        if oldest := next(self._strangers(), None):
            self._turn_away(oldest)
        else:
            time.sleep(0.1)

    def _strangers(self) -> Iterator[_Guest]:
        return (guest for guest in self._guests.values() if guest.process is None)

    def _tell(self, line: str) -> None:
        for guest in [guest for guest in self._guests.values() if guest.process is not None]:
            self._send(guest, line)

    def _send(self, guest: _Guest, line: str) -> None:
        # Never waits. The few short lines fit into the buffer of any connection that somebody reads.
        with contextlib.suppress(OSError):
            guest.connection.send(line.encode(errors="backslashreplace")[: MAX_LINE - 1] + b"\n")

    def _close(self, guest: _Guest) -> None:
        del self._guests[guest.connection.fileno()]
        self._selector.unregister(guest.connection)
        guest.connection.close()


def _listen(address: tuple[str, int], patience: Patience) -> socket.socket:
    host, port = address
    until = min(time.monotonic() + _TAKEN_SECONDS, patience.deadline)
    while True:
        try:
            return _bind(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                where = f"port {port} of {'this machine' if host == _ALL else host}"
                remedy = "Name a free port in --coordinator, or end the program that holds it"
                raise JoinError(f"process 0 cannot listen at {where}: {os.strerror(error.errno or 0)}. {remedy}") from None
        time.sleep(0.25)


def _bind(host: str, port: int) -> socket.socket:
    if host == _ALL:
        # Connections by IPv4 reach the address of IPv6 too. Some containers have only IPv4.
        if socket.has_dualstack_ipv6():
            return socket.create_server((host, port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        host = ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)
