"""Files that change while they are mapped, and the temporary files of encodings."""

import fcntl
import os

import numpy as np
import pytest

from train.data.config import DataConfig
from train.data.encoded import remove_leftovers
from train.data.mapped import DataChangedError
from train.data.opening import open_data
from train.data.tokens import map_bin, map_npy

SEQ = 4


def written(path, tokens, like=None):
    """Writes the tokens. like: the modification time comes from there."""
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    if like is not None:
        os.utime(path, ns=(like.st_atime_ns, like.st_mtime_ns))
    return path


@pytest.fixture(params=["tokens.bin", "tokens.npy"])
def mapped(request, tmp_path):
    """A mapped file of 100,000 ids, its path, and its state when it was mapped."""
    path = written(tmp_path / request.param, np.arange(100_000, dtype=np.uint16))
    opened = path.stat()
    return (map_npy(path) if path.suffix == ".npy" else map_bin(path, "uint16")).mapped, path, opened


def test_a_file_that_nobody_touched(mapped):
    mapped[0].check()
    mapped[0].check_contents()


@pytest.mark.parametrize("size", [1000, 150_000])
def test_another_size(mapped, size):
    file, path, _ = mapped
    os.truncate(path, size)
    for check in (file.check, file.check_contents):
        with pytest.raises(DataChangedError, match=rf"^{path}: has {size:,} bytes, but had 200,\d\d\d when the run opened it$"):
            check()


def test_another_modification_time(mapped):
    file, path, opened = mapped
    os.utime(path, ns=(0, opened.st_mtime_ns + 1))
    with pytest.raises(DataChangedError, match=rf"^{path}: was written after the run opened it \(modified at .*\)$"):
        file.check()


@pytest.mark.parametrize("where", [0, 50_000, 99_999])
def test_a_writer_without_a_trace_is_found_by_the_blocks(mapped, where):
    file, path, opened = mapped
    with path.open("r+b") as written_to:
        # All of the middle, because only some of its blocks are compared.
        written_to.seek(opened.st_size - 200_000 + 2 * where)
        written_to.write(b"\7" * min(40_000, 2 * (100_000 - where)))
    os.utime(path, ns=(0, opened.st_mtime_ns))
    file.check()
    with pytest.raises(DataChangedError, match="its contents changed after the run opened it"):
        file.check_contents()


def test_a_copy_in_its_place(mapped, tmp_path):
    file, path, opened = mapped
    new = tmp_path / f"new{path.suffix}"
    # As on network file systems that give a file a new inode now and then.
    written(new, np.arange(100_000, dtype=np.uint16), opened).replace(path)
    file.check()
    file.check_contents()
    written(new, np.arange(100_000, dtype=np.uint16)[::-1], opened).replace(path)
    with pytest.raises(DataChangedError, match="was replaced by a file with other contents"):
        file.check()


def test_a_file_that_is_gone_for_a_moment_and_for_good(mapped, tmp_path, monkeypatch):
    file, path, _ = mapped
    path.rename(tmp_path / "elsewhere")
    monkeypatch.setattr("time.sleep", lambda _: (tmp_path / "elsewhere").rename(path))
    file.check()
    path.unlink()
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(DataChangedError, match="can no longer be read: No such file or directory"):
        file.check()


def test_batches_and_their_ids_are_checked(tmp_path):
    path = written(tmp_path / "tokens.bin", np.zeros(1000, np.uint16))
    config = DataConfig(source="tokens", path=str(path), eval_tokens=100, shuffle=False)
    data, opened = open_data(config, seq=SEQ, vocab=256, seed=0, cache_dir=tmp_path / "cache"), path.stat()
    data.check()
    tokens = np.zeros(1000, np.uint16)
    tokens[[6, 950]] = 256
    written(path, tokens, opened)
    # [0, 4] is as it was.
    next(data.train_batches(0, 1, [0], 1))
    for batches in (data.train_batches(1, 1, [0], 1), data.eval_batches(100, range(100))):
        with pytest.raises(DataChangedError, match=f"{path}: contains the id 256, but had only ids from 0 to 255 when the run opened it"):
            next(batches)
    os.truncate(path, 10)
    for look in (lambda: next(data.train_batches(0, 1, [0], 1)), data.check):
        with pytest.raises(DataChangedError, match="has 10 bytes"):
            look()


def test_only_temporary_files_of_dead_processes_are_removed(tmp_path):
    names = [f"{'a' * 32}.{rest}" for rest in ("dead.tmp", "busy.tmp", "01234567.uint8.bin")] + ["mine.tmp"]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    os.mkfifo(tmp_path / f"{'a' * 32}.pipe.tmp")
    (tmp_path / f"{'a' * 32}.link.tmp").symlink_to(tmp_path / "mine.tmp")
    before = {path.name for path in tmp_path.iterdir()}
    with (tmp_path / names[1]).open("r+b") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        remove_leftovers(tmp_path)
        assert before - {path.name for path in tmp_path.iterdir()} == {names[0]}
    remove_leftovers(tmp_path)
    assert before - {path.name for path in tmp_path.iterdir()} == set(names[:2])
    remove_leftovers(tmp_path / "none")


def test_another_process_that_encodes_the_same_text_later_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abcdefgh"}\n' * 99)
    config, options = DataConfig(source="jsonl", path=str(path)), {"seq": SEQ, "vocab": 256, "seed": 0, "cache_dir": tmp_path / "cache"}
    data = open_data(config, **options)
    (cached,) = (tmp_path / "cache").iterdir()
    first = cached.stat().st_ino
    # It has begun before the file was there.
    monkeypatch.setattr("train.data.encoded._checksum", lambda path: "none")
    open_data(config, **options)
    assert list((tmp_path / "cache").iterdir()) == [cached] and cached.stat().st_ino != first
    next(data.train_batches(0, 1, [0], 1))
    data.check()
