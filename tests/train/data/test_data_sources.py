"""Every kind of data file: what is read from it, and the message about a damaged one."""

import gzip
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jgt.document import InputError
from train.data.config import DataConfig
from train.data.opening import open_data
from train.data.stream import Segment, Stream, find_outside

SEQ = 4


@pytest.fixture
def opened(tmp_path):
    def _open(vocab=256, **keys):
        keys = {"eval_tokens": 0, "shuffle": False, **keys}
        return open_data(DataConfig(**keys), seq=SEQ, vocab=vocab, seed=0, cache_dir=tmp_path / "cache")

    return _open


@pytest.fixture
def refused(opened):
    def _refused(*expected, **keys):
        with pytest.raises(InputError) as caught:
            opened(**keys)
        problems = caught.value.problems
        assert len(problems) == len(expected), problems
        for problem, part in zip(problems, expected, strict=True):
            assert part in problem

    return _refused


def tokens_of(data, num_windows):
    """The first windows' tokens in order, each boundary token once."""
    (batch,) = data.train_batches(0, num_windows, range(num_windows), 1)
    return [int(batch["inputs"][0, 0]), *batch["targets"].ravel().tolist()]


def write_lines(path, *lines):
    data = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def tokenizer_json(path, *, truncate=False, end_of_text="<|endoftext|>"):
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, end_of_text: 7}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if truncate:
        tokenizer.enable_truncation(max_length=2)
        tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    return str(path)


# -- text --------------------------------------------------------------------------------------------------------


def test_the_standard_library_in_bytes(opened):
    data = opened(source="stdlib", eval_tokens=500_000)
    assert data.fingerprint["eval_tokens"] == 500_000
    assert data.fingerprint["train_tokens"] + 500_000 == data.fingerprint["bytes"] > 5_000_000
    assert data.eval_sequences == (500_000 - 1) // SEQ
    assert data.fingerprint == json.loads(json.dumps(data.fingerprint))


def test_text_files_follow_each_other_in_order(opened, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "b.txt").write_bytes(b"def\xff")
    (folder / "a.txt").write_bytes(b"abc")
    (folder / "aa.txt").write_bytes(b"")
    (folder / "c.txt").write_bytes(b"gh")
    data = opened(source="text", path=str(folder))
    assert bytes(tokens_of(data, 2)) == b"abcdef\xffgh"
    assert data.tokenizer.decode([97, 300, 98]) == "a\ufffdb"
    assert data.tokenizer.decode(data.tokenizer.encode("naïve")) == "naïve"
    assert data.tokenizer.vocab_size == 256


def test_a_large_text_file_is_mapped(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("train.data.tokens._MAP_BYTES", 4)
    (tmp_path / "a.txt").write_bytes(b"abcdefghi")
    assert bytes(tokens_of(opened(source="text", path=str(tmp_path / "a.txt")), 2)) == b"abcdefghi"


def test_empty_text_is_refused(refused, tmp_path):
    (tmp_path / "a.txt").touch()
    refused("a.txt: the file is empty", source="text", path=str(tmp_path / "a.txt"))


# -- token files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_bin(opened, tmp_path, dtype):
    ids = np.arange(9, dtype=dtype) * 7
    ids.tofile(tmp_path / "a.bin")
    assert tokens_of(opened(source="tokens", path=str(tmp_path / "a.bin"), dtype=dtype), 2) == ids.tolist()


@pytest.mark.parametrize("dtype", [">u2", "int64", "uint8"])
def test_npy_shards(opened, tmp_path, dtype):
    ids = np.arange(13, dtype=dtype)
    for shard, part in enumerate(np.split(ids, [2, 9])):
        np.save(tmp_path / f"{shard}.npy", part)
    assert tokens_of(opened(source="tokens", path=str(tmp_path / "*.npy")), 3) == ids.tolist()


def test_token_files_that_cannot_be_right(refused, tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    def damaged(name, *expected):
        refused(*expected, source="tokens", path=str(tmp_path / name))

    (tmp_path / "odd.bin").write_bytes(b"abc")
    damaged("odd.bin", "odd.bin: has 3 bytes, which is not a multiple of the 2 bytes of uint16")
    (tmp_path / "empty.bin").touch()
    damaged("empty.bin", "empty.bin: the file is empty")
    (tmp_path / "empty.npy").touch()
    damaged("empty.npy", "empty.npy: the file is empty")
    np.save(tmp_path / "floats.npy", np.zeros(9))
    damaged("floats.npy", "floats.npy: contains float64 [9]")
    np.save(tmp_path / "square.npy", np.zeros((3, 3), np.int32))
    damaged("square.npy", "square.npy: contains int32 [3, 3]")
    np.save(tmp_path / "none.npy", np.zeros(0, np.int32))
    damaged("none.npy", "none.npy: the file is empty: it contains no tokens")
    np.save(tmp_path / "pickle.npy", np.array([Trap()], object), allow_pickle=True)
    damaged("pickle.npy", "pickle.npy: contains Python objects [1]")
    (tmp_path / "text.npy").write_text("no header")
    damaged("text.npy", "text.npy: not a readable .npy file")
    np.save(tmp_path / "cut.npy", np.arange(100))
    os.truncate(tmp_path / "cut.npy", 200)
    damaged("cut.npy", "cut.npy: its header promises 100 ids of 8 bytes, but 72 bytes follow")
    damaged("e*.*", "empty.bin: the file is empty", "empty.npy: the file is empty")
    assert not (tmp_path / "sprung").exists()


# -- the vocabulary ----------------------------------------------------------------------------------------------


def test_an_id_outside_the_vocabulary_is_named_with_its_place(refused, opened, tmp_path):
    ids = np.arange(20, dtype=np.uint16)
    ids.tofile(tmp_path / "a.bin")
    path = str(tmp_path / "a.bin")
    # The last tokens are held out, and the position still counts from the start of the file.
    refused("a.bin: token 16 is 16, but the vocabulary has 16 ids (0 to 15)", vocab=16, source="tokens", path=path, eval_tokens=6)
    assert opened(vocab=20, source="tokens", path=path).fingerprint["train_tokens"] == 20
    np.save(tmp_path / "b.npy", np.array([1, 2, -3, 4, 5]))
    refused("b.npy: token 2 is -3", vocab=16, source="tokens", path=str(tmp_path / "b.npy"))
    refused("a.bin: token 3 is 3", vocab=3, source="tokens", path=str(tmp_path / "[ab].*"))
    several = "a.bin: token 3 is 3, but the vocabulary has 3 ids (0 to 2); 1 more files have such ids. Set model.vocab=20, or"
    np.save(tmp_path / "b.npy", np.arange(9))
    refused(several, vocab=3, source="tokens", path=str(tmp_path / "[ab].*"))
    np.save(tmp_path / "b.npy", np.arange(9) + 10**8)
    refused("No vocabulary has such ids", vocab=3, source="tokens", path=str(tmp_path / "b.npy"))


def test_text_is_checked_against_a_small_vocabulary(refused, opened, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"plain\xe9plain")
    keys = {"source": "text", "path": str(tmp_path / "a.txt")}
    refused("a.txt: token 5 is 233, but the vocabulary has 128 ids", vocab=128, **keys)
    opened(vocab=234, **keys)


def test_the_scan_counts_positions_across_its_chunks(monkeypatch):
    monkeypatch.setattr("train.data.stream._SCAN_TOKENS", 8)
    tokens = np.zeros(50, np.uint16)
    tokens[[27, 31]] = 9
    outside = find_outside(Stream((Segment(name="f", tokens=tokens),)), 9)
    assert outside is not None and "f: token 27 is 9" in outside[0] and outside[1] == 10


# -- jsonl -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_jsonl(opened, tmp_path, name):
    path = write_lines(tmp_path / name, {"text": "abc", "id": 1}, b"", {"text": ""}, {"text": "défg"})
    data = opened(source="jsonl", path=path)
    assert bytes(tokens_of(data, 2)) == b"abc\0\0d\xc3\xa9f"
    assert data.fingerprint["train_tokens"] == len(b"abc\0\0d\xc3\xa9fg\0")


def test_the_field_of_jsonl(opened, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "no", "body": "abcdefgh"})
    assert bytes(tokens_of(opened(source="jsonl", path=path, field="body"), 2)) == b"abcdefgh\0"
    with pytest.raises(InputError, match=r"a.jsonl has 3 tokens, .* needs 5\. Give more data, or lower model.seq"):
        opened(source="jsonl", path=path)


def test_every_bad_line_is_listed(refused, tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        {"text": "fine"},
        b'{"text": ',
        b'["text"]',
        {"body": "x", "title": "y"},
        {"text": 3},
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
    )
    refused(
        "a.jsonl:2: not valid JSON: Expecting value",
        "a.jsonl:3: must be a JSON object, not a list",
        "a.jsonl:4: has no field 'text'. It has: 'body', 'title'. Set data.field=body",
        "a.jsonl:5: the field 'text' must be text, not the whole number 3",
        "a.jsonl:6: not UTF-8: byte 0xff at offset 10",
        "a.jsonl:7: the field 'text' contains half of a surrogate pair",
        "a.jsonl:8: ",
        source="jsonl",
        path=path,
    )
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_of_nothing_but_bad_lines_stops_early(refused, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *[b"{"] * 1000)
    listed = [f"a.jsonl:{line}: not valid JSON" for line in range(1, 21)]
    refused(*listed, "20 problems; the rest was not read", source="jsonl", path=path)


def test_empty_and_damaged_jsonl_files(refused, opened, tmp_path):
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.jsonl").write_bytes(b"\n \n")
    whole = gzip.compress("".join(json.dumps({"text": str(i**9)}) + "\n" for i in range(1000)).encode())
    (tmp_path / "c.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "d.jsonl.gz").write_bytes(b'{"text": "not gzip"}\n')
    flipped = bytearray(whole)
    # The checksum at the end: every line still reads well.
    flipped[-6] ^= 0xFF
    (tmp_path / "e.jsonl.gz").write_bytes(flipped)
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(b""))
    for name in "ab":
        refused(f"{name}.jsonl: the file is empty", source="jsonl", path=str(tmp_path / f"{name}.jsonl"))
    refused("f.jsonl.gz: the file is empty", source="jsonl", path=str(tmp_path / "f.jsonl.gz"))
    refused("d.jsonl.gz:1: the gzip data is damaged", source="jsonl", path=str(tmp_path / "d.jsonl.gz"))
    refused("e.jsonl.gz:1001: the gzip data is damaged or cut short", source="jsonl", path=str(tmp_path / "e.jsonl.gz"))
    with pytest.raises(InputError, match=r"c\.jsonl\.gz:\d+: the gzip data is damaged or cut short") as caught:
        opened(source="jsonl", path=str(tmp_path / "c.jsonl.gz"))
    assert 1 < int(caught.value.problems[0].split(":")[1]) < 1001


def test_a_text_is_encoded_once_and_again_when_it_changes(opened, tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", {"text": "abcdefgh"})
    first = tokens_of(opened(source="jsonl", path=path), 2)
    (cached,) = (tmp_path / "cache").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("train.data.encoded._write", None)
        assert tokens_of(opened(source="jsonl", path=path), 2) == first
    write_lines(tmp_path / "a.jsonl", {"text": "ABCDEFGH"})
    os.utime(path, ns=(1, 1))
    assert bytes(tokens_of(opened(source="jsonl", path=path), 2)) == b"ABCDEFGH\0"
    assert {cached} < set((tmp_path / "cache").iterdir())


def test_many_may_encode_at_once(opened, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *[{"text": "abcdefgh"}] * 2000)
    with ThreadPoolExecutor(6) as pool:
        streams = list(pool.map(lambda _: tokens_of(opened(source="jsonl", path=path), 2000), range(6)))
    assert all(stream == streams[0] for stream in streams)
    assert len(list((tmp_path / "cache").iterdir())) == 1


# -- tokenizer.json ----------------------------------------------------------------------------------------------


def test_tokenizer_json(opened, tmp_path):
    tokenizer = tokenizer_json(tmp_path / "t.json", truncate=True)
    path = write_lines(tmp_path / "a.jsonl", {"text": "one two three one"}, {"text": "two two four"})
    data = opened(source="jsonl", path=path, tokenizer=tokenizer, vocab=8)
    assert tokens_of(data, 2) == [1, 2, 3, 1, 7, 2, 2, 0, 7]
    assert data.tokenizer.vocab_size == 8
    assert data.tokenizer.encode("three two one") == [3, 2, 1]
    assert data.tokenizer.decode([3, 7, 1]) == "three <|endoftext|> one"
    with pytest.raises(InputError, match=r"a\.jsonl \(encoded in .*token 4 is 7, but the vocabulary has 7 ids"):
        opened(source="jsonl", path=path, tokenizer=tokenizer, vocab=7)


def test_text_through_a_tokenizer(opened, refused, tmp_path, monkeypatch):
    monkeypatch.setattr("train.data.packed._BLOCK_BYTES", 10)
    tokenizer = tokenizer_json(tmp_path / "t.json")
    (tmp_path / "a.txt").write_text("one two\nthree one\n" * 20)
    (tmp_path / "b.txt").write_text("three\n")
    keys = {"source": "text", "tokenizer": tokenizer, "path": str(tmp_path / "?.txt")}
    data = opened(**keys)
    assert data.fingerprint["train_tokens"] == 81
    assert tokens_of(data, 20) == [1, 2, 3, 1] * 20 + [3]
    (tmp_path / "b.txt").write_bytes(b"one\n" * 30 + b"tw\xf6\n")
    refused("b.txt:31: not UTF-8: byte 0xf6", **keys)


def test_what_can_be_wrong_with_a_tokenizer(opened, refused, tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", {"text": "one two"})
    nameless = tokenizer_json(tmp_path / "n.json", end_of_text="[STOP]")
    refused("n.json: no end-of-text token", source="jsonl", path=path, tokenizer=nameless)
    (tmp_path / "bad.json").write_text("{}")
    refused("bad.json: not a tokenizer.json", source="jsonl", path=path, tokenizer=str(tmp_path / "bad.json"))
    monkeypatch.setattr(sys.modules["train.data.tokenizer"], "tokenizers", None)
    refused("pip install 'jgt[tokenizers]'", source="jsonl", path=path, tokenizer=nameless)


def test_the_fingerprint_follows_the_contents(opened, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abcdefgh")
    first = opened(source="text", path=str(path)).fingerprint
    os.utime(path, ns=(1, 1))
    assert opened(source="text", path=str(path)).fingerprint == first
    path.write_bytes(b"abcdefgx")
    assert opened(source="text", path=str(path)).fingerprint != first
