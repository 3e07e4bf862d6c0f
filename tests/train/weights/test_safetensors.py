"""Parts of tensors against numpy, and folders of strangers, which are refused with file and tensor before anything of them is used."""

import json
import os
import pickle
import time

import numpy as np
import pytest
from hostile import Trap, assert_lines, watched
from hypothesis import given, settings
from hypothesis import strategies as st

from jgt.document import InputError
from train.files.disk import DiskError
from train.weights import safetensors
from train.weights.foreign import inside, read_json
from train.weights.safetensors import DTYPES, INDEX, SINGLE, open_folder

TWO = {"a": ("F32", [2, 3], [0, 24]), "b": ("BF16", [4], [24, 32])}


def header(tensors):
    return {name: {"dtype": dtype, "shape": shape, "data_offsets": offsets} for name, (dtype, shape, offsets) in tensors.items()}


def content(values, data=32, *, length=None):
    """The bytes of a file: values as header, and data or that many bytes of it."""
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    data = bytes(range(data)) if isinstance(data, int) else data
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def problems_of(folder):
    with watched(folder), pytest.raises(InputError) as caught:
        open_folder(folder)
    assert_lines(caught.value.problems)
    return caught.value.problems


@pytest.fixture
def indexed(tmp_path):
    """A folder with an index and two files. Writes it anew with another mapping of tensors to files."""

    def write(weight_map):
        (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": weight_map}))

    (tmp_path / "x.safetensors").write_bytes(content(header({"a": TWO["a"]}), 24))
    (tmp_path / "y.safetensors").write_bytes(content(header({"b": ("BF16", [4], [0, 8])}), 8))
    write({"a": "x.safetensors", "b": "y.safetensors"})
    return tmp_path, write


def test_tensors_have_type_shape_and_place(tmp_path):
    (tmp_path / SINGLE).write_bytes(content({"__metadata__": {"format": "pt"}} | header(TWO)))
    folder = open_folder(tmp_path)
    a, b = (folder.tensors[name] for name in "ab")
    assert list(folder.tensors) == ["a", "b"]
    assert (a.dtype, a.shape, a.nbytes, b.dtype, b.shape) == (np.float32, (2, 3), 24, DTYPES["BF16"], (4,))
    assert b.offset - a.offset == 24
    np.testing.assert_array_equal(folder.read("a"), np.frombuffer(bytes(range(24)), np.float32).reshape(2, 3))


def test_an_index_joins_files(indexed):
    folder = open_folder(str(indexed[0]))
    assert {name: tensor.file.name for name, tensor in folder.tensors.items()} == {"a": "x.safetensors", "b": "y.safetensors"}
    assert folder.read("b").tobytes() == bytes(range(8))


@st.composite
def parts(draw):
    """A shape, slices of it that may be fewer than its dims, and a type."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    cuts = [draw(st.slices(size).filter(lambda cut: (cut.step or 1) > 0)) for size in shape[: draw(st.integers(0, len(shape)))]]
    return shape, cuts, draw(st.sampled_from(sorted(DTYPES)))


@settings(max_examples=200, deadline=None)
@given(parts())
def test_a_part_is_what_numpy_cuts_and_no_other_byte_is_read(tmp_path_factory, part):
    shape, cuts, kind = part
    folder = tmp_path_factory.mktemp("part")
    count = int(np.prod(shape)) * DTYPES[kind].itemsize
    data = np.random.default_rng(0).integers(0, 2, count, np.uint8).tobytes()
    (folder / SINGLE).write_bytes(content(header({"before": ("U8", [3], [0, 3]), "x": (kind, shape, [3, 3 + count])}), b"abc" + data))
    wanted = np.frombuffer(data, DTYPES[kind]).reshape(shape)[tuple(cuts)]
    seen = []
    real = os.preadv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", lambda file, views, at: seen.append((at, sum(map(len, views)))) or real(file, views, at))
        found = open_folder(folder).read("x", cuts)
    assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
    # Between the elements of the last dim all bytes are read.
    near = [*cuts[:-1], slice(*cuts[-1].indices(shape[-1])[:2])] if len(cuts) == len(shape) > 0 else cuts
    assert sum(size for _, size in seen) == np.frombuffer(data, DTYPES[kind]).reshape(shape)[tuple(near)].nbytes * bool(wanted.size)
    assert len(set(seen)) == len(seen)


def test_whole_rows_are_one_read_and_never_the_memory_of_another(tmp_path, monkeypatch):
    (tmp_path / SINGLE).write_bytes(content(header({"x": ("U8", [8, 4], [0, 32])})))
    folder = open_folder(tmp_path)
    reads = []
    monkeypatch.setattr(os, "preadv", lambda file, views, at: reads.append(len(views[0])) or len(views[0]))
    first, second = (folder.read("x", [slice(2, 6)]) for _ in range(2))
    assert reads == [16, 16] and not np.shares_memory(first, second) and first.flags.owndata


def test_a_slice_that_goes_backward_or_for_another_dim_is_an_error(tmp_path):
    (tmp_path / SINGLE).write_bytes(content(header(TWO)))
    folder = open_folder(tmp_path)
    with pytest.raises(ValueError, match="a: a slice goes backward"):
        folder.read("a", [slice(None, None, -1)])
    with pytest.raises(ValueError, match="zip"):
        folder.read("b", [slice(1), slice(1)])


def test_a_file_that_becomes_shorter_is_an_error_of_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    (tmp_path / SINGLE).write_bytes(content(header(TWO)))
    folder = open_folder(tmp_path)
    os.truncate(tmp_path / SINGLE, folder.tensors["b"].offset + 2)
    assert folder.read("a").nbytes == 24
    with pytest.raises(DiskError, match=r"model\.safetensors: the file became shorter after it was opened \('b'\)"):
        folder.read("b")


def one(**changes):
    """A header with the tensor `a`, changed."""
    return {"a": {"dtype": "U8", "shape": [32], "data_offsets": [0, 32]} | changes}


def nested(depth):
    return b'{"a":' * depth + b"1" + b"}" * depth


FILES = {
    "empty": (b"", "its header has 0 bytes by the first 8 bytes, but the file has 0 bytes"),
    "seven bytes": (b"1234567", "but the file has 7 bytes"),
    "header of no bytes": (content(b""), "is not valid JSON: Expecting value"),
    "header longer than the file": (content(one(), length=1000), "its header has 1,000 bytes by the first 8 bytes, but the file has"),
    "header of 2^64 bytes": (content(one(), length=2**64 - 1), "its header has 18,446,744,073,709,551,615 bytes"),
    "header shorter than it is": (content(one(), length=20), "is not valid JSON"),
    "pointer of Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "is a pointer of Git LFS to the file. Fetch the file",
    ),
    "pickle": (pickle.dumps(Trap()), "its header has"),
    "header that is a list": (content([1]), "is not a mapping, but [1]"),
    "header that is not UTF-8": (content(b'{"\xff": 1}'), "is not valid JSON: 'utf-8' codec"),
    "header in UTF-16": (content(json.dumps(one()).encode("utf-16-le")), "is not valid JSON"),
    "header nested deeply": (content(nested(100_000)), "is not valid JSON: it is nested too deeply"),
    "header of lists nested deeply": (content(b"[" * 1_000_000), "is not valid JSON: it is nested too deeply"),
    "number of 5,000 digits": (content(b'{"a":' + b"1" * 5_000 + b"}"), "is not valid JSON: Exceeds the limit"),
    "name given twice": (content(b'{"a":{},"b":{},"a":{}}'), "is not valid JSON: 'a' is given twice"),
    "key given twice": (content(b'{"a":{"dtype":"U8","dtype":"U8"}}'), "is not valid JSON: 'dtype' is given twice"),
    "tensor that is a list": (content({"a": []}), "a: is not a mapping with dtype, shape and data_offsets, but []"),
    "tensor without offsets": (content({"a": {"dtype": "U8", "shape": [32]}}), "a: is not a mapping with dtype, shape and data_offsets"),
    "tensor with another key": (content(one(file="/etc/passwd")), "a: is not a mapping with dtype, shape and data_offsets"),
    "unknown dtype": (content(one(dtype="O")), "a: dtype: 'O' is not read. Allowed are BOOL, U8, "),
    "dtype that is a list": (content(one(dtype=["U8"])), "a: dtype: ['U8'] is not read"),
    "elements that share bytes": (content(one(dtype="F4", shape=[64])), "a: dtype: 'F4' is not read"),
    "negative size": (content(one(shape=[-1, -32])), "a: shape: [-1, -32] is not a list of at most 32 sizes"),
    "fraction as size": (content(one(shape=[32.0])), "a: shape: [32.0] is not a list"),
    "true as size": (content(one(shape=[True, 32])), "a: shape: [True, 32] is not a list"),
    "shape that is text": (content(one(shape="32")), "a: shape: '32' is not a list"),
    "too many dims": (content(one(shape=[1] * 33)), "is not a list of at most 32 sizes"),
    "NaN as size": (content(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,32]}}'), "a: shape: [nan] is not a list"),
    "shape of 2^120 elements": (content(one(shape=[2**60, 2**60])), "a: data_offsets: has 32 bytes, but U8[11529"),
    "shape of fewer bytes": (content(one(shape=[3, 10])), "a: data_offsets: has 32 bytes, but U8[3, 10] needs 30"),
    "offsets backwards": (content(one(data_offsets=[32, 0])), "a: data_offsets: has -32 bytes, but U8[32] needs 32"),
    "one offset": (content(one(data_offsets=[32])), "a: data_offsets: [32] is not the first byte and the last"),
    "negative offset": (content(one(data_offsets=[-8, 24])), "a: data_offsets: [-8, 24] is not the first byte and the last"),
    "overlap": (
        content(header(TWO | {"b": ("BF16", [4], [20, 28])}), 28),
        "b: data_offsets: begins at byte 20, but a ends at byte 24. No byte",
    ),
    "the same bytes twice": (
        content(header({"a": TWO["a"], "b": TWO["a"]}), 24),
        "b: data_offsets: begins at byte 0, but a ends at byte 24",
    ),
    "hole": (content(header(TWO | {"b": ("BF16", [4], [26, 34])}), 34), "b: data_offsets: begins at byte 26, but a ends at byte 24"),
    "hole in front": (content(one(data_offsets=[8, 40]), 40), "a: data_offsets: begins at byte 8, but the header ends at byte 0"),
    "hole at the end": (content(one(), 40), "a: data_offsets: the tensors end at byte 32, but the file at 40"),
    "outside of the file": (content(one(data_offsets=[2**61, 2**61 + 32])), f"a: data_offsets: begins at byte {2**61:,}"),
    "cut short": (content(header(TWO), 30), "b: data_offsets: the tensors end at byte 32, but the file at 30. It may be cut short"),
    "data without tensors": (content({}), "the header: data_offsets: the tensors end at byte 0, but the file at 32"),
    "name that a terminal obeys": (content({"\x1b[2J\n": 1}), r"\x1b[2J\n: is not a mapping"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused(name, tmp_path):
    data, message = FILES[name]
    (tmp_path / SINGLE).write_bytes(data)
    problems = problems_of(tmp_path)
    assert all(problem.startswith(f"{tmp_path / SINGLE}: ") for problem in problems) and message in problems[0]


def test_everything_that_is_wrong_is_reported_at_once(indexed):
    folder, write = indexed
    (folder / "x.safetensors").write_bytes(content(header({"a": ("F9", [2], [0, 8]), "c": ("F32", [2], [8, 15])}), 24))
    write({"a": "x.safetensors", "b": "y.safetensors", "d": "y.safetensors", "e": "z.safetensors"})
    x, lost, z = problems_of(folder)[0:2], problems_of(folder)[2], problems_of(folder)[3]
    assert [problem.split(": ")[1] for problem in x] == ["a", "c"]
    assert lost == f"{folder / INDEX}: d: is not in y.safetensors, as the index says. Fetch both again"
    assert z == f"{folder / 'z.safetensors'}: cannot be read: No such file or directory"


MAPS = {
    "a list": [1],
    "nothing": {},
    "a number as file": {"a": 1},
    "a file above": {"a": "../x.safetensors"},
    "an absolute file": {"a": "/etc/x.safetensors"},
    "a file below": {"a": "sub/x.safetensors"},
    "a pickle": {"a": "x.bin"},
    "a zero byte": {"a": "x\0.safetensors"},
    "a long name": {"a": "x" * 300 + ".safetensors"},
}


@pytest.mark.parametrize("name", MAPS)
def test_a_hostile_index_is_refused(name, indexed):
    folder, write = indexed
    write(MAPS[name])
    (problem,) = problems_of(folder)
    assert "weight_map: is not a mapping of tensors" in problem or "Allowed is the name of a" in problem or "File name too long" in problem


def test_a_tensor_in_two_files_is_refused(indexed):
    folder, write = indexed
    (folder / "y.safetensors").write_bytes((folder / "x.safetensors").read_bytes())
    write({"a": "x.safetensors", "b": "y.safetensors"})
    assert f"{folder / 'y.safetensors'}: a: is also in x.safetensors. A tensor has one file" in problems_of(folder)


@pytest.mark.parametrize("name", [SINGLE, INDEX])
def test_a_million_tensors_are_refused_within_a_second(name, tmp_path):
    if name == INDEX:
        text = json.dumps({"weight_map": {str(i): "a.safetensors" for i in range(1_000_000)}}).encode()
    else:
        text = content(
            b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}' % (i, i, i + 1) for i in range(1_000_000)), 0
        )
    (tmp_path / name).write_bytes(text)
    started = time.process_time()
    (problem,) = problems_of(tmp_path)
    assert time.process_time() - started < 1
    assert (
        "and a header at most 16,777,216" in problem or "has at least 999,001 tensors, which is more than the limit of 400,000" in problem
    )


def test_many_tensors_of_many_files_are_counted_together(indexed, monkeypatch):
    # The colons of the index beside its tensors.
    monkeypatch.setattr(safetensors, "_MAX_OTHERS", 3)
    assert len(open_folder(indexed[0], 2).tensors) == 2
    (indexed[0] / "y.safetensors").write_bytes(content(header(TWO | {"c": ("U8", [1], [32, 33])}), 33))
    with pytest.raises(InputError) as caught:
        open_folder(indexed[0], 2)
    problem = f"{indexed[0] / 'y.safetensors'}: has at least 2 tensors, which is more than the limit of 1"
    assert caught.value.problems == (problem,)


def test_a_folder_without_tensors_is_refused(tmp_path):
    (problem,) = problems_of(tmp_path)
    assert problem.startswith(f"{tmp_path}: has neither {SINGLE} nor {INDEX}. Convert")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    (problem,) = problems_of(tmp_path)
    assert f"nor {INDEX}, only 'pytorch_model.bin', a pickle. Convert" in problem
    (problem,) = problems_of(tmp_path / "pytorch_model.bin")
    assert problem.endswith("pytorch_model.bin: cannot be read: Not a directory")


ODD = {
    "link to nothing": (lambda path: path.symlink_to("nothing"), "cannot be read: No such file or directory"),
    "link to itself": (lambda path: path.symlink_to(path.name), "cannot be read: Too many levels of symbolic links"),
    "link to a device": (lambda path: path.symlink_to("/dev/zero"), "leads to /dev/zero, outside of the folder, and is not read"),
    "pipe": (os.mkfifo, "cannot be read: it is a named pipe, not a file"),
    "folder": (lambda path: path.mkdir(), "cannot be read: it is a folder, not a file"),
}


@pytest.mark.parametrize("place", [SINGLE, INDEX])
@pytest.mark.parametrize("name", ODD)
def test_what_is_not_a_file_of_the_folder_is_not_read(name, place, tmp_path):
    make, message = ODD[name]
    make(tmp_path / place)
    (problem,) = problems_of(tmp_path)
    assert problem.startswith(f"{tmp_path / place}: {message}")


def test_a_link_is_followed_inside_of_the_folder_and_to_the_blobs_of_its_cache_only(tmp_path):
    folder, blobs = tmp_path / "models--a--b" / "snapshots" / "1f", tmp_path / "models--a--b" / "blobs"
    for made in (folder, blobs, tmp_path / "other"):
        made.mkdir(parents=True)
    for file in (blobs / "abc", folder / "real.safetensors", tmp_path / "other" / "abc", blobs.parent / "abc"):
        file.write_bytes(content(header(TWO)))
    for target in ("real.safetensors", "../../blobs/abc"):
        (folder / SINGLE).symlink_to(target)
        assert open_folder(folder).read("b").nbytes == 8
        (folder / SINGLE).unlink()
    for target in ("../../abc", "../../../other/abc", tmp_path / "other" / "abc"):
        (folder / SINGLE).symlink_to(target)
        assert "outside of the folder, and is not read" in problems_of(folder)[0]
        (folder / SINGLE).unlink()
    with pytest.raises(InputError, match="outside of the folder"):
        inside(folder, "../../abc")


def test_json_of_a_stranger_is_read_with_limits(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"a": {"b": [1, null]}}')
    assert read_json(file, 100) == {"a": {"b": [1, None]}}
    for text, message in ((nested(100_000), "too deeply"), (b'{"a": 1, "a": 2}', "'a' is given twice"), (b"[]", "not a mapping, but []")):
        file.write_bytes(text)
        with pytest.raises(InputError) as caught:
            read_json(file, 1 << 20)
        assert str(caught.value).startswith(f"{file}: is not") and message in str(caught.value)
    with pytest.raises(InputError, match="larger than 1 bytes"):
        read_json(file, 1)
