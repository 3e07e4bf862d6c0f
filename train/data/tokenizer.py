"""Tokenizers: text to token ids and back.

`ByteTokenizer` needs no file: its ids are the bytes of UTF-8. `JsonTokenizer` reads a tokenizer.json through the optional package
`tokenizers`. Each has a `vocab_size`, the largest id plus one: a model may have more rows, for padding, whose ids mean nothing. `special`
has the tokens around texts, which the methods leave out. Encoded text is cached (`encoded.py`), so each also has an `identity`, which
changes whenever its ids or the end of a document may change.

A tokenizer.json comes from elsewhere and is not trusted: it may ask for texts to be truncated or padded, produce ids outside its own
vocabulary, make texts longer without end (`tokenizer_limits.py`), or make the package's Rust code panic. All of these end in an InputError
that names the file.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jgt.document import InputError, read_bytes, shown

from ..files.cache import local_file
from .config import BYTES
from .special import END_OF_TEXT_NAMES, SpecialTokens, declared_tokens, special_tokens
from .tokenizer_limits import limit_problem

try:
    import tokenizers
except ImportError:
    tokenizers = None

TOKENIZER_REMEDY = "Add a tokenizer.json to its folder: transformers saves one, also of a tokenizer.model or a vocab.json"
MAX_BYTES = 1 << 26
"""The largest tokenizer.json that is read."""


class ByteTokenizer:
    """The bytes of UTF-8 as ids. Byte 0, which hardly ever occurs in text, ends a document."""

    identity = BYTES
    vocab_size = 256
    special = SpecialTokens(end_of_text=0, ends=(0,))
    special_ids = frozenset({0})

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        return (np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8) for text in texts)

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids [n] of a text, and the characters [n, 2] that each of them begins at and ends before."""
        sizes = [len(character.encode("utf-8", "surrogateescape")) for character in text]
        begins = np.repeat(np.arange(len(text)), sizes)
        return np.asarray(self.encode(text), np.uint32), np.stack([begins, begins + 1], axis=1)

    def decode(self, ids: Sequence[int]) -> str:
        """Invalid UTF-8 becomes U+FFFD, and so do ids above 255, which a model with a padded vocabulary can produce."""
        # 0xff never occurs in UTF-8.
        return bytes(token if 0 <= token < 256 else 0xFF for token in ids).decode("utf-8", "replace")


class JsonTokenizer:
    """The tokenizer of a tokenizer.json, with the special tokens that the files beside it name. Its ids may have gaps.

    Raises InputError if the package is missing, if a file is not what its name says, or if the tokenizer fails on a text.
    """

    def __init__(self, path: str):
        if tokenizers is None:
            raise InputError([f"{path}: a tokenizer.json needs the package tokenizers. Run pip install 'jgt[tokenizers]'"])
        self._path = path
        data = read_bytes(path, MAX_BYTES)
        if problem := limit_problem(data):
            raise InputError([f"{path}: not a tokenizer.json that can be used: it {problem}"])
        with self._as_input_error("not a tokenizer.json"):
            # Made of the bytes that `identity` is a hash of. The file itself may change meanwhile.
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
            # The file may ask for truncated or padded texts, which would silently lose or invent tokens.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        with self._as_input_error("has invalid tokens beside it"):
            added = self._add_declared(tokenizers.AddedToken)
        with self._as_input_error("not a tokenizer.json"):
            # Ids may have gaps, so the number of tokens may be smaller than the largest id plus one.
            self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
            beginning = self._beginning()
        self.special = special_tokens(Path(path).parent, self._tokenizer.token_to_id, beginning)
        known = (token for name in END_OF_TEXT_NAMES if (token := self._tokenizer.token_to_id(name)) is not None)
        # The files beside a tokenizer.json may name another end than the first that is known.
        own = b"" if self.special.end_of_text == next(known, None) else f" {self.special.end_of_text}".encode()
        self.identity = hashlib.sha256(data + own + "".join(map(repr, added)).encode()).hexdigest()

    def _add_declared(self, token_of: Any) -> list[Any]:
        """Adds the tokens that the files beside the tokenizer.json name, as transformers does, and returns them. Raises InputError."""
        added, id_of = list[Any](), self._tokenizer.token_to_id
        own = {token.content: token for token in self._tokenizer.get_added_tokens_decoder().values()}
        for number, shape, goes_before in declared_tokens(Path(self._path).parent, id_of):
            token = token_of(**{key: value for key, value in shape.items() if key != "__type"})
            if token.content not in own or (goes_before and repr(own[token.content]) != repr(token)):
                self._tokenizer.add_tokens([token])
                own[token.content] = token
                added.append(token)
            if number is not None and id_of(token.content) != number:
                why = f"the files beside it say that {shown(token.content)} has the id {number}, and here it has {id_of(token.content)}"
                raise InputError([f"{self._path}: {why}. Save the tokenizer again"])
        return added

    def _beginning(self) -> tuple[int, ...]:
        """The tokens that the file adds in front of a text."""
        if not self._tokenizer.num_special_tokens_to_add(False):
            return ()
        whole = self._tokenizer.encode("a")
        # Without a token of the letter, nothing says where the beginning ends.
        return tuple(whole.ids[: whole.special_tokens_mask.index(0)]) if 0 in whole.special_tokens_mask else ()

    def encode(self, text: str) -> list[int]:
        return self.encode_spans(text)[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        with self._as_input_error("cannot encode the text"):
            # No special tokens: `encoded.py` marks documents itself, in the same way for every tokenizer.
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        for encoding in encodings:
            ids = np.asarray(encoding.ids, np.uint32)
            if ids.size and ids.max() >= self.vocab_size:
                raise InputError([f"{self._path}: produces the id {ids.max()}, but its vocabulary ends at {self.vocab_size - 1}"])
            yield ids

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids [n] of a text, and the characters [n, 2] that each of them begins at and ends before."""
        with self._as_input_error("cannot encode the text"):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(encoding.ids, np.uint32), np.asarray(encoding.offsets, np.int64).reshape(-1, 2)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The tokens that no text is made of, such as <|im_end|>, and those at which generation stops."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, shape in added.items() if shape.special) | frozenset(self.special.ends)

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
            if not isinstance(error, InputError) and (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
                raise InputError([f"{self._path}: {failure}: {error}"]) from None
            raise


Tokenizer = ByteTokenizer | JsonTokenizer


def open_tokenizer(name: str) -> Tokenizer:
    """The byte tokenizer for `bytes`; otherwise the tokenizer of the tokenizer.json at this path or URL. Raises InputError."""
    return ByteTokenizer() if name == BYTES else JsonTokenizer(str(local_file(name)))


def encoded_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text with those that begin every text, unless it has them already."""
    tokens, beginning = tokenizer.encode(text), [*tokenizer.special.beginning]
    return tokens if tokens[: len(beginning)] == beginning else [*beginning, *tokens]
