"""Random data files and tokenizers: each is read, or refused within seconds with one line for each problem."""

import gzip
import json
from unittest.mock import patch

import numpy as np
from fuzzing import TEXTS, as_json, fuzz, mutated, spoiled
from hostile import VALID, npy, opened, read_or_refused
from hypothesis import given
from hypothesis import strategies as st

TOKENIZER = json.loads((VALID / "tokenizer.json").read_text())
DESCRS = [
    "<i4",
    ">i4",
    "|u1",
    "<u8",
    "<f4",
    "|O",
    "|b1",
    "<U3",
    "|V4",
    "<M8[s]",
    "i",
    "",
    "x",
    3,
    None,
    [("a", "<i4")],
    ["<i4"],
    "<i99999",
    "<i4" * 999,
]
SHAPES = [(5,), (), (0,), (4, 5), (-1,), (10**18,), (2**63,), (10**30,), (True,), (5.0,), ("5",), [5], 5, None, (1,) * 70]
EXPRESSIONS = [
    "__import__('os').system('touch canary')",
    "{" * 99,
    "(" * 150,
    "-" * 9000 + "1",
    "[" * 5000,
    "1+" * 3000 + "1",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (5L,), }",
    "\0",
    "{}",
    "{1: 2}",
    "'" * 30,
    "{[]: 1}",
    "9" * 6000,
    "é",
]
headers = st.builds(
    lambda d, f, s: repr({"descr": d, "fortran_order": f, "shape": s}),
    st.sampled_from(DESCRS),
    st.sampled_from([False, True, 0, None, "x"]),
    st.sampled_from(SHAPES),
) | st.sampled_from(EXPRESSIONS)
PLAIN = npy("{'descr': '<i4', 'fortran_order': False, 'shape': (20,), }\n", np.arange(20, dtype="<i4").tobytes())
npys = st.builds(
    npy,
    headers.map(lambda text: text + "\n"),
    st.sampled_from([b"", bytes(20), bytes(80), bytes(81)]),
    st.sampled_from([1, 1, 1, 2, 3, 4, 255]),
    st.sampled_from([None, None, None, 0, 5, 2**16 - 1, 2**32 - 1]),
) | spoiled(PLAIN)


@fuzz(60)
@given(npys)
def test_any_npy_file_is_read_or_refused(folder, data):
    (folder / "any.npy").write_bytes(data)
    read_or_refused(folder, lambda: opened(folder, source="tokens", path="any.npy"))


DOCUMENT = {"text": "some words", "id": 3, "tags": [{"a": None}, 1.5]}


json_lines = st.lists(
    mutated(DOCUMENT, most=1).map(as_json) | spoiled(as_json(DOCUMENT), most=1) | st.just(as_json(DOCUMENT)), max_size=4
).map(b"\n".join)
gzips = json_lines.map(gzip.compress) | json_lines.map(gzip.compress).flatmap(spoiled)


@fuzz(60)
@given(st.tuples(st.just("any.jsonl"), json_lines) | st.tuples(st.just("any.jsonl.gz"), gzips))
def test_any_jsonl_file_is_read_or_refused(folder, file):
    name, data = file
    (folder / name).write_bytes(data)
    read_or_refused(folder, lambda: opened(folder, source="jsonl", path=name))


@fuzz(60)
@given(mutated(TOKENIZER).map(as_json) | spoiled(as_json(TOKENIZER)))
def test_any_tokenizer_is_read_or_refused(folder, data):
    (folder / "any.json").write_bytes(data)
    (folder / "doc.jsonl").write_bytes(b'{"text": "ab ba"}\n')
    read_or_refused(folder, lambda: opened(folder, source="jsonl", path="doc.jsonl", tokenizer="any.json"))


@fuzz(60)
@given(
    st.sampled_from(["text", "tokens", "jsonl"]),
    st.sampled_from(["path", "eval_path"]),
    st.sampled_from(TEXTS) | st.text(st.sampled_from("a*?[]!/.\0\n~"), max_size=12),
)
def test_any_path_is_read_or_refused(folder, source, key, path):
    # Some of these paths contain the whole disk, which may take long to walk.
    with patch("train.data.files.MAX_NAMES", 10_000):
        read_or_refused(folder, lambda: opened(folder, **{"source": source, "path": "a.bin", key: path}))
