import json
import shutil
import time

import pytest

from train.files import lease as leases
from train.files.bucket import Bucket, StoreError
from train.files.ends import InUseError
from train.files.lease import Lease, hold_lease, holder_of
from train.files.mirror import spool_of


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves, and sleeping moves too."""
    now = [0.0]
    monkeypatch.setattr(leases, "_now", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


@pytest.fixture
def bucket(tmp_path):
    return Bucket(f"file://{tmp_path}/store")


def taken(bucket, spool="a"):
    lease = Lease(bucket, 30.0, spool)
    lease.take()
    return lease


def test_a_lease_is_held_and_given_back(bucket):
    with hold_lease(bucket, 30.0, "a") as lease:
        assert lease.is_held() and holder_of(bucket) == lease.start
        lease.check()
    assert bucket.names() == [] and holder_of(bucket) is None


def test_a_lease_that_is_not_renewed_is_taken_when_its_time_is_over(bucket, clock):
    first = taken(bucket)
    second = taken(bucket, "b")
    assert 30 < clock[0] < 35
    assert holder_of(bucket) == second.start and second.is_certain()
    assert not first.is_certain()


def test_the_longer_time_of_two_starts_counts(bucket, clock):
    first = Lease(bucket, 300.0, "a")
    first.take()
    taken(bucket, "b")
    assert 300 < clock[0] < 305 and not first.is_certain()


def test_a_lease_that_is_renewed_is_not_taken(bucket, clock, monkeypatch):
    first = taken(bucket)

    def sleep(seconds):
        clock[0] += seconds
        first._write(first._version)

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(InUseError, match=r"another run \(process \d+ on .*\) is using file://"):
        taken(bucket, "b")
    assert clock[0] < 35 and first.is_certain()


def test_the_lock_on_the_folder_of_a_lease_is_reason_enough_to_take_it(bucket, clock):
    taken(bucket, "same")
    taken(bucket, "same")
    assert clock[0] == 0


def test_without_answers_a_lease_is_not_certain_but_nobody_stops(bucket, clock):
    lease = taken(bucket)
    clock[0] = 23.9
    assert lease.is_certain()
    clock[0] = 24.1
    assert not lease.is_certain()
    lease.check()


def test_a_holder_that_wakes_up_finds_that_it_has_lost_the_lease(bucket, clock):
    first = taken(bucket)
    second = taken(bucket, "b")
    first._renew_once()
    with pytest.raises(InUseError, match="another run has taken the lease"):
        first.check()
    clock[0] = 0
    assert not first.is_held()
    first.keep()
    first.release()
    assert holder_of(bucket) == second.start


def test_a_lease_that_was_removed_is_no_other_runs(bucket, clock):
    lease = taken(bucket)
    bucket.write("lease.json", None)
    lease._renew_once()
    with pytest.raises(InUseError, match="somebody has removed the lease of"):
        lease.check()


def test_a_copy_of_a_local_folder_takes_no_lease_at_once(tmp_path):
    (folder := tmp_path / "spool").mkdir()
    (folder / "spool.json").write_text('{"folder": "ab"}')
    shutil.copytree(folder, tmp_path / "copy")
    assert spool_of(folder) == spool_of(folder) != spool_of(tmp_path / "copy")
    folder.rename(tmp_path / "moved")
    assert spool_of(tmp_path / "moved") != spool_of(tmp_path / "copy")


def test_a_renewal_that_was_done_without_an_answer_is_known_as_its_own(bucket, clock, monkeypatch):
    lease, plain = taken(bucket), Bucket.write

    def unanswered(self, *arguments):
        plain(self, *arguments)
        raise StoreError(5, "UNAVAILABLE")

    monkeypatch.setattr(Bucket, "write", unanswered)
    lease._renew_once()
    monkeypatch.undo()
    lease._renew_once()
    lease._renew_once()
    lease.check()
    assert json.loads(bucket.read("lease.json").content)["start"] == lease.start


def test_a_lease_that_was_removed_by_hand_is_lost(bucket):
    lease = taken(bucket)
    bucket.remove(["lease.json"])
    lease._renew_once()
    with pytest.raises(InUseError):
        lease.check()
