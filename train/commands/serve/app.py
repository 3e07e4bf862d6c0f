"""OpenAI's API as an ASGI application: routes, who may use them, bodies within limits, and answers whole or as server-sent events.

    GET  /health                 whether the model answers
    GET  /metrics                numbers for Prometheus
    GET  /v1/models              the model; also /v1/models/NAME
    POST /v1/completions         texts that continue prompts
    POST /v1/chat/completions    answers to chats

An answer ends when its client has left. Every error is JSON in OpenAI's form.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jgt.document import InputError, shown

from ...generate.writer import TextPiece
from ...journal.openmetrics import CONTENT_TYPE, as_text
from .api_request import ApiRequest, RequestReader, UnknownModelError
from .engine import Engine, FullError, StoppedError, Ticket
from .reply import Reply, error_of, event
from .traffic import Traffic

_BODY_SECONDS = 20
"""The time in which the body of a request must have arrived."""


@dataclass(frozen=True, kw_only=True)
class Api:
    """The API of one model. token: the API key of clients; without one, the host that a request names must be local, by `is_local`."""

    engine: Engine
    reader: RequestReader
    token: bytes
    is_local: Callable[[str], bool]
    traffic: Traffic = field(default_factory=Traffic)

    def app(self) -> ASGIApp:
        """The ASGI application."""
        return self.traffic.around(self._routes())

    def _routes(self) -> Starlette:
        posts = {"/v1/completions": False, "/v1/chat/completions": True}
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._models),
                *(Route(path, functools.partial(self._answer, is_chat), methods=["POST"]) for path, is_chat in posts.items()),
            ],
            exception_handlers=dict.fromkeys((HTTPException, Exception, *_ERRORS), _failed),
        )

    async def _health(self, _: Request) -> Response:
        is_well = self.engine.error is None
        return JSONResponse({"status": "ok" if is_well else "failed", "open": self.engine.num_open}, 200 if is_well else 500)

    async def _metrics(self, request: Request) -> Response:
        self._check(request)
        return Response(as_text(self.traffic.families(self.engine.num_open, self.reader.name)), media_type=CONTENT_TYPE)

    async def _models(self, request: Request) -> Response:
        self._check(request)
        model = {"id": self.reader.name, "object": "model", "created": 0, "owned_by": "jgt"}
        if "name" not in request.path_params:
            return JSONResponse({"object": "list", "data": [model]})
        self.reader.check_name(request.path_params["name"])
        return JSONResponse(model)

    async def _answer(self, is_chat: bool, request: Request) -> _Answer:
        self._check(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # A page in a browser could send other types without asking the server first.
            raise HTTPException(415, "the Content-Type must be application/json")
        data = await _body(request, self.reader.most_bytes)
        # Tokens of a long text take a while, and other clients shall not wait for them.
        api_request = await asyncio.to_thread(self.reader.read, data, is_chat=is_chat)
        return _Answer(self.engine, api_request, Reply(api_request, self.reader.name))

    def _check(self, request: Request) -> None:
        """Raises HTTPException if the client may not ask."""
        if self.token:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode("latin-1"), self.token):
                raise HTTPException(401, "the API key is wrong or missing. Send it as Authorization: Bearer TOKEN")
        # A page in a browser may have a name that leads here.
        elif not self.is_local(host := re.sub(r":\d*$", "", request.headers.get("host", "")).strip("[]")):
            raise HTTPException(403, f"without a token, the server answers to localhost only, not to {shown(host)}")


class _Answer:
    """The response to a request, an ASGI application."""

    def __init__(self, engine: Engine, api_request: ApiRequest, reply: Reply):
        self._engine, self._api_request, self._reply = engine, api_request, reply
        self._pieces: asyncio.Queue[tuple[int, TextPiece | StoppedError]] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, self._answered = asyncio.get_running_loop(), scope["answered"]
        self._answered.prompt = self._api_request.prompt_tokens

        def deliver(index: int, piece: TextPiece | StoppedError) -> None:
            # At the end of the server, its loop may be gone.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._pieces.put_nowait, (index, piece))

        tickets = [Ticket(request=one, deliver=functools.partial(deliver, n)) for n, one in enumerate(self._api_request.requests)]
        self._engine.submit(tickets)
        answer = self._stream(send) if self._api_request.streams else self._whole(scope, receive, send)
        tasks = [asyncio.create_task(answer), asyncio.create_task(_leaving(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            self._engine.cancel(tickets)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _next(self) -> tuple[int, TextPiece]:
        index, piece = await self._pieces.get()
        if isinstance(piece, StoppedError):
            raise piece
        self._reply.add(index, piece)
        self._answered.add()
        return index, piece

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        while not self._reply.is_complete:
            await self._next()
        await JSONResponse(self._reply.whole())(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        # Until there is a first piece, an error has a status.
        index, piece = await self._next()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send(send, self._reply.events(index, piece))
        try:
            while not self._reply.is_complete:
                await _send(send, self._reply.events(*await self._next()))
        except StoppedError:
            await _send(send, event(error_of("the server is ending", 503)), is_last=True)
        else:
            await _send(send, self._reply.end(), is_last=True)


async def _send(send: Send, data: bytes, *, is_last: bool = False) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})


async def _leaving(receive: Receive) -> None:
    """Waits until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, most: int) -> bytes:
    """The body of a request. Raises HTTPException if it is too large or too slow."""
    data = bytearray()
    closing = {"Connection": "close"}
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                data += chunk
                if len(data) > most:
                    raise HTTPException(413, f"the body has more than {most:,} bytes, which are enough for the model's sequence", closing)
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive in {_BODY_SECONDS} seconds", closing) from None
    return bytes(data)


_ERRORS: Mapping[type[Exception], tuple[int, str | None, str]] = {
    InputError: (400, None, ""),
    UnknownModelError: (404, "model_not_found", ""),
    FullError: (503, "overloaded", "all rows are busy and the queue is full. Try again"),
    StoppedError: (503, None, "the server is ending"),
    ClientDisconnect: (400, None, "the client has left"),
}
"""The status, the code and the message of an error, which is its own if it has no other."""


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        status, code, message, headers = error.status_code, None, error.detail, dict(error.headers or {})
        if message == "Not Found":
            paths = ", ".join(route.path for route in request.app.routes if "{" not in route.path)
            message = f"unknown path {shown(request.url.path)}. Known: {paths}. A client's base_url ends with /v1"
    else:
        status, code, message = _ERRORS.get(type(error), (500, None, "the server failed. Its log says why"))
        headers = {"Retry-After": "1"} if status == 503 else {}
    return JSONResponse(error_of(message or str(error), status, code), status, headers)
