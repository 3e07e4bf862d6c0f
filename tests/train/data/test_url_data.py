"""Data by URL: the same files in the same order as in a folder, the same batches, and the same refusals."""

import json
import os
import shutil

import numpy as np
import pytest
from buckets import Server

from jgt.document import InputError
from train.config import load
from train.data.config import DataConfig
from train.data.files import Finder
from train.data.opening import open_data
from train.data.paths import path_problems
from train.files.bucket import Bucket
from train.files.cache import ObjectCache

FILES = (
    "x/train-1.bin",
    "x/train-0.bin",
    "x/train-0.idx",
    "x/.hidden.bin",
    "x/.git/a.bin",
    "x/y/train-2.bin",
    "x/y/z/b.txt",
    "xy.bin",
    "b[1].bin",
)


@pytest.fixture
def folder(tmp_path):
    """A folder of files."""
    for n, name in enumerate(FILES):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(bytes(n + 1))
    return tmp_path / "data"


@pytest.fixture
def cache(tmp_path):
    return ObjectCache(folder=f"{tmp_path}/cache")


@pytest.fixture
def opened(tmp_path):
    """Opens data in a folder of its own."""

    def _open(**keys):
        keys = {"source": "tokens", "eval_tokens": 203, "cache": f"{tmp_path}/cache", **keys}
        return open_data(DataConfig(**keys), seq=5, vocab=2000, seed=1, cache_dir=tmp_path)

    return _open


def batches(data):
    return [*data.train_batches(0, 4, range(4), 9), *data.eval_batches(4, range(4))]


@pytest.mark.parametrize(
    "end", ["/x", "/x/", "/xy.bin", "/x/*.bin", "/x/**/*.bin", "/**", "/*/train-?.bin", "/x/.h*", "/*", "/x/*/**", "/nothing", "/n*"]
)
def test_a_url_names_the_files_that_a_path_names(folder, cache, end):
    local, copied = Finder().files(f"{folder}{end}"), Finder(cache).files(f"file://{folder}{end}")
    assert [path.relative_to(local.root) for path in local.paths] == [path.relative_to(copied.root) for path in copied.paths]
    assert local.digest() == copied.digest() and [p.read_bytes() for p in local.paths] == [p.read_bytes() for p in copied.paths]
    assert sorted(Finder(cache).names(f"file://{folder}{end}")) == sorted(f"file://{path}" for path in local.paths)


def test_an_index_is_copied_beside_its_file(folder, cache):
    for url in (f"file://{folder}/x/*-0.bin", f"file://{folder}/x/train-0.bin"):
        (path,) = Finder(cache).files(url).paths
        assert path.with_suffix(".idx").read_bytes() == bytes(3)


@pytest.mark.parametrize("source", ["tokens", "jsonl", "parquet", "text"])
def test_batches_are_those_of_a_folder(tmp_path, opened, source):
    there = tmp_path / "there"
    there.mkdir()
    texts = [f"{n} squared is {n * n}\n" for n in range(100)]
    if source == "tokens":
        for n in range(2):
            np.arange(n, 1000 + n, dtype=np.uint16).tofile(there / f"{n}.bin")
    elif source == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": texts}), there / "a.parquet")
    else:
        (there / f"a.{source}").write_text("".join(json.dumps({"text": text}) + "\n" if source == "jsonl" else text for text in texts))
    local, by_url = opened(source=source, path=str(there)), opened(source=source, path=f"file://{there}")
    assert local.fingerprint == by_url.fingerprint
    for ours, theirs in zip(batches(by_url), batches(local), strict=True):
        assert ours.keys() == theirs.keys() and all(np.array_equal(ours[key], theirs[key]) for key in ours)


def test_encoded_text_is_found_again_after_its_copy_was_removed(tmp_path, opened):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/a.jsonl").write_text("".join(json.dumps({"text": "abc" * n}) + "\n" for n in range(100)))
    opened(source="jsonl", path=f"file://{tmp_path}/there")
    shutil.rmtree(tmp_path / "cache")
    opened(source="jsonl", path=f"file://{tmp_path}/there")
    assert len(list(tmp_path.glob("*.bin"))) == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": "file://{}/none/*.bin"}, "no file matches file://{}/none/*.bin"),
        ({"path": "file://{}/none"}, "no such file or folder: file://{}/none"),
        (
            {"path": "file://{}/x"},
            "file://{}/x/y/z/b.txt is not a token file: its name must end in .bin or .npy. To choose among a folder's",
        ),
        ({"path": "file://{}/x/*.bin", "eval_path": "file://{}/x/train-0.bin"}, "file://{}/x/train-0.bin is training data too"),
    ],
)
def test_urls_are_checked_without_a_copy(folder, cache, keys, message):
    config = DataConfig(source="tokens", cache=cache.folder, **{key: url.format(folder) for key, url in keys.items()})
    assert message.format(folder) in " ".join(problem for _, problem in path_problems(config)) and not cache.path.exists()


@pytest.mark.parametrize(("url", "message"), [("ftp://a/b", "is not supported"), ("s3://", "names no bucket")])
def test_other_urls_are_refused(tiny_file, url, message):
    with pytest.raises(InputError, match=f"data.path: .*{message}"):
        load(tiny_file, ["data.source=tokens", f"data.path={url}"])


def test_a_store_that_cannot_be_read_is_one_line(monkeypatch):
    def fail(self, prefix=""):
        raise OSError(5, "PERMISSION_DENIED: no", self.url(prefix))

    monkeypatch.setattr(Bucket, "names", fail)
    assert list(path_problems(DataConfig(source="tokens", path="s3://bucket/x"))) == [
        ("path", "s3://bucket/x: cannot be read: PERMISSION_DENIED: no")
    ]


@pytest.mark.slow
def test_a_warm_cache_asks_s3_for_names_and_versions_alone(tmp_path, opened):
    pytest.importorskip("moto")
    server, before = Server("s3"), dict(os.environ)
    os.environ.update(server.environment)
    try:
        content = np.arange(1000, dtype=np.uint16)
        for n in range(3):
            Bucket(f"{server.url}/data").write(f"{n}.bin", content.tobytes())
            content.tofile(tmp_path / f"{n}.bin")
        url = f"{server.url}/data/*.bin"
        first = opened(path=url)
        server.faults()
        again, local = opened(path=url), opened(path=f"{tmp_path}/?.bin")
        for ours, theirs in zip(batches(again), batches(local), strict=True):
            assert all(np.array_equal(ours[key], theirs[key]) for key in ours)
        assert first.fingerprint == again.fingerprint == local.fingerprint
        asked = [method if "list-type" not in path else "LIST" for method, path, *_ in server.log()]
        assert sorted(asked) == ["GET", "GET", "HEAD", "HEAD", "HEAD"]
    finally:
        server.close()
        os.environ.clear()
        os.environ.update(before)
