"""The engine: one thread owns the model and its batch, and answers the requests of all clients together.

Clients hand in tickets from other threads. Between two tokens of the batch, tickets that wait take free rows, and tickets of clients that
have left give theirs back. Those join together whose texts are about as long, as many as one reading of texts can take: so a burst of new
requests is read at once, and delays those that are being answered by no more than that reading.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...generate.batch import TextRequest
from ...generate.writer import TextPiece, TextWriter
from ...settings.sampling import Sampling


class FullError(Exception):
    """As many requests wait as may wait."""


class StoppedError(Exception):
    """The server is ending."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ticket:
    """A request of a client. deliver: takes each piece of its answer, or StoppedError, in the engine's thread; it must not wait."""

    request: TextRequest
    deliver: Callable[[TextPiece | StoppedError], None]


class Engine:
    """A writer in a thread of its own. most_waiting: the number of tickets that may wait for a row.

    error: the failure of the model that ended the thread.
    """

    def __init__(self, writer: TextWriter, *, most_waiting: int):
        self.most_waiting = most_waiting
        self.error: Exception | None = None
        self._writer = writer
        self._thread = threading.Thread(target=self._run, name="engine")
        # All below change under this lock. A signal's handler may hold it twice.
        self._changed = threading.Condition()
        self._waiting, self._left = deque[Ticket](), list[Ticket]()
        self._answered: dict[TextRequest, Ticket] = {}
        self._is_stopped = False
        self._busy_since: float | None = None

    @property
    def busy_s(self) -> float:
        """The seconds since it began the token that it writes now; 0 between two."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def num_open(self) -> int:
        """The number of tickets that wait or are being answered."""
        with self._changed:
            return len(self._waiting) + len(self._answered)

    def start(self) -> None:
        """Compiles the programs of a short request, and starts the thread."""
        self._writer.write([TextRequest(tokens=[0], limit=3, sampling=Sampling())])
        while self._writer.batch.is_busy:
            self._writer.write()
        self._thread.start()

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Lets tickets wait for rows, all or none. Raises FullError or StoppedError."""
        with self._changed:
            if self._is_stopped:
                raise StoppedError
            if len(self._waiting) + len(tickets) > self.most_waiting:
                raise FullError
            self._waiting += tickets
            self._changed.notify()

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Ends tickets that have not ended. Their rows are free at the next token."""
        with self._changed:
            for ticket in tickets:
                if ticket.request in self._answered:
                    self._left.append(ticket)
                elif ticket in self._waiting:
                    self._waiting.remove(ticket)
            self._changed.notify()

    def stop(self) -> None:
        """Ends all tickets and, soon, the thread. A handler of a signal may call it."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def join(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while (joining := self._next()) is not None:
                self._busy_since = time.monotonic()
                pieces = self._writer.write([ticket.request for ticket in joining])
                self._busy_since = None
                for piece in pieces:
                    self._deliver(piece)
        except Exception as error:
            self.error = error
        finally:
            with self._changed:
                self._is_stopped = True
                ended = [*self._answered.values(), *self._waiting]
                self._answered.clear()
                self._waiting.clear()
            for ticket in ended:
                ticket.deliver(StoppedError())

    def _next(self) -> list[Ticket] | None:
        """The tickets that join before the next token, once there is anything to write; None at the end."""
        with self._changed:
            while not (self._is_stopped or self._waiting or self._left or self._writer.batch.is_busy):
                self._changed.wait()
            if self._is_stopped:
                return None
            for ticket in self._left:
                self._writer.release(ticket.request)
                self._answered.pop(ticket.request, None)
            self._left.clear()
            requests = self._writer.batch.joining([ticket.request for ticket in self._waiting])
            joining = [ticket for ticket in self._waiting if ticket.request in requests]
            self._waiting = deque(ticket for ticket in self._waiting if ticket not in joining)
            self._answered |= {ticket.request: ticket for ticket in joining}
            return joining

    def _deliver(self, piece: TextPiece) -> None:
        request = piece.token.request
        with self._changed:
            ticket = self._answered.pop(request) if piece.reason else self._answered[request]
        ticket.deliver(piece)
