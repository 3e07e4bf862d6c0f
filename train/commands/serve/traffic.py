"""The requests that the server has answered: a line for each request, and numbers for Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jgt.document import shown

from ...files.streams import say
from ...journal.openmetrics import Distribution, MetricFamily, MetricSample

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]
_PROBES = ("/health", "/metrics")
"""Paths that are asked again and again, and have no line."""


@dataclass(kw_only=True)
class Answered:
    """The tokens of one request so far. begun: when it came, by time.monotonic(). first_s: the seconds until its first token."""

    begun: float
    prompt: int = 0
    tokens: int = 0
    first_s: float | None = None

    def add(self) -> None:
        """Counts a token."""
        self.tokens += 1
        self.first_s = self.first_s or time.monotonic() - self.begun


@dataclass(kw_only=True)
class Traffic:
    """The requests so far. log: gets a line for each."""

    log: Callable[[str], object] = lambda line: say(line, who="jgt serve")
    _counts: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    _tokens: Counter[str] = field(default_factory=Counter[str])
    _seconds: Distribution = field(default_factory=Distribution)
    _first: Distribution = field(default_factory=Distribution)

    def around(self, app: AsgiApp) -> AsgiApp:
        """The application, whose requests are counted. `scope["answered"]` takes the tokens of one."""

        async def counted(scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
            status, answered = 0, Answered(begun=time.monotonic())

            async def noting(message: Any) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                await app({**scope, "answered": answered}, receive, noting)
            finally:
                self._end(scope, status or 499, answered)

        return counted

    def _end(self, scope: Any, status: int, answered: Answered) -> None:
        path, seconds = scope.get("path", ""), time.monotonic() - answered.begun
        # A path that nobody serves would be a label of its own for each request.
        self.asked("other" if status == 404 else path, status, seconds, answered.first_s, prompt=answered.prompt, tokens=answered.tokens)
        if path not in _PROBES:
            tokens = f", {answered.prompt} + {answered.tokens} tokens, the first after {answered.first_s:.2f} s" if answered.first_s else ""
            client = (scope.get("client") or ("-",))[0]
            # 499 is nginx's code for a client that has left.
            self.log(f"{client} {scope.get('method')} {shown(path, quotes=False)} {status} {seconds:.2f} s{tokens}")

    def asked(self, path: str, status: int, seconds: float, first_s: float | None, *, prompt: int, tokens: int) -> None:
        """Counts a request, with the seconds until its end and until its first token."""
        self._counts[path, status] += 1
        self._tokens.update(prompt=prompt, completion=tokens)
        if first_s is not None:
            self._seconds.add(seconds)
            self._first.add(first_s)

    def families(self, num_open: int, model: str) -> Iterator[MetricFamily]:
        """The numbers for Prometheus. num_open: the answers that wait or are being written."""
        requests = tuple(MetricSample(n, {"path": path, "code": str(code)}, "_total") for (path, code), n in self._counts.items())
        yield MetricFamily(name="jgt_requests", kind="counter", text="requests, by path and HTTP status", samples=requests)
        tokens = tuple(MetricSample(n, {"kind": kind, "model": model}, "_total") for kind, n in self._tokens.items())
        yield MetricFamily(name="jgt_served_tokens", kind="counter", text="tokens of prompts and of answers", samples=tokens)
        yield MetricFamily(name="jgt_requests_open", text="answers that wait or are being written", samples=(MetricSample(num_open),))
        for name, text, seconds in (
            ("jgt_answer_seconds", "seconds until the end of an answer", self._seconds),
            ("jgt_first_token_seconds", "seconds until its first token", self._first),
        ):
            yield MetricFamily(name=name, kind="histogram", text=text, samples=tuple(seconds.samples()))
