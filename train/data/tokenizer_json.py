"""A tokenizer.json through the optional package `tokenizers`."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from jgt.document import InputError, read_bytes

try:
    import tokenizers
except ImportError:
    tokenizers = None

END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
MAX_BYTES = 1 << 28


class JsonTokenizer:
    """`vocab_size` is the largest id plus one: ids may have gaps.

    Raises InputError when the package is missing, the file is not a tokenizer, or the tokenizer fails on a text.
    """

    def __init__(self, path: str):
        if tokenizers is None:
            raise InputError([f"{path}: a tokenizer.json needs the package tokenizers. Run pip install 'jgt[tokenizers]'"])
        self._path = path
        data = read_bytes(path, MAX_BYTES)
        with self._refusals("not a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
            # The file may ask for truncated or padded texts, which would lose or invent tokens without a word.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.identity = hashlib.sha256(data).hexdigest()

    @property
    def end_of_text(self) -> int | None:
        ids = (self._tokenizer.token_to_id(name) for name in END_OF_TEXT_NAMES)
        return next((token for token in ids if token is not None), None)

    def encode(self, text: str) -> list[int]:
        with self._refusals("cannot encode the text"):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        with self._refusals("cannot encode the text"):
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        for encoding in encodings:
            ids = np.asarray(encoding.ids, np.uint32)
            if ids.size and ids.max() >= self.vocab_size:
                raise InputError([f"{self._path}: gives the id {ids.max()}, but its vocabulary ends at {self.vocab_size - 1}"])
            yield ids

    def decode(self, ids: Sequence[int]) -> str:
        with self._refusals("cannot decode"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    @contextlib.contextmanager
    def _refusals(self, what: str) -> Iterator[None]:
        """The package raises plain Exception for whatever it cannot take, and where its Rust code panics a BaseException of its own."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise InputError([f"{self._path}: {what}: {error}"]) from None
            raise
