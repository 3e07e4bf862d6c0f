"""The text of tokens, as they come: complete characters, up to a stop text.

A character may need several tokens, and a stop text too, so what may still change is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_CONTEXT = 4
"""Tokens of the prompt that are decoded with the first ones of the answer: some tokenizers write a space by what is before it."""


class Text:
    """The text of an answer. decode: a tokenizer's. prompt: the tokens before it. is_stopped: whether it has come to a stop text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = (), stop: Sequence[str] = ()):
        self._decode, self._stop = decode, [text for text in stop if text]
        self._tokens = list(prompt[-_CONTEXT:])
        # Tokens before `_seen` are in the text, and so are `_taken` characters of those behind. Those before `_begin` are needed no more.
        self._begin, self._seen, self._taken = 0, len(self._tokens), 0
        self._text, self._shown = "", 0
        self.is_stopped = False

    def add(self, token: int) -> str:
        """The text that is certain after one more token, and was not before."""
        self._tokens.append(token)
        self._take(is_last=False)
        return self._certain(len(self._text) - self._held())

    def end(self) -> str:
        """The rest, when no token follows."""
        self._take(is_last=True)
        return self._certain(len(self._text))

    def _take(self, *, is_last: bool) -> None:
        before, after = self._decode(self._tokens[self._begin : self._seen]), self._decode(self._tokens[self._begin :])
        text = after[len(before) :]
        # Replacements at the end may become one character with the next tokens.
        complete = text if is_last else text.rstrip(_REPLACEMENT)
        self._append(complete[self._taken :])
        self._taken = len(complete)
        if complete == text:
            self._begin, self._seen, self._taken = self._seen, len(self._tokens), 0

    def _append(self, new: str) -> None:
        if self.is_stopped:
            return
        first = max(len(self._text) + 1 - max(map(len, self._stop), default=0), 0)
        self._text += new
        found = [place for stop in self._stop if (place := self._text.find(stop, first)) >= 0]
        if found:
            self._text, self.is_stopped = self._text[: min(found)], True

    def _held(self) -> int:
        """The number of characters at the end with which a stop text may begin."""
        if self.is_stopped:
            return 0
        sizes = (size for stop in self._stop for size in range(1, len(stop)) if self._text.endswith(stop[:size]))
        return max(sizes, default=0)

    def _certain(self, end: int) -> str:
        new, self._shown = self._text[self._shown : end], max(end, self._shown)
        return new


def terminal_text(text: str) -> str:
    """The text with a replacement character for each one that is not printable: a model may write control sequences of a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else _REPLACEMENT for c in text)
