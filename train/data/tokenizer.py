"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from train.data.config import BYTES
from train.data.tokenizer_json import JsonTokenizer


class Tokenizer(Protocol):
    """`identity` changes whenever the ids may change; `end_of_text` is None when the vocabulary has no such token."""

    @property
    def identity(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_text(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as ids. Byte 0, which text hardly ever holds, ends a document."""

    identity = BYTES
    vocab_size = 256
    end_of_text = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        return (np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Ids above 255, which a padded vocabulary can sample, and broken UTF-8 become U+FFFD."""
        # 0xff never occurs in UTF-8.
        return bytes(token if 0 <= token < 256 else 0xFF for token in ids).decode("utf-8", "replace")


def load(name: str) -> Tokenizer:
    """The byte tokenizer, or that of a tokenizer.json. Raises InputError."""
    return ByteTokenizer() if name == BYTES else JsonTokenizer(name)
