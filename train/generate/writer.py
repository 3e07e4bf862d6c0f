"""The texts that a batch writes: its tokens become pieces of text, and a stop text ends an answer as a token does.

writer = TextWriter(batch, tokenizer.decode)
while requests or writer.is_busy:
    for piece in writer.write(requests[: writer.num_free]): ...     # requests join those that are being answered
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .batch import TextBatch, TextRequest, Token
from .text import Text


class TextPiece(NamedTuple):
    """A new token of a request, and the text that is certain since then. reason: `stop` or `length` for the last one; otherwise empty."""

    token: Token
    text: str
    reason: str


class TextWriter:
    """A batch and the texts of its answers. decode: a tokenizer's."""

    def __init__(self, batch: TextBatch, decode: Callable[[Sequence[int]], str]):
        self.batch, self._decode = batch, decode
        self._texts: dict[TextRequest, Text] = {}

    def write(self, joining: Sequence[TextRequest] = ()) -> list[TextPiece]:
        """Lets requests join, at most `batch.num_free`, and writes one more token of each request; two of those that join."""
        self._texts |= {request: Text(self._decode, request.tokens, request.stop) for request in joining}
        tokens = [*self.batch.admit(joining), *self.batch.step()]
        # The first token of a request may have been its last one.
        return [self._piece(token) for token in tokens if token.request in self._texts]

    def release(self, request: TextRequest) -> None:
        """Ends a request, if it has not ended."""
        self.batch.release(request)
        self._texts.pop(request, None)

    def _piece(self, token: Token) -> TextPiece:
        text, is_end = self._texts[token.request], token.token in token.request.ends
        new = "" if is_end else text.add(token.token)
        if not (token.reason or text.is_stopped):
            return TextPiece(token, new, "")
        new += text.end()
        self.release(token.request)
        return TextPiece(token, new, "stop" if text.is_stopped or is_end else "length")
