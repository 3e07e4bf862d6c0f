"""Copies of objects: whole or absent, shared by processes, within their limit, and those of the version that the store has."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from jgt.document import InputError
from train.files import cache as caches
from train.files.bucket import Bucket
from train.files.cache import ObjectCache

FETCH = """
import sys
from train.files import cache
from train.files.bucket import Bucket
cache._PIECE_BYTES = 1000
url, folder, *names = sys.argv[1:]
print(cache.ObjectCache(folder=folder).fetch(Bucket(url), names))
"""


@pytest.fixture
def bucket(tmp_path):
    made = Bucket(f"file://{tmp_path}/store")
    for name, size in (("a.bin", 2500), ("b/c.bin", 1000), ("empty", 0)):
        made.write(name, os.urandom(size))
    return made


@pytest.fixture
def end(monkeypatch):
    """Ends the use of all copies, as the end of the process does."""
    monkeypatch.setattr(caches, "_PIECE_BYTES", 1000)

    def _end():
        for file in caches._in_use.values():
            os.close(file)
        caches._in_use.clear()

    yield _end
    _end()


@pytest.fixture
def cache(tmp_path, end):
    return ObjectCache(folder=f"{tmp_path}/cache")


def blobs(cache):
    return sorted(path.name for path in (cache.path / "blobs").iterdir())


def are_equal(folder, bucket, names):
    return all((folder / name).read_bytes() == bucket.read(name).content for name in names)


def process(bucket, cache, *names):
    return subprocess.Popen([sys.executable, "-c", FETCH, bucket.url(), str(cache.path), *names], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, 1 << 20])
def test_the_size_of_an_object_is_found(bucket, size):
    bucket.write("x", bytes(size))
    assert bucket.size("x") == size


def test_copies_are_those_of_the_store_and_are_read_once(bucket, cache, end, monkeypatch):
    names = bucket.names()
    folder = cache.fetch(bucket, names)
    assert are_equal(folder, bucket, names) and len(blobs(cache)) == 3
    end()
    reads, read = [], Bucket.read
    monkeypatch.setattr(Bucket, "read", lambda self, *place: reads.append(place) or read(self, *place))
    assert cache.fetch(bucket, names) == folder
    assert sorted(reads) == [(name, 0, 0) for name in names]


def test_a_copy_is_shared_by_sets_of_objects(bucket, cache):
    first = cache.fetch(bucket, ["a.bin"])
    second = cache.fetch(bucket, ["a.bin", "b/c.bin"])
    assert first != second and (first / "a.bin").samefile(second / "a.bin") and len(blobs(cache)) == 2


def test_another_version_is_another_copy(bucket, cache):
    old = cache.fetch(bucket, ["a.bin"])
    before = (old / "a.bin").read_bytes()
    bucket.write("a.bin", b"new")
    new = cache.fetch(bucket, ["a.bin"])
    assert (new / "a.bin").read_bytes() == b"new" and (old / "a.bin").read_bytes() == before


def test_a_version_that_changes_while_it_is_copied_is_refused(bucket, cache, monkeypatch):
    read = Bucket.read

    def changing(self, name, begin=0, end=None):
        if (begin, end) == (1000, 2000):
            bucket.write(name, bytes(2500))
        return read(self, name, begin, end)

    monkeypatch.setattr(Bucket, "read", changing)
    with pytest.raises(InputError, match=r"a\.bin: has changed while it was copied"):
        cache.fetch(bucket, ["a.bin"])
    monkeypatch.undo()
    assert not [name for name in blobs(cache) if not name.endswith(".part")]
    assert are_equal(cache.fetch(bucket, ["a.bin"]), bucket, ["a.bin"]) and len(blobs(cache)) == 1


def test_the_copies_that_were_not_used_for_the_longest_time_go(bucket, cache, end):
    small = ObjectCache(folder=str(cache.path), most_bytes=3600)
    first = small.fetch(bucket, ["a.bin"]) / "a.bin"
    os.utime(first, (1, 0))
    second = small.fetch(bucket, ["b/c.bin"]) / "b/c.bin"
    end()
    bucket.write("d", bytes(200))
    third = small.fetch(bucket, ["d"]) / "d"
    assert not first.exists() and second.exists() and third.exists()


@pytest.mark.parametrize("names", [["a.bin", "b/c.bin"], ["b/c.bin"]])
def test_a_cache_that_cannot_hold_what_is_read_is_refused(bucket, cache, names):
    small = ObjectCache(folder=str(cache.path), most_bytes=3000)
    kept = small.fetch(bucket, ["a.bin"]) / "a.bin" if len(names) == 1 else None
    with pytest.raises(InputError, match=r"has room for 0.0 MB, but what this run .* Raise data.cache_bytes"):
        small.fetch(bucket, names)
    assert kept is None or kept.exists()


@pytest.mark.parametrize("names", [["../x"], ["a//b"], ["a", "a/b"], ["a\nb"]])
def test_names_that_no_files_have_are_refused(bucket, cache, names):
    with pytest.raises(InputError, match="cannot be the name of a file"):
        cache.fetch(bucket, names)


def test_a_cache_may_be_moved_and_have_several_paths(bucket, cache, end, tmp_path):
    cache.fetch(bucket, ["a.bin"])
    end()
    cache.path.rename(tmp_path / "moved")
    copy = ObjectCache(folder=f"{tmp_path}/moved").fetch(bucket, ["a.bin"])
    assert are_equal(copy, bucket, ["a.bin"])
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    with pytest.raises(InputError, match="has room for"):
        ObjectCache(folder=f"{tmp_path}/link", most_bytes=2500).fetch(bucket, ["b/c.bin"])
    assert are_equal(copy, bucket, ["a.bin"])


def test_two_processes_copy_an_object_once(bucket, cache):
    children = [process(bucket, cache, "a.bin", "b/c.bin") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda child: child.communicate()[0], children))
    assert folders[0] == folders[1] != "" and len(blobs(cache)) == 2
    assert are_equal(cache.fetch(bucket, ["a.bin", "b/c.bin"]), bucket, ["a.bin", "b/c.bin"])


def test_a_killed_process_leaves_nothing_that_is_used(bucket, cache):
    bucket.write("large", os.urandom(3_000_000))
    child = process(bucket, cache, "large", "a.bin")
    while not list((cache.path / "blobs").glob("*.part")) and child.poll() is None:
        pass
    child.kill()
    child.communicate()
    assert child.returncode == -9
    assert are_equal(cache.fetch(bucket, ["large", "a.bin"]), bucket, ["large", "a.bin"]) and len(blobs(cache)) == 2
