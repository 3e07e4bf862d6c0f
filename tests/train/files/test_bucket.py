import os
import threading

import pytest
from buckets import Server

from jgt.document import InputError
from train.config import load
from train.files.bucket import ABSENT, Bucket, ChangedError, StoreError, bucket_problem


@pytest.fixture(scope="module", params=["file", "gs", pytest.param("s3", marks=pytest.mark.slow)])
def store(request, tmp_path_factory):
    """A store: its URL, and its server if it has one."""
    if request.param == "file":
        yield f"file://{tmp_path_factory.mktemp('store')}", None
        return
    if request.param == "s3":
        pytest.importorskip("moto")
    server, before = Server(request.param), dict(os.environ)
    os.environ.update(server.environment)
    yield server.url, server
    server.close()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def bucket(store, request):
    return Bucket(f"{store[0]}/{request.node.name.partition('[')[0]}")


def test_objects_are_written_read_listed_and_removed(bucket):
    bucket.write("a/1", b"hello")
    bucket.write("a/2", b"")
    bucket.write("b", b"other")
    assert bucket.read("a/1").content == b"hello" and bucket.read("a/1", 1, 3).content == b"el" and bucket.read("a/2").content == b""
    assert bucket.names() == ["a/1", "a/2", "b"] and bucket.names("a/") == ["a/1", "a/2"] and bucket.below("a").names() == ["1", "2"]
    bucket.remove(["a/1", "absent"])
    assert bucket.names() == ["a/2", "b"]
    with pytest.raises(FileNotFoundError, match=r"/a/1"):
        bucket.read("a/1")


def test_a_condition_decides_which_write_counts(bucket):
    first = bucket.write("x", b"1", ABSENT)
    with pytest.raises(ChangedError):
        bucket.write("x", b"2", ABSENT)
    second = bucket.write("x", b"2", first)
    with pytest.raises(ChangedError):
        bucket.write("x", b"3", first)
    with pytest.raises(ChangedError):
        bucket.write("x", None, first)
    assert bucket.read("x") == (b"2", second)
    bucket.write("x", None, second)
    assert bucket.names() == []
    bucket.check_conditions()
    assert bucket.names() == []


def test_of_many_creations_at_a_time_one_counts(bucket):
    created = []

    def create(number):
        try:
            bucket.write("x", b"%d" % number, ABSENT)
            created.append(b"%d" % number)
        except ChangedError:
            pass

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert created == [bucket.read("x").content]


@pytest.mark.parametrize("fault", ["lost", "error"])
def test_a_request_that_fails_is_repeated_and_its_own_write_is_known(bucket, store, fault):
    if store[1] is None:
        pytest.skip("a folder loses no answer")
    for number in (1, 2):
        store[1].faults(kind=fault, after=number)
        version = bucket.write(f"x{number}", b"mine", ABSENT)
        assert bucket.read(f"x{number}") == (b"mine", version)


def test_a_refused_request_says_nothing_about_the_object(bucket, store):
    if store[1] is None:
        pytest.skip("a folder has no credentials")
    bucket.write("x", b"1")
    store[1].faults(kind="error", after=1, always=True, status="403 Forbidden")
    for call in (lambda: bucket.read("x"), lambda: bucket.write("x", b"2"), bucket.names):
        with pytest.raises(StoreError) as failure:
            call()
        assert not isinstance(failure.value, FileNotFoundError)
    store[1].faults()
    assert bucket.read("x").content == b"1"


def test_a_store_without_conditions_is_refused(tmp_path, monkeypatch):
    bucket = Bucket(f"file://{tmp_path}/store")
    plain = Bucket.write
    monkeypatch.setattr(Bucket, "write", lambda self, name, content, version=None: plain(self, name, content))
    with pytest.raises(InputError, match="ignores the conditions of writes"):
        bucket.check_conditions()


def test_a_store_without_the_bucket_is_refused(tmp_path, monkeypatch):
    def missing(self, name, content, version=None):
        """TensorStore takes the answer 404 to a write for a condition that does not hold."""
        if version == ABSENT:
            raise ChangedError(name)

    monkeypatch.setattr(Bucket, "write", missing)
    with pytest.raises(InputError, match=r"the store has no such bucket\. Check the name of the bucket, or create it"):
        Bucket("s3://mistyped/run").check_conditions()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://bucket/run", None),
        ("gs://bucket", None),
        ("runs/q", None),
        ("s3://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("s3://B_/run", "names no bucket"),
        ("az://bucket/run", "is not supported. These are: s3://, gs://, and paths"),
    ],
)
def test_urls_are_checked(url, problem):
    found = bucket_problem(url)
    assert (found is None) == (problem is None) and (problem or "") in (found or "")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["run.dir=ftp://host/run"], "run.dir: 'ftp://host/run' is not supported"),
        (["run.spool=here"], "run.spool: belongs to a run in a bucket"),
        (["run.dir=s3://bucket/run", "checkpoint.sha256=true"], "checkpoint.sha256: is for checkpoints in folders"),
        (["run.dir=s3://bucket/run", "checkpoint.key=run.key"], "checkpoint.key: is for checkpoints in folders"),
        (["run.dir=s3://bucket/run", "debug={faults: [{at_step: 1, kind: corrupt}]}"], "corrupt is for runs in folders"),
    ],
)
def test_what_a_bucket_cannot_do_is_refused_before_anything_is_read(tiny_file, overrides, problem):
    with pytest.raises(InputError, match=problem.replace("[", r"\[")):
        load(tiny_file, overrides)


def test_a_run_in_a_bucket_has_a_local_folder(tiny_file):
    run = load(tiny_file, ["run.dir=s3://bucket/a/run/"]).config.run
    assert (str(run.path), run.url, run.place) == ("runs/tiny", "s3://bucket/a/run", "s3://bucket/a/run")
    assert run.checkpoints == "s3://bucket/a/run/checkpoints"
    assert str(load(tiny_file, ["run.dir=s3://bucket/a", "run.spool=/scratch/q"]).config.run.path) == "/scratch/q"
