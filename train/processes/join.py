"""How a process joins the others of its run, from its own side: it knocks at process 0's door until it is let in and told to go.

A process comes earlier or later than process 0, whose machine may still be starting and whose name may not be known yet. So each problem
on the way (an unknown host, a closed port, a silent one) is a reason to try again, and becomes the message only when the time is over.
Three answers are final, because trying again would change nothing: the door refuses this process, whoever listens does not know the run's
token, or the port belongs to something that is not a door at all. The last one is what a second process 1 finds when the run has begun.
"""

from __future__ import annotations

import socket
import time
from contextlib import closing
from dataclasses import dataclass

from jgt.document import InputError

from .badge import GREETING, MAX_LINE, Membership, is_welcome, new_nonce, write_badge
from .door import Door
from .waiting import JoinError, Patience, say

_KNOCK_SECONDS = 0.1
_LONGEST_KNOCK_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_SILENT_SECONDS = 30.0
"""A door says something every ten seconds. After this long without a word it is gone."""
_STRANGE_SECONDS = 10.0
"""How long something that is not a door is tried again, because it may be an earlier start that is ending."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the processes of a run meet: `host` and `port` to connect to, and the address at which process 0 listens (`::` for all)."""

    host: str
    port: int
    listen: str = "::"


class _StrangeError(Exception):
    """Whoever listens does not speak like a door."""


def join(place: Place, process: int, member: Membership, patience: Patience) -> None:
    """Returns when all processes of the run have joined, on each of them, and JAX may connect them.

    Raises InputError if this process is refused, or its number was given twice, and JoinError if the processes do not find each other in
    time.
    """
    if process == 0:
        _open(place, member, patience)
        return
    _knock(place, process, member, patience)
    _until_open(place, patience)


def _open(place: Place, member: Membership, patience: Patience) -> None:
    with Door((place.listen, place.port), member, patience, say) as door:
        try:
            door.wait()
        except JoinError as error:
            # A process of this run came and was refused, for a reason that another try would find again.
            if door.refused:
                raise InputError([f"process 0: {error}"]) from None
            raise


def _knock(place: Place, process: int, member: Membership, patience: Patience) -> None:
    where = f"{place.host}:{place.port}"
    pause, strange_since = _KNOCK_SECONDS, None
    while True:
        try:
            with closing(_connect(place, patience.left)) as connection:
                _Visit(connection, where, process, member, patience).wait()
            return
        except _StrangeError as error:
            why, strange_since = str(error), strange_since or time.monotonic()
            if time.monotonic() - strange_since > _STRANGE_SECONDS:
                raise InputError([f"process {process}: {where}: {why}"]) from None
        except OSError as error:
            why, strange_since = f"process 0 cannot be reached at {where}: {error.strerror or error}", None
        if patience.is_over:
            raise JoinError(f"process {process} has not found the others within {patience.seconds:.0f} s: {why}")
        if patience.is_time_to_speak:
            say(f"process {process} is waiting for process 0, {patience}: {why}")
        time.sleep(min(pause, patience.left))
        pause = min(2 * pause, _LONGEST_KNOCK_SECONDS)


class _Visit:
    """One connection to what may be a door."""

    def __init__(self, connection: socket.socket, where: str, process: int, member: Membership, patience: Patience):
        self._connection, self._where, self._process = connection, where, process
        self._member, self._patience = member, patience
        self._received = b""

    def wait(self) -> None:
        """Shows the badge and returns when the door says go. Raises InputError if it refuses, OSError if it is gone."""
        word, port_nonce = self._line(_ANSWER_SECONDS)
        if word != GREETING:
            raise _StrangeError("something else listens there, or the run has already begun with all its processes")
        nonce = new_nonce()
        self._connection.sendall(write_badge(self._member, self._process, nonce, port_nonce).encode() + b"\n")
        word, text = self._line(_ANSWER_SECONDS)
        if word == "no":
            raise InputError([f"process {self._process}: process 0 at {self._where} refused it: {text}"])
        if word != "yes" or not is_welcome(text, self._member, nonce, port_nonce):
            raise _StrangeError("the process that listens there does not know this run's token")
        while word != "go":
            word, text = self._line(_SILENT_SECONDS)
            if word == "over":
                raise JoinError(f"process {self._process} stops, because {text}")
            if word == "wait" and self._patience.is_time_to_speak:
                say(f"process {self._process} has joined and is waiting for {text}, {self._patience}")

    def _line(self, seconds: float) -> tuple[str, str]:
        """The next line's first word, and the rest of the line. Raises OSError if there is none in time, or none in this process's time."""
        deadline = time.monotonic() + min(seconds, self._patience.left)
        while b"\n" not in self._received and len(self._received) <= MAX_LINE:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            received = self._connection.recv(MAX_LINE)
            if not received:
                # HTTP/2, which JAX's service speaks, has no lines: it is strange whatever it sends.
                if self._received:
                    raise _StrangeError("something else listens there")
                raise OSError("the connection was closed")
            self._received += received
            if not self._received[:1].isascii() or not self._received[:1].isalpha():
                raise _StrangeError("something else listens there, or the run has already begun with all its processes")
        line, _, self._received = self._received.partition(b"\n")
        word, _, text = line.decode("ascii", "replace").partition(" ")
        return word, "".join(character if character.isprintable() else "?" for character in text)


def _until_open(place: Place, patience: Patience) -> None:
    """Waits until JAX's service accepts connections. Its client would try again only after a second."""
    while not patience.is_over:
        try:
            _connect(place, patience.left).close()
            return
        except OSError:
            time.sleep(_KNOCK_SECONDS / 2)
    raise JoinError(f"all processes have joined, but JAX's service has not begun at {place.host}:{place.port}")


def _connect(place: Place, seconds: float) -> socket.socket:
    return socket.create_connection((place.host, place.port), timeout=max(0.001, min(_ANSWER_SECONDS, seconds)))
