"""Tokenizers: text to token ids and back.

`ByteTokenizer` needs no file: its ids are the bytes of UTF-8. `JsonTokenizer` reads a tokenizer.json through the optional package
`tokenizers`. Each has a `vocab_size`, the largest id plus one, and an `end_of_text`, None if it has no such token. Encoded text is cached
(`encoded.py`), so each also has an `identity`, which changes whenever its ids may change.

A tokenizer.json comes from elsewhere and is not trusted: it may ask for texts to be truncated or padded, produce ids outside its own
vocabulary, or make the package's Rust code panic. All of these end in an InputError that names the file.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from jgt.document import InputError, read_bytes

from .config import BYTES

try:
    import tokenizers
except ImportError:
    tokenizers = None

END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""What the end-of-text token may be called: a tokenizer.json does not say which of its tokens it is."""
MAX_BYTES = 1 << 28
"""The largest tokenizer.json that is read."""


class ByteTokenizer:
    """The bytes of UTF-8 as ids. Byte 0, which hardly ever occurs in text, ends a document."""

    identity = BYTES
    vocab_size = 256
    end_of_text = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        return (np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8) for text in texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Invalid UTF-8 becomes U+FFFD, and so do ids above 255, which a model with a padded vocabulary can produce."""
        # 0xff never occurs in UTF-8.
        return bytes(token if 0 <= token < 256 else 0xFF for token in ids).decode("utf-8", "replace")


class JsonTokenizer:
    """The tokenizer of a tokenizer.json. Its ids may have gaps.

    Raises InputError if the package is missing, if the file is not a tokenizer, or if the tokenizer fails on a text.
    """

    def __init__(self, path: str):
        if tokenizers is None:
            raise InputError([f"{path}: a tokenizer.json needs the package tokenizers. Run pip install 'jgt[tokenizers]'"])
        self._path = path
        data = read_bytes(path, MAX_BYTES)
        with self._as_input_error("not a tokenizer.json"):
            # Made of the bytes that `identity` is a hash of. The file itself may change meanwhile.
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
            # The file may ask for truncated or padded texts, which would silently lose or invent tokens.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            # Ids may have gaps, so the number of tokens may be smaller than the largest id plus one.
            self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.identity = hashlib.sha256(data).hexdigest()

    @property
    def end_of_text(self) -> int | None:
        ids = (self._tokenizer.token_to_id(name) for name in END_OF_TEXT_NAMES)
        return next((token for token in ids if token is not None), None)

    def encode(self, text: str) -> list[int]:
        with self._as_input_error("cannot encode the text"):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        with self._as_input_error("cannot encode the text"):
            # No special tokens: `encoded.py` marks the ends of documents itself, in the same way for every tokenizer.
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        for encoding in encodings:
            ids = np.asarray(encoding.ids, np.uint32)
            if ids.size and ids.max() >= self.vocab_size:
                raise InputError([f"{self._path}: produces the id {ids.max()}, but its vocabulary ends at {self.vocab_size - 1}"])
            yield ids

    def decode(self, ids: Sequence[int]) -> str:
        with self._as_input_error("cannot decode"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    @contextlib.contextmanager
    def _as_input_error(self, failure: str) -> Iterator[None]:
        """Turns the package's errors into InputErrors.

        The package raises a plain Exception for bad input. Where its Rust code panics, it raises pyo3's PanicException, a
        BaseException that cannot be imported.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise InputError([f"{self._path}: {failure}: {error}"]) from None
            raise


Tokenizer = ByteTokenizer | JsonTokenizer


def open_tokenizer(name: str) -> Tokenizer:
    """The byte tokenizer for `bytes`; otherwise the tokenizer of the tokenizer.json at this path. Raises InputError."""
    return ByteTokenizer() if name == BYTES else JsonTokenizer(name)
