"""Where documents begin in a window, from every kind of source, and what keeps a run from knowing it."""

import json

import numpy as np
import pytest

from jgt.document import InputError, bind, parse
from train.data.batches import masked
from train.data.config import DataConfig
from train.data.documents import MAX_LINE_BYTES
from train.data.opening import open_data

SEQ = 4


@pytest.fixture
def opened(tmp_path):
    def _open(**keys):
        keys = {"eval_tokens": 0, "shuffle": False, **keys}
        return open_data(DataConfig(**keys), seq=SEQ, vocab=256, seed=0, cache_dir=tmp_path / "cache")

    return _open


@pytest.fixture
def refused(opened):
    def _refused(expected, **keys):
        with pytest.raises(InputError) as caught:
            opened(**keys)
        (problem,) = caught.value.problems
        assert expected in problem

    return _refused


def tokens_of(data, num_windows):
    """The first windows' tokens in order, each boundary token once."""
    (batch,) = data.train_batches(0, num_windows, range(num_windows), 1)
    return [int(batch["inputs"][0, 0]), *batch["targets"].ravel().tolist()]


def write_lines(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def tokenizer_json(path, end_of_text="<|endoftext|>", number=7):
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, end_of_text: number}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return str(path)


def slow_segments(tokens, end):
    """For each token the position at which its document begins."""
    starts, start = [], 0
    for position, token in enumerate(tokens):
        starts.append(start)
        if token == end:
            start = position + 1
    return starts


def test_segments_and_weights_of_random_windows():
    random = np.random.default_rng(0)
    tokens, weights = random.integers(0, 4, (50, 21), np.int32), random.random((50, 20), np.float32)
    batch = masked({"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}, 3)
    np.testing.assert_array_equal(batch["segments"], [slow_segments(row, 3) for row in batch["inputs"]])
    np.testing.assert_array_equal(batch["weights"], np.where(batch["inputs"] == 3, 0, weights))
    assert {name: x.dtype for name, x in batch.items()} == {
        "inputs": "int32",
        "targets": "int32",
        "weights": "float32",
        "segments": "int32",
    }


# -- every source ------------------------------------------------------------------------------------------------


def test_lines_end_with_the_end_of_text(opened, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", "ab", "", "cdefg")
    data = opened(source="jsonl", path=path, documents="mask")
    assert data.end == 0
    assert tokens_of(data, 2) == [*b"ab\0\0cdefg"]
    (batch,) = data.train_batches(0, 2, range(2), 1)
    assert batch["segments"].tolist() == [[0, 0, 0, 3], [0, 0, 0, 0]]
    assert batch["weights"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_files_of_text_end_with_the_end_of_text(opened, tmp_path):
    for name, text in (("a", b"ab"), ("b", b"\xff"), ("c", b"cdefg")):
        (tmp_path / f"{name}.txt").write_bytes(text)
    keys = {"source": "text", "path": str(tmp_path / "*.txt")}
    assert tokens_of(opened(**keys, documents="mask"), 2) == [*b"ab\0\xff\0cdef"]
    joined = opened(**keys)
    assert tokens_of(joined, 1) == [*b"ab\xffcd"]
    assert joined.end is None
    assert set(next(joined.train_batches(0, 1, [0], 1))) == {"inputs", "targets", "weights"}


def test_files_of_text_that_a_tokenizer_encodes(opened, tmp_path):
    tokenizer = tokenizer_json(tmp_path / "t.json")
    for name, text in (("a", "one two\nthree"), ("b", "two"), ("c", "three " * 5)):
        (tmp_path / f"{name}.txt").write_text(text)
    keys = {"source": "text", "path": str(tmp_path / "*.txt"), "tokenizer": tokenizer}
    assert tokens_of(opened(**keys, documents="mask"), 2) == [1, 2, 3, 7, 2, 7, 3, 3, 3]
    assert tokens_of(opened(**keys), 2) == [1, 2, 3, 2, 3, 3, 3, 3, 3]


def test_the_standard_library_has_as_many_documents_as_files(opened):
    data, joined = opened(documents="mask"), opened()
    assert data.fingerprint["train_tokens"] - joined.fingerprint["train_tokens"] == data.fingerprint["files"] > 100


def test_token_files_end_documents_by_an_id(opened, tmp_path):
    np.save(tmp_path / "a.npy", np.array([5, 9, 5, 5, 9, 9, 5, 5, 5], np.uint16))
    data = opened(source="tokens", path=str(tmp_path / "a.npy"), documents="mask", end_of_text=9)
    (batch,) = data.train_batches(0, 2, range(2), 1)
    assert batch["segments"].tolist() == [[0, 0, 2, 2], [0, 1, 2, 2]]
    named = opened(source="tokens", path=str(tmp_path / "a.npy"), documents="mask", tokenizer=tokenizer_json(tmp_path / "t.json", number=9))
    assert named.end == 9


def test_padding_of_an_evaluation_has_no_weight(opened, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *["abc"] * 20)
    data = opened(source="jsonl", path=path, documents="mask", eval_tokens=SEQ + 1)
    (batch,) = data.eval_batches(2, [0, 1])
    assert batch["weights"].sum(1).tolist() == [3, 0]


# -- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("documents: pack", "run.yaml:1: documents: 'pack' is not one of"),
        ("end_of_text: 3", "run.yaml:1: end_of_text: only documents: mask reads it"),
        ("documents: mask\nend_of_text: 3", "run.yaml:2: end_of_text: only the source tokens reads it"),
        ("source: tokens\npath: x\ndocuments: mask", "end_of_text: documents: mask needs the id that ends a document in token files"),
        (
            "source: mixture\ndocuments: mask\nmixture: [{weight: 1}, {weight: 1, source: tokens, path: x}]",
            "end_of_text: documents: mask needs the id",
        ),
    ],
)
def test_wrong_keys_are_named_with_their_line(text, expected):
    problems = []
    bind(parse(text, "run.yaml"), DataConfig, problems)
    assert len(problems) == 1
    assert expected in problems[0]


def test_an_end_that_never_comes_is_an_error(refused, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(20))
    keys = {"source": "tokens", "path": str(tmp_path / "a.npy"), "documents": "mask"}
    refused("none of the first 20 tokens of", **keys, end_of_text=30)
    refused("data.end_of_text: 300 is not in the vocabulary of 256 ids", **keys, end_of_text=300)


def test_text_needs_an_end_of_text(refused, tmp_path):
    (tmp_path / "a.txt").write_text("one two three one two three")
    tokenizer = tokenizer_json(tmp_path / "t.json", end_of_text="[OTHER]")
    refused("t.json: no end-of-text token", source="text", path=str(tmp_path / "a.txt"), tokenizer=tokenizer, documents="mask")


def test_a_mixture_ends_documents_in_one_way(opened, tmp_path):
    np.save(tmp_path / "a.npy", np.array([5, 9] * 10))
    parts = [{"weight": 1}, {"weight": 1, "source": "tokens", "path": str(tmp_path / "a.npy")}]

    def config(end):
        text = json.dumps({"source": "mixture", "documents": "mask", "end_of_text": end, "mixture": parts})
        return {
            name: getattr(bind(parse(text, "run.yaml"), DataConfig, []), name) for name in ("source", "documents", "end_of_text", "mixture")
        }

    with pytest.raises(InputError, match="9 ends a document in the token files, but 0 in the text that bytes encodes"):
        opened(**config(9))
    with pytest.raises(InputError, match=r"none of the first 20 tokens of .* is 0"):
        opened(**config(0))


def test_a_document_of_text_has_a_largest_size(refused, tmp_path):
    tokenizer = tokenizer_json(tmp_path / "t.json")
    (tmp_path / "a.txt").write_bytes(b"a line\n" * (MAX_LINE_BYTES // 7 + 1))
    refused(
        "a.txt: the file is longer than 16,777,216 bytes",
        source="text",
        path=str(tmp_path / "a.txt"),
        tokenizer=tokenizer,
        documents="mask",
    )
