"""A port at which Prometheus reads the metrics of runs. One thread answers, one request at a time: a scraper is one client."""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from jgt.document import InputError

from ...journal.openmetrics import CONTENT_TYPE, MetricFamily, as_text
from ..top.view import Watched
from .families import of_processes, of_run

PATH = "/metrics"
_REQUEST_SECONDS = 5.0


class RunSource:
    """The metrics of a run directory, which may not exist yet. process: the one whose metrics are shown; None for all.

    The first process has those of the whole run too, and the others only their own, so that together they say everything once.
    """

    def __init__(self, folder: Path, process: int | None = None):
        self._folder, self._process = folder, process
        self._watched: Watched | None = None

    def families(self) -> Iterator[MetricFamily]:
        """Its metrics at this moment; none before the run has begun."""
        with contextlib.suppress(InputError):
            self._watched = self._watched or Watched(self._folder)
        if self._watched is not None:
            view = self._watched.read()
            if not self._process:
                yield from of_run(view)
            yield from of_processes(view, [m for m in view.members if self._process in (None, m.process)])


class _Server(socketserver.TCPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing is printed about a client that leaves."""


def text_of(sources: Sequence[RunSource]) -> str:
    """The metrics of several runs as one text, each family once."""
    merged: dict[str, MetricFamily] = {}
    for family in (family for source in sources for family in source.families()):
        before = merged.get(family.name)
        samples = (*(before.samples if before else ()), *family.samples)
        merged[family.name] = MetricFamily(name=family.name, text=family.text, kind=family.kind, samples=samples)
    return as_text(merged.values())


@contextlib.contextmanager
def served(host: str, port: int, text: Callable[[], str], key: str) -> Iterator[int]:
    """Answers at a port while the block runs, and gives its number. key: what chose it, for messages. Raises InputError if it is taken."""
    try:
        opened = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        # Python's own words repeat the address.
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno and error.errno > 0 else error
        raise InputError([f"{key}: cannot listen at {host}:{port}: {why}. Choose another port, or end what listens there"]) from None

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_SECONDS

        def do_GET(self) -> None:
            is_known = self.path.partition("?")[0] == PATH
            body = text().encode() if is_known else f"The metrics are at {PATH}\n".encode()
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", CONTENT_TYPE if is_known else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    # http.server's own class would ask a name server for this host's name.
    server = _Server(opened.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = opened
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield opened.getsockname()[1]
    finally:
        server.shutdown()
        server.server_close()
