"""Hostile tokenizers, and damage to the cache of encoded text."""

import base64
import json
import os
import pickle

import pytest
from hostile import VALID, Trap, assert_lines, opened, watched

from jgt.document import InputError

TOKENIZER = json.loads((VALID / "tokenizer.json").read_text())
BPE = TOKENIZER["model"]
WORDS = {"type": "WordLevel", "vocab": {"a": 0, "<eos>": 3}, "unk_token": "[UNK]"}


def split_at(pattern):
    return TOKENIZER | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}}


# Files that the tokenizers library refuses to load.
UNREADABLE = {
    "nothing": b"",
    "half of an object": b"{",
    "a list": b"[]",
    "NUL": bytes(100),
    "not UTF-8": b'{"version": "\xff"}',
    "a pickle": pickle.dumps(Trap()),
    "brackets": b"[" * 100_000,
    "objects": b'{"model":' * 100_000,
    "no model": TOKENIZER | {"model": None},
    "an unknown model": TOKENIZER | {"model": {"type": "os.system", "vocab": {}}},
    "negative ids": TOKENIZER | {"model": WORDS | {"vocab": {"a": -1}}},
    "ids past 32 bits": TOKENIZER | {"model": WORDS | {"vocab": {"a": 2**40}}},
    "ids that are text": TOKENIZER | {"model": WORDS | {"vocab": {"a": "b"}}},
    "merges of unknown tokens": TOKENIZER | {"model": BPE | {"merges": [["x", "y"]]}},
    "a pattern that is not one": split_at("("),
}
TOKENIZERS = {name: (file, "not a tokenizer.json") for name, file in UNREADABLE.items()} | {
    "a pattern that never ends": (split_at("(a+)+$"), "cannot encode the text"),
    "an unknown word": (TOKENIZER | {"model": WORDS}, "cannot encode the text"),
    "large ids": (
        TOKENIZER | {"model": BPE | {"vocab": {"a": 2**32 - 1, "b": 1, "<eos>": 3}, "merges": []}},
        "is 4294967295, but the vocabulary has 256 ids",
    ),
    "no end-of-text token": (TOKENIZER | {"added_tokens": []}, "no end-of-text token"),
    "no vocabulary": (TOKENIZER | {"model": WORDS | {"vocab": {}}, "added_tokens": []}, "no end-of-text token"),
}


def replaced(text, by):
    return {"type": "Replace", "pattern": text if isinstance(text, dict) else {"String": text}, "content": by}


def chain(kind, parts):
    return {"type": "Sequence", kind: parts}


DOUBLED = chain("normalizers", [replaced("a", "aa")] * 40)
ADDED = {"id": 300, "content": "a", "single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
PIECE = {"Sequence": {"id": "A", "type_id": 0}}
# A map of characters whose table is empty: each of its texts may stand for one letter.
CHARSMAP = base64.b64encode(bytes(4) + b"e" * 3_000 + b"\0").decode()
GROWING = {
    "doublings": {"normalizer": DOUBLED},
    "doublings in a chain of chains": {"normalizer": chain("normalizers", [chain("normalizers", [replaced("a", "aaaa")] * 5)] * 8)},
    "doublings by patterns": {"normalizer": chain("normalizers", [replaced({"Regex": "[a]"}, "aa")] * 40)},
    "doublings between letters": {"normalizer": chain("normalizers", [replaced({"Regex": ""}, "a")] * 40)},
    "a long replacement": {"normalizer": replaced({"Regex": ""}, "a" * 9_000)},
    "beginnings": {"normalizer": chain("normalizers", [{"type": "Prepend", "prepend": "aaaa"}] * 40)},
    "a long beginning": {"normalizer": {"type": "Prepend", "prepend": "b" * 10_000_000}},
    "bytes of bytes": {"normalizer": chain("normalizers", [{"type": "ByteLevel"}] * 40)},
    "normal forms": {"normalizer": chain("normalizers", [replaced("a", "\ufdfa"), {"type": "NFKD"}] * 40)},
    "a map of characters": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}},
    "splits into bytes": {
        "pre_tokenizer": chain(
            "pretokenizers", [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}] * 40
        )
    },
    "normalizers and splits": {"normalizer": replaced("a", "a" * 100), "pre_tokenizer": {"type": "Metaspace", "replacement": "a"}}
    | {"post_processor": {"type": "TemplateProcessing", "single": [PIECE] * 2, "pair": [], "special_tokens": {}}},
    "a template of many texts": {
        "post_processor": {"type": "TemplateProcessing", "single": [PIECE] * 100_000, "pair": [], "special_tokens": {}}
    },
    "doublings that decode": {"decoder": chain("decoders", [replaced("a", "aa")] * 40)},
    "doublings of an added token": {"normalizer": DOUBLED, "added_tokens": [*TOKENIZER["added_tokens"], ADDED]},
    "a long added token": {"added_tokens": [*TOKENIZER["added_tokens"], ADDED | {"content": "a" * 10_000_000}]},
    "many long added tokens": {
        "added_tokens": [*TOKENIZER["added_tokens"], *(ADDED | {"id": 300 + n, "content": f"{n:09999}"} for n in range(700))]
    },
    "a long token": {"model": BPE | {"vocab": BPE["vocab"] | {"b" * 10_000_000: 300}}},
    "a forest of tokens": {
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [[f"{n:09d}" * 9, -1.0] for n in range(80_000)], "byte_fallback": False}
    },
    "brackets without end": {"added_tokens": [[]] * 4_100_000},
    "a long prefix": {"model": BPE | {"continuing_subword_prefix": "a" * 100_000}},
}
TOKENIZERS |= {name: (TOKENIZER | file, "not a tokenizer.json that can be used: it ") for name, file in GROWING.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_hostile_tokenizer_is_refused(empty, name):
    file, message = TOKENIZERS[name]
    (empty / "t.json").write_bytes(file if isinstance(file, bytes) else json.dumps(file).encode())
    (empty / "a.jsonl").write_text(json.dumps({"text": "a" * 40 + "b"}))
    with watched(empty), pytest.raises(InputError) as caught:
        opened(empty, source="jsonl", path="a.jsonl", tokenizer="t.json")
    assert_lines(caught.value.problems)
    assert any(message in problem for problem in caught.value.problems), caught.value.problems


DAMAGES = {
    "a flipped bit": lambda path, whole: path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:]),
    "cut": lambda path, whole: path.write_bytes(whole[:-1]),
    "longer": lambda path, whole: path.write_bytes(whole + b"a"),
    "empty": lambda path, whole: path.touch(),
    "a link": lambda path, whole: path.symlink_to("nothing"),
    "a pipe": lambda path, whole: os.mkfifo(path),
}


@pytest.fixture
def tokens(empty):
    """A function that encodes the same text, or reads it from the cache."""
    (empty / "a.jsonl").write_text('{"text": "some words"}\n' * 20)

    def read():
        (batch,) = opened(empty, source="jsonl", path="a.jsonl", shuffle=False).train_batches(0, 8, range(8), 1)
        return batch["inputs"].tobytes()

    return read


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_encoded_text_is_encoded_again(empty, tokens, damage):
    expected = tokens()
    (cached,) = (empty / "cache").iterdir()
    whole = cached.read_bytes()
    cached.unlink()
    DAMAGES[damage](cached, whole)
    with watched(empty):
        assert tokens() == expected
        assert cached.read_bytes() == whole


def test_a_folder_in_place_of_encoded_text_is_an_error(empty, tokens):
    tokens()
    (cached,) = (empty / "cache").iterdir()
    cached.unlink()
    cached.mkdir()
    with watched(empty), pytest.raises(InputError, match="cannot be written"):
        tokens()
