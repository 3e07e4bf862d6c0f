"""The HTTP server: uvicorn on a socket that is opened before the model is loaded.

uvicorn itself closes connections that are idle after an answer. Clients that connect and send nothing, or a request a byte at a time, or do
not read their answer, would stay for ever, so these are closed here.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from jgt.document import InputError

from ...files.streams import say
from .engine import Engine

_STALLED_SECONDS = 20.0
_COMPILING_SECONDS = 2.0
"""A token that takes so long compiles a program."""
_MOST_CONNECTIONS = 512
_BYTES_A_TURN = 8_192


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; clients wait until it is served. port: 0: any that is free. Raises InputError."""
    try:
        made = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        # A body in tiny chunks takes long to read, so the others have their turn after this many bytes of it.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BYTES_A_TURN)
        return made
    except OSError as error:
        raise InputError([f"command line: cannot listen: {error.strerror or error}. Choose another --host or --port"]) from None


class Server(uvicorn.Server):  # pyright: ignore[reportUntypedBaseClass]
    """The server of an application, which ends with its engine and at SIGINT and SIGTERM. ready: called when it answers."""

    def __init__(self, app: Any, engine: Engine, ready: Callable[[], None]):
        super().__init__(
            uvicorn.Config(
                app,
                log_level="error",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                limit_concurrency=_MOST_CONNECTIONS,
                timeout_graceful_shutdown=5,
            )
        )
        self._engine, self._ready = engine, ready
        self._stalled: dict[Any, float] = {}
        self._is_compiling = False

    def serve_at(self, opened: socket.socket) -> None:
        """Serves until a signal, or until the engine fails, whose error it raises."""
        self._engine.start()
        # uvicorn raises the signals again that it has answered.
        old = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.run(sockets=[opened])
        finally:
            self._engine.stop()
            self._engine.join()
            for number, handler in old.items():
                signal.signal(number, handler)
        if self._engine.error is not None:
            raise self._engine.error

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves from now on."""
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Answers a signal: all answers end."""
        self._engine.stop()
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns whether the server ends."""
        if counter % 10 == 0:
            self._close_stalled()
        is_compiling = self._engine.busy_s > _COMPILING_SECONDS
        if is_compiling and not self._is_compiling:
            say("compiling a program for texts of a new length; all answers wait", who="jgt serve")
        self._is_compiling = is_compiling
        return await super().on_tick(counter) or self._engine.error is not None

    def _close_stalled(self) -> None:
        """Closes connections whose client has been waited for too long: for a request, or to read its answer."""
        now = time.monotonic()
        self._stalled = {one: self._stalled.get(one, now) for one in self.server_state.connections if _waits_for_client(one)}
        for connection, since in self._stalled.items():
            if now - since > _STALLED_SECONDS:
                connection.transport.abort()


def _waits_for_client(connection: Any) -> bool:
    cycle = connection.cycle
    return cycle is None or cycle.response_complete or connection.flow.write_paused
