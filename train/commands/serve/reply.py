"""The JSON of answers, whole and in pieces, as OpenAI's API has it.

A completion and a chat differ in where a text is: `text`, or the `content` of a message, which is a `delta` in a stream.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Sequence

from ...generate.writer import TextPiece
from .api_request import ApiRequest


class Reply:
    """The answers to one request. model: its name."""

    def __init__(self, api_request: ApiRequest, model: str):
        self._api_request = api_request
        self._head = {
            "id": f"{'chatcmpl' if api_request.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._texts = [list[str]() for _ in api_request.requests]
        self._reasons = [""] * len(api_request.requests)
        self._num_tokens = 0

    @property
    def is_complete(self) -> bool:
        """Whether all answers have ended."""
        return all(self._reasons)

    def add(self, index: int, piece: TextPiece) -> None:
        """Takes the next piece of an answer."""
        self._num_tokens += 1
        self._texts[index].append(piece.text)
        self._reasons[index] = piece.reason

    def whole(self) -> dict[str, object]:
        """All answers."""
        is_chat = self._api_request.is_chat
        choices = [
            self._choice(n, {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}, reason)
            for n, (text, reason) in enumerate(zip(map("".join, self._texts), self._reasons, strict=True))
        ]
        return self._made("chat.completion" if is_chat else "text_completion", choices) | {"usage": self._usage()}

    def events(self, index: int, piece: TextPiece) -> bytes:
        """The event of the piece that was added last; empty if it says nothing."""
        is_first = len(self._texts[index]) == 1
        if not (piece.text or piece.reason or is_first):
            return b""
        delta = {**({"role": "assistant"} if is_first else {}), "content": piece.text}
        return self._event(self._choice(index, {"delta": delta} if self._api_request.is_chat else {"text": piece.text}, piece.reason))

    def end(self) -> bytes:
        """The end of a stream."""
        return (self._event() if self._api_request.counts else b"") + b"data: [DONE]\n\n"

    def _event(self, *choices: dict[str, object]) -> bytes:
        made = self._made("chat.completion.chunk" if self._api_request.is_chat else "text_completion", choices)
        return event(made if choices else made | {"usage": self._usage()})

    def _made(self, kind: str, choices: Sequence[dict[str, object]]) -> dict[str, object]:
        return {**self._head, "object": kind, "choices": choices}

    def _choice(self, index: int, text: dict[str, object], reason: str) -> dict[str, object]:
        return {"index": index, **text, "logprobs": None, "finish_reason": reason or None}

    def _usage(self) -> dict[str, int]:
        prompt = self._api_request.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": self._num_tokens, "total_tokens": prompt + self._num_tokens}


def event(value: object) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode("utf-8", "replace")


def error_of(message: str, status: int, code: str | None = None) -> dict[str, object]:
    """The JSON of an error. Its `param` is the key of the request that a message about one begins with."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    key = re.match(r"(\w+): ", message)
    return {"error": {"message": message, "type": kind, "param": key and key[1], "code": code}}
