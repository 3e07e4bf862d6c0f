"""A client of an ASGI application in this process, which may send a body in pieces and leave whenever it likes."""

import asyncio
import json
from dataclasses import dataclass, field


@dataclass
class Answered:
    """The response so far. pieces: the parts of its body as they were sent."""

    status: int = 0
    headers: dict = field(default_factory=dict)
    pieces: list = field(default_factory=list)

    @property
    def json(self):
        return json.loads(b"".join(self.pieces))

    @property
    def events(self):
        """The data of server-sent events."""
        text = b"".join(self.pieces).decode()
        assert not text or text.endswith("\n\n")
        return [part.removeprefix("data: ") for part in text.split("\n\n")[:-1]]


async def ask(app, path, body=None, *, method=None, headers=None, waits=0.0, leaves=None):
    """Sends a request, its body as JSON unless it is bytes. waits: seconds before its end. leaves: an event at which the client goes."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    sent = {"host": "localhost:8000", **({} if body is None else {"content-type": "application/json"}), **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method or ("GET" if body is None else "POST"),
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    answered, parts = Answered(), [data[: len(data) // 2], data[len(data) // 2 :]]

    async def receive():
        if parts:
            part = parts.pop(0)
            await asyncio.sleep(0 if parts else waits)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}
        await (leaves.wait() if leaves is not None else asyncio.sleep(3600))
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.start":
            answered.status = message["status"]
            answered.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answered.pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return answered
