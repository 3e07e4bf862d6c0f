"""Hostile data files: damaged, misleading or endless ones are refused when the data is opened, before the first step."""

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
from hostile import Trap, assert_lines, command, content, names, npy, npy_header, opened, saved, table, watched

from jgt.document import InputError

HEADER = "its header does not describe an array of numbers within 10,000 bytes"
NPYS = {
    "objects": (saved(np.array([Trap()], object), allow_pickle=True), "contains Python objects [1]"),
    "objects with a plain type": (npy(npy_header("'|O'"), pickle.dumps(Trap())), "contains Python objects [20]"),
    "records": (saved(np.zeros(3, [("a", "<i4"), ("b", "O")]), allow_pickle=True), HEADER),
    "floats": (saved(np.zeros(9)), "contains float64 [9]"),
    "complex numbers": (saved(np.zeros(9, complex)), "contains complex128 [9]"),
    "booleans": (saved(np.zeros(9, bool)), "contains bool [9]"),
    "texts": (saved(np.array(["a"])), "contains '<U1' [1]"),
    "dates": (saved(np.zeros(3, "M8[s]")), "contains '<M8[s]' [3]"),
    "two dims": (saved(np.zeros((3, 3), int)), "contains int64 [3, 3]"),
    "two dims in Fortran order": (saved(np.asfortranarray(np.zeros((3, 4), int))), "contains int64 [3, 4]"),
    "no dim": (saved(np.array(3)), "contains int64 []"),
    "no ids": (saved(np.zeros(0, int)), "the file is empty: it contains no tokens"),
    "negative ids": (saved(np.arange(-9, 9)), "token 0 is -9, but the vocabulary has 256 ids"),
    "large ids": (saved(np.array([2**64 - 1] * 9, np.uint64)), "token 0 is 18446744073709551615"),
    "ids that wrap": (saved(np.array([2**32 + 5] * 9)), "token 0 is 4294967301"),
    "large ids, big-endian": (saved(np.array([1, 256] * 5, ">u4")), "token 1 is 256"),
    "cut": (saved(np.arange(100))[:-1], "but 799 bytes follow"),
    "cut in its header": (saved(np.arange(100))[:50], HEADER),
    "cut in its magic": (saved(np.arange(100))[:5], "it does not begin like one"),
    "two arrays": (saved(np.arange(100)) * 2, "The file is cut short, or contains more than one array"),
    "empty": (b"", "the file is empty"),
    "an archive": (b"PK\x03\x04" + bytes(50), "it does not begin like one"),
    "a pickle": (pickle.dumps(Trap()), "it does not begin like one"),
    "YAML": (b"train: {}", "it does not begin like one"),
    "a later version": (npy(npy_header(), version=9), "it does not begin like one"),
    "10^12 promised ids": (npy(npy_header(shape="(1000000000000,)"), bytes(80)), "its header promises 1000000000000 ids of 4 bytes"),
    "2^63 promised ids": (npy(npy_header(shape=f"({2**63},)"), bytes(80)), HEADER),
    "10^4000 promised ids": (npy(npy_header(shape=f"({'9' * 4000},)"), bytes(80)), HEADER),
    "-20 promised ids": (npy(npy_header(shape="(-20,)"), bytes(80)), HEADER),
    "2.5 promised ids": (npy(npy_header(shape="(2.5,)"), bytes(80)), HEADER),
    "99 dims": (npy(npy_header(shape=f"({'1,' * 99})"), bytes(4)), "contains int32 [1, 1, 1"),
    "text for a shape": (npy(npy_header(shape="'20'"), bytes(80)), HEADER),
    "true for a type": (npy(npy_header(descr="True"), bytes(80)), HEADER),
    "one key too many": (npy(npy_header(more="'a': 1"), bytes(80)), HEADER),
    "no keys": (npy("{}", bytes(80)), HEADER),
    "code for a header": (npy("__import__('os').mkdir('canary')", bytes(80)), HEADER),
    "code for a shape": (npy(npy_header(shape="__import__('os').mkdir('canary')"), bytes(80)), HEADER),
    "a header of brackets": (npy("(" * 9_000), HEADER),
    "a header of signs": (npy("-" * 9_000 + "1"), HEADER),
    "a header of sums": (npy("1+" * 4_000 + "1"), HEADER),
    "a header of spaces": (npy(npy_header(more=" " * 9_000 + "x")), HEADER),
    "a header of 60,000 bytes": (npy(" " * 60_000), HEADER),
    "a header of 4 GB": (npy(npy_header(), version=2, length=2**32 - 1), HEADER),
    "a long type": (npy(npy_header(repr("<i4," * 2_000)), bytes(80)), HEADER),
    "a type with a line end": (npy(npy_header(repr("<i4\n")), bytes(80)), HEADER),
    "ids of 3 bytes": (npy(npy_header("'<i3'"), bytes(60)), HEADER),
}
GZIP = gzip.compress(b'{"text": "abc"}\n')
DAMAGED_GZIPS = {
    "cut": GZIP[:-9],
    "cut in its header": GZIP[:5],
    "with garbage at its end": GZIP + b"garbage",
    "with another checksum": GZIP[:-8] + bytes(8),
}
FILES = (
    table("data_files")
    | {f"npy: {name}": {"file": "a.npy", "bytes": data, "message": message} for name, (data, message) in NPYS.items()}
    | {
        f"gzip {name}": {"file": "a.jsonl.gz", "bytes": data, "message": "the gzip data is damaged or cut short"}
        for name, data in DAMAGED_GZIPS.items()
    }
    | {"gzip in gzip": {"file": "a.jsonl.gz", "bytes": gzip.compress(GZIP), "message": "not UTF-8"}}
)
SOURCES = {".npy": "tokens", ".bin": "tokens", ".jsonl": "jsonl", ".gz": "jsonl", ".txt": "text"}


@pytest.mark.parametrize("name", names(FILES))
def test_a_hostile_data_file_is_refused(empty, name):
    file, message = FILES[name]["file"], FILES[name]["message"]
    (empty / file).write_bytes(content(FILES[name]))
    with watched(empty), pytest.raises(InputError) as caught:
        opened(empty, source=SOURCES[Path(file).suffix], path=file)
    assert_lines(caught.value.problems)
    assert any(message in problem for problem in caught.value.problems), caught.value.problems
    assert not (empty / "canary").exists()
    assert [path.name for path in empty.rglob("*") if path.is_file()] == [file]


@pytest.mark.parametrize(
    "name",
    [
        "npy: objects",
        "jsonl with NaN for a text",
        pytest.param("gzip of blank lines", marks=pytest.mark.slow),
        "text that is too short",
    ],
)
def test_a_hostile_data_file_ends_the_command(empty, name):
    file, message = FILES[name]["file"], FILES[name]["message"]
    (empty / file).write_bytes(content(FILES[name]))
    (empty / "run.yaml").write_text(
        f"model: {{layers: 1, embed: 8, heads: 2, seq: 4}}\ndata: {{source: {SOURCES[Path(file).suffix]}, path: {file}, eval_tokens: 0}}\n"
    )
    code, out, lines = command("--config", "run.yaml", "xla.cache=null")
    assert (code, out) == (2, "")
    assert [line for line in lines if line.startswith("run.yaml:2: ") and message in line] == lines
    assert not (empty / "canary").exists()


def test_npy_files_of_other_writers_are_read(empty):
    ids = list(range(20))
    variants = [
        npy("{'descr': '<i4', 'fortran_order': False, 'shape': (20,), }          \n", np.arange(20, dtype="<i4").tobytes()),
        npy("{'shape': (20L,), 'fortran_order': True, 'descr': '>i8'}", np.arange(20, dtype=">i8").tobytes(), version=2),
        npy('{"descr":"|u1","fortran_order":False,"shape":(20,)}', np.arange(20, dtype="u1").tobytes(), version=3),
        saved(np.arange(20, dtype="uint16")),
    ]
    for variant in variants:
        (empty / "a.npy").write_bytes(variant)
        (batch,) = opened(empty, source="tokens", path="a.npy", shuffle=False).train_batches(0, 4, range(4), 1)
        assert batch["inputs"].ravel().tolist() == ids[:16]
