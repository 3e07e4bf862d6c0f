"""Folders that are written: read back, compared with the format, and killed or cut off from power at any moment."""

import fcntl
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from disk import Power, build, read_log, variables

from jgt.document import InputError
from train.weights.safetensors import DTYPES, INDEX, open_folder
from train.weights.writing import write_folder


def example(count=7):
    """Tensors of all types and of shapes with and without elements, by name."""
    rng = np.random.default_rng(0)
    shapes = [(), (3,), (0, 2), (2, 3), (5, 1, 2)]
    kinds = sorted(DTYPES)
    arrays = {}
    for i in range(count):
        dtype, shape = DTYPES[kinds[i % len(kinds)]], shapes[i % len(shapes)]
        arrays[f"layers.{i}.weight"] = rng.integers(0, 2, int(np.prod(shape)) * dtype.itemsize, np.uint8).view(dtype).reshape(shape)
    return arrays


def write(path, arrays, *, files=None, most=1 << 30, order=None):
    wanted = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    write_folder(path, wanted, ((name, (), arrays[name]) for name in order or arrays), files=files or {}, max_file_bytes=most)


@pytest.mark.parametrize("most", [1, 40, 1 << 30])
def test_what_is_read_is_what_was_written_in_any_order(most, tmp_path):
    arrays = example(40)
    write(tmp_path / "out", arrays, most=most, order=sorted(arrays, reverse=True))
    folder = open_folder(tmp_path / "out")
    assert folder.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        found = folder.read(name)
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    files = {}
    for name, tensor in folder.tensors.items():
        assert tensor.offset % tensor.dtype.itemsize == 0
        files.setdefault(tensor.file, []).append(name)
    assert all(len(names) == 1 or sum(arrays[name].nbytes for name in names) <= most for names in files.values())
    assert (len(files) == 1) == (most == 1 << 30)


def test_the_files_are_as_transformers_needs_them(tmp_path):
    arrays = {name: np.full((2, 2), i, np.float32) for i, name in enumerate("abc")}
    (tmp_path / "tokenizer.json").write_text("{}")
    write(tmp_path / "out", arrays, most=32, files={"config.json": b"{ }", "tokenizer.json": tmp_path / "tokenizer.json"})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
        "tokenizer.json",
    ]
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{ }" and (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert json.loads((tmp_path / "out" / INDEX).read_text()) == {
        "metadata": {"total_size": 48},
        "weight_map": {"a": first, "b": first, "c": second},
    }
    data = (tmp_path / "out" / first).read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0 and json.loads(data[8 : 8 + size]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 32]},
    }
    assert data[8 + size :] == arrays["a"].tobytes() + arrays["b"].tobytes()


def test_an_array_in_another_order_of_memory_is_written_by_its_values(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write(tmp_path / "out", {"a": array})
    np.testing.assert_array_equal(open_folder(tmp_path / "out").read("a"), array)


def test_pieces_may_alternate(tmp_path):
    array = np.arange(4 * 6 * 10, dtype=np.float32).reshape(4, 6, 10)
    cuts = [(slice(None), slice(n, None, 3), slice(m, None, 2)) for n in range(3) for m in range(2)]
    pieces = (("x", cut, array[cut]) for cut in cuts[::-1])
    write_folder(tmp_path / "out", {"x": (array.dtype, array.shape)}, pieces, files={}, max_file_bytes=1 << 30)
    folder = open_folder(tmp_path / "out")
    np.testing.assert_array_equal(folder.read("x"), array)
    for cut in cuts:
        np.testing.assert_array_equal(folder.read("x", cut), array[cut])


def test_pieces_in_any_order_are_their_tensor(tmp_path):
    array = np.arange(5 * 4 * 6, dtype=np.int32).reshape(5, 4, 6)
    cuts = [(slice(a, a + 2), slice(b, b + 3), slice(c, c + 4)) for a in (0, 2, 4) for b in (0, 3) for c in (0, 4)]
    given = [("a", (a, b), array[a, b]) if c.start == 0 and a.start == 2 else ("a", (a, b, c), array[a, b, c]) for a, b, c in cuts]
    given = [piece for piece, (a, _, c) in zip(given, cuts, strict=True) if a.start != 2 or c.start == 0]
    write_folder(tmp_path / "out", {"a": (array.dtype, array.shape)}, given[::-1], files={}, max_file_bytes=1000)
    np.testing.assert_array_equal(open_folder(tmp_path / "out").read("a"), array)


TAKEN = {
    "a file": lambda path: path.write_text("x"),
    "a folder with a file": lambda path: (path.mkdir(), (path / "x").touch()),
    "a link to an empty folder": lambda path: (path.with_name("empty").mkdir(), path.symlink_to("empty")),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_at_the_path_already_stays(name, tmp_path):
    TAKEN[name](tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=r"out: is there already\. Name another folder, or remove it"):
        write(tmp_path / "out", example())
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_is_taken_and_folders_above_are_made(tmp_path):
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", example())
    write(tmp_path / "a" / "b" / "out", example())
    assert len(open_folder(tmp_path / "a" / "b" / "out").tensors) == len(open_folder(tmp_path / "out").tensors) == 7


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([("a", (), np.zeros(2, np.float32))], ValueError, r"a is float32\[2\], not float32\[3\]"),
        ([("a", (), np.zeros(3, np.float64))], ValueError, r"a is float64\[3\], not float32\[3\]"),
        ([("a", (slice(0, 2),), np.zeros(3, np.float32))], ValueError, r"a is float32\[3\], not float32\[2\]"),
        ([], ValueError, "not every element once of a"),
        ([("a", (slice(0, 2),), np.zeros(2, np.float32))], ValueError, "not every element once of a"),
        ([("a", (), np.zeros(3, np.float32))] * 2, ValueError, "not every element once of a"),
        ([("b", (), np.zeros(3, np.float32))], KeyError, "b"),
    ],
)
def test_an_error_leaves_nothing(given, error, message, tmp_path):
    with pytest.raises(error, match=message):
        write_folder(tmp_path / "out", {"a": (np.dtype(np.float32), [3])}, given, files={}, max_file_bytes=100)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_process_is_writing_is_left_alone(tmp_path):
    (tmp_path / "out.writing").mkdir()
    (tmp_path / "out.writing" / "x").touch()
    held = os.open(tmp_path / "out.writing", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(InputError, match=r"out\.writing: another process is writing it"):
        write(tmp_path / "out", example())
    assert [path.name for path in (tmp_path / "out.writing").iterdir()] == ["x"]
    os.close(held)
    write(tmp_path / "out", example())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from train.weights.writing import write_folder

arrays = {str(i): np.full((50, 50), i, np.float32) for i in range(10)}

def given():
    for name, array in arrays.items():
        print(name, flush=True)
        sys.stdin.readline()
        yield name, (), array

path = Path(sys.argv[1])
write_folder(path, {n: (x.dtype, x.shape) for n, x in arrays.items()}, given(), files={"config.json": b"{}"}, max_file_bytes=30_000)
print("done", flush=True)
"""


def is_whole(path):
    folder = open_folder(path)
    return (path / "config.json").read_bytes() == b"{}" and all((folder.read(str(i)) == i).all() for i in range(10))


def start(path, **variables):
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", WRITER, path], stdin=pipe, stdout=pipe, text=True, env=os.environ | variables)


@pytest.mark.parametrize("tensors", [0, 7])
def test_a_killed_process_leaves_no_folder_and_the_next_one_cleans_up(tensors, tmp_path):
    path = tmp_path / "out"
    process = start(path)
    for _ in range(tensors):
        process.stdout.readline()
        print(file=process.stdin, flush=True)
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.writing"]
    (tmp_path / "out.writing" / "left").mkdir()
    again = start(path)
    assert again.communicate("\n" * 10)[0].endswith("done\n") and again.returncode == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"] and is_whole(path) and not (path / "left").exists()


def test_a_power_cut_leaves_the_folder_whole_or_absent(tmp_path):
    top = tmp_path / "checkpoints"
    (tmp_path / "store").mkdir()
    environment = variables(log=tmp_path / "log", store=tmp_path / "store")
    process = start(top / "out", LD_PRELOAD=str(build(tmp_path)), **environment)
    assert process.communicate("\n" * 10)[0].endswith("done\n")
    lines = read_log(tmp_path / "log")
    found = []
    for cut in range(1, len(lines) + 1):
        Power(top, lines[:cut], tmp_path / "store").rebuild(tmp_path / str(cut))
        found.append((tmp_path / str(cut) / "out").exists())
        assert not found[-1] or is_whole(tmp_path / str(cut) / "out"), lines[cut - 1]
    assert found[-1] and not found[0]
