"""The lease on a run in a bucket: one writer at a time, although a store has no locks and no one sees a writer die.

The lease is an object that its holder replaces every third of its time, always on the condition that it still has the version that the
holder wrote last. Another process may take it when that version has not changed for the whole time, the holder's or its own if that is
longer, by its own clock: no clocks of two machines are compared. A holder that was frozen for so long finds another version at its next
try, and stops. Until then it does not know, so after 0.8 of the time without an answer it does not count as the holder any more, and
finishes nothing.

Whoever holds the lock on the local folder from which a lease was taken knows that its holder is gone, and takes it at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping

from .bucket import ABSENT, Bucket, ChangedError
from .ends import InUseError
from .json_text import read_object

_NAME = "lease.json"
_CERTAIN = 0.8
_POLL_SECONDS, _SOON_SECONDS = 1.0, 0.5
_MOST_SECONDS = 1e6


class Lease:
    """A lease that this process holds. seconds: its time. It fills the role of `train.run.directory.folder.Lock`."""

    def __init__(self, bucket: Bucket, seconds: float, spool: str):
        self._bucket, self._seconds = bucket, seconds
        self.start = secrets.token_hex(8)
        self._values = {"start": self.start, "spool": spool, "host": socket.gethostname(), "pid": os.getpid(), "seconds": seconds}
        self._version, self._count, self._answered = ABSENT, 0, _now()
        self._is_lost = self._is_gone = self._closed = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def is_held(self) -> bool:
        """Whether the bucket certainly belongs to this run. Waits for an answer of the store for as long as a lease lasts."""
        end = _now() + self._seconds
        with self._news:
            while not self.is_certain() and not self._is_lost and not self._closed and _now() < end:
                self._news.wait(_POLL_SECONDS)
        return self.is_certain()

    def is_certain(self) -> bool:
        """As `is_held`, at this moment."""
        return not self._is_lost and _now() - self._answered < _CERTAIN * self._seconds

    def check(self) -> None:
        """Raises InUseError if another run has the lease."""
        if self._is_lost:
            who = "somebody has removed" if self._is_gone else "another run has taken"
            raise InUseError(f"{who} the lease of {self._bucket.url()}. This one stops, and writes nothing more there")

    def take(self) -> None:
        """Waits for the lease while its version does not change. Raises InUseError if another run holds it, and OSError."""
        seen, since = None, _now()
        while True:
            with contextlib.suppress(ChangedError):
                return self._write(ABSENT)
            try:
                found = self._bucket.read(_NAME)
            except FileNotFoundError:
                continue
            if seen is None:
                seen, since = found.version, _now()
            holder = _holder(found.content)
            if found.version != seen:
                who = f"process {holder.get('pid')} on {holder.get('host')}"
                remedy = "Wait until it ends, or give this one another URL (run.dir=...)"
                raise InUseError(f"another run ({who}) is using {self._bucket.url()}. {remedy}")
            if holder.get("spool") == self._values["spool"] or _now() - since > max(self._seconds, _seconds_of(holder)):
                with contextlib.suppress(ChangedError):
                    return self._write(found.version)
            time.sleep(min(_POLL_SECONDS, self._seconds / 10))

    def keep(self) -> None:
        """Renews the lease until `release`, in a thread."""
        self._thread.start()

    def release(self) -> None:
        """Gives the lease back, if it is still this run's."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        # Python must not end while a thread waits in native code.
        self._thread.join()
        if self.is_certain():
            with contextlib.suppress(ChangedError, OSError):
                self._bucket.write(_NAME, None, self._version)

    def _renew(self) -> None:
        while True:
            # An answer that took long leaves less time for the next one.
            with self._news:
                self._news.wait_for(lambda: self._closed, max(_SOON_SECONDS, self._answered + self._seconds / 3 - _now()))
                if self._closed:
                    return
            self._renew_once()
            with self._news:
                self._news.notify_all()
            if self._is_lost:
                return

    def _renew_once(self) -> None:
        # Otherwise the store may answer again before anyone else takes the lease.
        with contextlib.suppress(OSError):
            try:
                self._write(self._version)
            except ChangedError:
                self._is_lost = not self._is_own()

    def _is_own(self) -> bool:
        """Whether the lease is this run's all the same: an earlier renewal failed, but the store has done it."""
        try:
            found = self._bucket.read(_NAME)
        except FileNotFoundError:
            self._is_gone = True
            return False
        except OSError:
            # Nothing is known; the next renewal asks again.
            return True
        if _holder(found.content).get("start") == self.start:
            self._version = found.version
            return True
        return False

    def _write(self, version: bytes) -> None:
        # Before the request: the store may have done it at any moment from now on.
        begun, self._count = _now(), self._count + 1
        content = json.dumps({**self._values, "count": self._count}).encode()
        self._version = self._bucket.write(_NAME, content, version)
        self._answered = begun


@contextlib.contextmanager
def hold_lease(bucket: Bucket, seconds: float, spool: str) -> Iterator[Lease]:
    """Holds the lease of a bucket while inside. spool: the identity of the locked local folder. Raises InUseError and OSError."""
    lease = Lease(bucket, seconds, spool)
    lease.take()
    lease.keep()
    try:
        yield lease
    finally:
        lease.release()


def holder_of(bucket: Bucket) -> object:
    """The word of the start that has the lease; None if there is none. Raises OSError."""
    try:
        return _holder(bucket.read(_NAME).content).get("start")
    except FileNotFoundError:
        return None


def _holder(content: bytes) -> dict[str, object]:
    return read_object(content) or {}


def _seconds_of(holder: Mapping[str, object]) -> float:
    """The time of another run's lease, by which that run renews it."""
    seconds = holder.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) and 0 < seconds <= _MOST_SECONDS else 0.0


def _now() -> float:
    # Time in which the machine sleeps counts too.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
