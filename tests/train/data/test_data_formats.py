"""Parquet, Arrow, packed files and token files with headers: the same batches as from plain files, and a message for each wrong one."""

import gzip
import json
import os
import struct

import numpy as np
import pytest

from jgt.document import InputError
from train.data.config import DataConfig
from train.data.opening import open_data

TEXTS = ["abc", "", "défg" * 30, *(f"document {i}" for i in range(300))]


@pytest.fixture
def opened(tmp_path):
    def _open(name, vocab=256, where=lambda key: "", **keys):
        config = DataConfig(**{"eval_tokens": 0, "path": str(tmp_path / name), **keys})
        return open_data(config, seq=4, vocab=vocab, seed=3, cache_dir=tmp_path / "cache", where=where)

    return _open


@pytest.fixture
def refused(opened):
    def _refused(name, *expected, **keys):
        with pytest.raises(InputError) as caught:
            opened(name, **keys)
        problems = caught.value.problems
        assert len(problems) == len(expected), problems
        for problem, part in zip(problems, expected, strict=True):
            assert part in problem

    return _refused


def batches(data):
    """Some batches of two epochs, and the held-out ones."""
    train = list(data.train_batches(5, 8, range(8), 2 * data.train_sequences // 8))
    return [batch["inputs"].tolist() for batch in (*train, *data.eval_batches(8, range(8)))]


def write_jsonl(path, texts=TEXTS, field="text"):
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))


def table(field="text", kind="string", texts=TEXTS):
    pyarrow = pytest.importorskip("pyarrow")
    column = pyarrow.array(texts, pyarrow.string())
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pyarrow, kind)())
    return pyarrow.table({"id": pyarrow.array(range(len(texts))), field: column})


def write_columns(path, table, form, **options):
    pyarrow = pytest.importorskip("pyarrow")
    if form == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path, **options)
        return
    open_writer = pyarrow.ipc.new_file if form == "file" else pyarrow.ipc.new_stream
    with open_writer(str(path), table.schema, options=pyarrow.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=100)


# -- columns -----------------------------------------------------------------------------------------------------

FORMS = [
    ("parquet", "a.parquet", {"row_group_size": 70}, "string"),
    ("parquet", "a.pq", {"compression": "zstd"}, "large_string"),
    ("file", "a.arrow", {}, "string"),
    ("file", "a.feather", {"compression": "lz4"}, "dictionary"),
    ("stream", "a.ipc", {}, "binary"),
]


@pytest.mark.parametrize(("form", "name", "options", "kind"), FORMS, ids=[name for _, name, _, _ in FORMS])
def test_the_same_texts_give_the_same_batches_in_every_format(opened, tmp_path, form, name, options, kind):
    write_columns(tmp_path / name, table(kind=kind), form, **options)
    write_jsonl(tmp_path / "a.jsonl")
    source = "parquet" if form == "parquet" else "arrow"
    data = opened(name, source=source, eval_tokens=100)
    assert batches(data) == batches(opened("a.jsonl", source="jsonl", eval_tokens=100))
    assert data.fingerprint["source"] == source


def test_a_column_is_named_once_for_all_files(opened, refused, tmp_path):
    for name in ("a.parquet", "b.parquet", "c.parquet"):
        write_columns(tmp_path / name, table("content"), "parquet")
    write_columns(tmp_path / "a.arrow", table("content"), "stream")
    lines = {"data.field": "run.yaml:7", "data.path": "run.yaml:6"}
    where = lines.__getitem__
    message = "/a.parquet: has no column 'text' (and 2 others). It has: 'id', 'content'. Set data.field=content"
    refused("*.parquet", message, source="parquet", where=where)
    with pytest.raises(InputError, match=r"^run\.yaml:7: /.*/a\.arrow: has no column 'text'\. It has: .* Set data\.field=content$"):
        opened("a.arrow", source="arrow", where=where)
    refused(
        "a.parquet", "the column 'id' is int64, not text. It has: 'id', 'content'. Set data.field=content", source="parquet", field="id"
    )
    assert opened("*.parquet", source="parquet", field="content").fingerprint["files"] == 3


def test_columns_that_cannot_be_read(refused, tmp_path):
    def damaged(name, *messages):
        refused(name, *messages, source="parquet" if name.endswith("parquet") else "arrow")

    write_columns(tmp_path / "nulls.parquet", table(texts=["a", None, "b"]), "parquet")
    damaged("nulls.parquet", "nulls.parquet: row 2: the column 'text' is null. Remove the row")
    write_columns(tmp_path / "none.parquet", table(texts=[]), "parquet")
    damaged("none.parquet", "none.parquet: the file is empty: it contains no documents")
    write_columns(tmp_path / "none.arrow", table(texts=[]), "stream")
    damaged("none.arrow", "none.arrow: the file is empty: it contains no documents")
    (tmp_path / "empty.arrow").touch()
    damaged("empty.arrow", "empty.arrow: the file is empty")
    for form, name in (("parquet", "cut.parquet"), ("file", "cut.arrow"), ("stream", "cut.ipc")):
        write_columns(tmp_path / name, table(), form)
        os.truncate(tmp_path / name, (tmp_path / name).stat().st_size // 2)
        damaged(name, f"{name}: the {'Parquet' if form == 'parquet' else 'Arrow'} data is damaged or cut short, after row")
    (tmp_path / "text.parquet").write_text("no columns here" * 9)
    damaged("text.parquet", "text.parquet: the Parquet data is damaged or cut short, after row 0")
    (tmp_path / "old.feather").write_bytes(b"FEA1" + bytes(90))
    damaged("old.feather", "old.feather: a Feather file of version 1. Write it as version 2")
    bad = table(kind="binary", texts=["good", "x"])
    pyarrow = pytest.importorskip("pyarrow")
    bad = bad.set_column(1, "text", pyarrow.array([b"good", b"caf\xe9"]))
    write_columns(tmp_path / "latin.arrow", bad, "file")
    damaged("latin.arrow", "latin.arrow: row 2: not UTF-8: byte 0xe9 at offset 3 of the text")


def test_a_dictionary_that_expands_too_far_is_refused(refused, tmp_path, monkeypatch):
    monkeypatch.setattr("train.data.packed.MAX_EXPANDED", 1000)
    write_columns(tmp_path / "a.parquet", table(texts=["x" * 10_000] * 10_000), "parquet")
    refused("a.parquet", "times as large as the file, too much for text", source="parquet")


@pytest.mark.parametrize("seed", [*range(9), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(9, 300))])
def test_a_flipped_byte_is_a_message_or_a_text(opened, tmp_path, seed):
    rng = np.random.default_rng(seed)
    form, name = [("parquet", "a.parquet"), ("file", "a.arrow"), ("stream", "a.ipc")][seed % 3]
    write_columns(tmp_path / name, table(), form)
    contents = bytearray((tmp_path / name).read_bytes())
    for at in rng.integers(len(contents), size=3):
        contents[at] ^= 1 << rng.integers(8)
    (tmp_path / name).write_bytes(contents)
    try:
        assert opened(name, source="parquet" if form == "parquet" else "arrow").train_sequences > 0
    except InputError as error:
        assert all(name in problem for problem in error.problems)


# -- packed files ------------------------------------------------------------------------------------------------


def pack(path, contents):
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(contents))
        return
    zstandard = pytest.importorskip("zstandard")
    half = len(contents) // 2
    # Two frames, and between them one that readers skip.
    parts = [zstandard.compress(contents[:half]), struct.pack("<II5s", 0x184D2A50, 5, b"aside"), zstandard.compress(contents[half:])]
    path.write_bytes(b"".join(parts))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("source", ["jsonl", "text"])
def test_packed_files_are_unpacked(opened, tmp_path, source, suffix):
    write_jsonl(tmp_path / "a.jsonl")
    contents = (tmp_path / "a.jsonl").read_bytes()
    if source == "text":
        # To the byte tokenizer, text is any bytes.
        contents += b"\xff\n\xc3"
        (tmp_path / "a.jsonl").write_bytes(contents)
    pack(tmp_path / f"a.jsonl{suffix}", contents)
    assert batches(opened(f"a.jsonl{suffix}", source=source)) == batches(opened("a.jsonl", source=source))


def test_damaged_zstandard_files(refused, opened, tmp_path):
    zstandard = pytest.importorskip("zstandard")
    lines = "".join(json.dumps({"text": str(i**9)}) + "\n" for i in range(30_000)).encode()
    whole = zstandard.compress(lines)
    for name, contents in {
        "cut": whole[: len(whole) // 2],
        "end": whole[:-1],
        "not": b'{"text": "plain"}\n',
        "more": whole + b"garbage",
    }.items():
        (tmp_path / f"{name}.jsonl.zst").write_bytes(contents)
        (tmp_path / f"{name}.txt.zst").write_bytes(contents)
        for source, suffix in (("jsonl", "jsonl"), ("text", "txt")):
            with pytest.raises(InputError, match=r"zst:\d+: the Zstandard data is damaged or cut short: .*Create or download"):
                opened(f"{name}.{suffix}.zst", source=source)
    (tmp_path / "bomb.txt.zst").write_bytes(zstandard.compress(b"x\n" * (1 << 26)))
    refused("bomb.txt.zst", "the data is more than 200 times as large as the file, too much for text", source="text")
    (tmp_path / "none.jsonl.zst").write_bytes(zstandard.compress(b""))
    refused("none.jsonl.zst", "none.jsonl.zst: the file is empty", source="jsonl")


# -- headers -----------------------------------------------------------------------------------------------------


def llm_c(ids, magic=20240520, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(ids) if count is None else count
    return header.tobytes() + np.asarray(ids, "<u2" if magic == 20240520 else "<u4").tobytes()


def index(lengths, code, version=1, count=None):
    """Megatron's: documents of one sequence each."""
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, len(lengths) if count is None else count, len(lengths) + 1)
    pointers = np.cumsum([0, *lengths])
    return head + np.asarray(lengths, "<i4").tobytes() + pointers[:-1].astype("<i8").tobytes() + np.arange(len(lengths) + 1).tobytes()


def tokens_of(data):
    (batch,) = data.train_batches(0, data.train_sequences, range(data.train_sequences), 1)
    return [int(batch["inputs"][0, 0]), *batch["targets"].ravel().tolist()]


@pytest.mark.parametrize("magic", [20240520, 20240801])
def test_headers_of_llm_c(opened, refused, tmp_path, magic):
    ids = np.arange(21) * 7
    (tmp_path / "a.bin").write_bytes(llm_c(ids, magic))
    data = opened("a.bin", source="tokens", shuffle=False)
    assert tokens_of(data) == ids.tolist()
    assert data.fingerprint["train_tokens"] == 21
    (tmp_path / "a.bin").write_bytes(llm_c(ids, magic)[:-4])
    refused("a.bin", f"its header of llm.c (magic {magic}, version 1) promises 21 ids of", source="tokens")
    (tmp_path / "a.bin").write_bytes(llm_c(ids, magic, count=-1))
    refused("a.bin", "promises -1 ids", source="tokens")
    (tmp_path / "a.bin").write_bytes(llm_c([], magic))
    refused("a.bin", "the file is empty: it contains no tokens", source="tokens")


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_the_index_of_megatron(opened, refused, tmp_path, code, dtype):
    ids = np.arange(21)
    (tmp_path / "a.bin").write_bytes(ids.astype(dtype).tobytes())
    (tmp_path / "a.idx").write_bytes(index([5, 0, 16], code))
    for name in ("a.bin", "*"):
        assert tokens_of(opened(name, source="tokens", shuffle=False)) == ids.tolist()
    (tmp_path / "a.idx").write_bytes(index([5, 17], code))
    refused("a.bin", "promises 22 ids of", source="tokens")
    for wrong in (
        index([21], 7),
        index([21], code, version=2),
        index([21], code, count=2**60),
        index([-1, 22], code),
        index([21], code)[:20],
        b"TNTIDX\0\0" + bytes(90),
    ):
        (tmp_path / "a.idx").write_bytes(wrong)
        refused("a.bin", "a.idx: is not an index of token ids of Megatron from 2020 or later, or is cut short or damaged", source="tokens")
    (tmp_path / "a.idx").write_bytes(b"something else")
    if code == 8:
        assert tokens_of(opened("a.bin", source="tokens", shuffle=False)) == ids.tolist()


STARTS = {
    "a .npy file": (b"\x93NUMPY\1\0", "set data.source=tokens"),
    "a Parquet file": (b"PAR1", "Set data.source=parquet"),
    "an Arrow file": (b"ARROW1\0\0", "Set data.source=arrow"),
    "Zstandard data": (b"\x28\xb5\x2f\xfd", "End its name in .zst"),
    "gzip data": (b"\x1f\x8b\x08\0", "End its name in .gz"),
    "a zip archive": (b"PK\3\4", "Unpack it"),
    "an index of Megatron's": (b"MMIDIDX\0\0", "Name the .bin file beside it"),
}


@pytest.mark.parametrize("what", STARTS)
def test_a_file_that_begins_like_another_format_is_never_read_as_tokens(refused, tmp_path, what):
    start, remedy = STARTS[what]
    for source, name in (("tokens", "a.bin"), ("text", "a.txt"), ("jsonl", "a.jsonl")):
        (tmp_path / name).write_bytes(start + bytes(1000 - len(start)))
        refused(name, f"{name}: begins like {what}. ", source=source)
        refused(name, remedy, source=source)


@pytest.mark.parametrize("magic", [20240326, 20240522])
def test_files_of_llm_c_without_tokens(refused, tmp_path, magic):
    (tmp_path / "a.bin").write_bytes(llm_c(range(50), magic))
    refused("a.bin", f"a file of llm.c that has no tokens (magic {magic})", source="tokens")
