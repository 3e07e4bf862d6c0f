"""A tokenizer.json through the optional package `tokenizers`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jgt.document import InputError

try:
    import tokenizers
except ImportError:
    tokenizers = None

END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class JsonTokenizer:
    """Raises InputError when the package is missing or the file is not a tokenizer."""

    def __init__(self, path: str):
        if tokenizers is None:
            raise InputError([f"{path}: a tokenizer.json needs the package tokenizers. Run pip install 'jgt[tokenizers]'"])
        try:
            data = Path(path).read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        # The package raises plain Exception for whatever it cannot parse.
        except Exception as error:
            raise InputError([f"{path}: not a tokenizer.json: {error}"]) from None
        # The file may ask for truncated or padded texts, which would lose or invent tokens without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.identity = hashlib.sha256(data).hexdigest()

    @property
    def vocab_size(self) -> int:
        """The largest id plus one: ids may have gaps."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def end_of_text(self) -> int | None:
        ids = (self._tokenizer.token_to_id(name) for name in END_OF_TEXT_NAMES)
        return next((token for token in ids if token is not None), None)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return (np.asarray(encoding.ids, np.uint32) for encoding in encodings)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)
