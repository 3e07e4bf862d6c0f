"""Whole runs in a bucket: resumed here and elsewhere, refused while another one has it, read by commands."""

import contextlib
import errno
import json
import random
import shutil
import signal
import threading
import time

import jax
import numpy as np
import pytest
from runs import rows

import jgt
from jgt.document import InputError
from train.checkpoint.restore import restore
from train.checkpoint.saved import find_checkpoint
from train.checkpoint.signature import Key
from train.checkpoint.steps import open_steps
from train.commands.published import export
from train.config import load
from train.files import mirror as mirrors
from train.files.bucket import Bucket, StoreError
from train.files.disk import DiskError
from train.files.ends import InUseError
from train.files.lease import Lease
from train.files.mirror import Mirror, fetch_records, spool_of
from train.records.console import Screen
from train.run.directory.identity import Resume, check_places, read_resume
from train.run.train import train
from train.setup import prepare
from train.watch.__main__ import compare, main, plot, trace
from train.watch.top.__main__ import _in_bucket
from train.watch.top.__main__ import main as top

COPY_SECONDS = 2


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/store/run"


@pytest.fixture
def start(tiny_file, tmp_path, url):
    """Starts the run of the bucket in a local folder, up to a step."""

    def _start(spool, steps, *overrides, resume=None):
        own = [f"run.dir={url}", f"run.spool={tmp_path / spool}", "run.lease_seconds=3", "checkpoint.every=2", f"train.steps={steps}"]
        run = load(tiny_file, [*own, *overrides])
        check_places(run, resume or Resume())
        return train(run, resume)

    return _start


def state_in(place, run):
    setup = prepare(run)
    return jax.device_get(restore(find_checkpoint(place)[0], setup.shapes, setup.shardings))


def test_a_run_goes_on_on_another_machine_as_if_it_had_not_moved(start, tiny, url, tmp_path, capsys):
    train(tiny("train.steps=6", "checkpoint.every=2"))
    start("here", 4)
    start("there", 6)
    # What this folder has is older than the bucket.
    start("here", 6)
    assert "Already at step 6 of 6" in capsys.readouterr().out
    straight = [row["loss"] for row in rows(tmp_path / "run" / "metrics.jsonl")]
    assert [row["loss"] for row in rows(tmp_path / "here" / "metrics.jsonl")] == straight
    run = tiny("train.steps=6")
    jax.tree.map(np.testing.assert_array_equal, state_in(url, run), state_in(tmp_path / "run", run))
    records = {name for name in Bucket(url).names("records/") if "tensorboard" not in name}
    assert {"records/config.yaml", "records/metrics.jsonl", "records/events.jsonl", "records/spool.json"} <= records
    assert "lease.json" not in Bucket(url).names()


def test_commands_read_a_run_in_a_bucket(start, url, tmp_path, capsys):
    start("here", 4)
    capsys.readouterr()
    assert main([url, "--json"]) == 0
    of_url = json.loads(capsys.readouterr().out)
    assert main([str(tmp_path / "here"), "--json"]) == 0
    assert of_url == {**json.loads(capsys.readouterr().out), "run": url}
    assert plot([url, "--terminal"]) == 0
    assert compare([url, str(tmp_path / "here")]) == 0
    capsys.readouterr()
    assert main([f"{url}/nothing"]) == 2
    assert "is not a run: it has no records/" in capsys.readouterr().err


def test_a_log_is_sent_in_parts_and_put_together(start, url, tmp_path):
    start("here", 2)
    log = tmp_path / "here" / "events.jsonl"
    log.write_bytes(log.read_bytes() + b"%s\n" % (b"x" * 3_000_000))
    start("here", 2)
    assert Bucket(url).names("records/events") == [f"records/events.jsonl{part}" for part in ("", ".~1", ".~2")]
    start("there", 2)
    assert (tmp_path / "there" / "events.jsonl").read_bytes().startswith(log.read_bytes())


def test_a_local_folder_of_another_run_is_not_touched(start, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match=r"here: has files of another run, .* Name another one \(run\.spool="):
        start("here", 2)
    assert (tmp_path / "here" / "metrics.jsonl").read_text() == "{}\n"


def test_a_start_that_dies_while_it_fills_its_folder_is_repeated(start, url, tmp_path, monkeypatch):
    start("here", 2)
    plain = mirrors._fetch

    def fetch(records, name, *more):
        if name == "metrics.jsonl":
            raise StoreError(errno.EIO, "no answer", name)
        plain(records, name, *more)

    with monkeypatch.context() as patch:
        patch.setattr(mirrors, "_fetch", fetch)
        with pytest.raises(DiskError, match="no answer"):
            start("there", 4)
    # It has not become the folder that wrote last, whose lease it could take.
    assert not (tmp_path / "there" / "metrics.jsonl").exists() and spool_of(tmp_path / "there") != spool_of(tmp_path / "here")
    start("there", 4)
    assert (tmp_path / "there" / "metrics.jsonl").read_bytes().startswith((tmp_path / "here" / "metrics.jsonl").read_bytes())
    assert Bucket(url).read("records/metrics.jsonl").content == (tmp_path / "there" / "metrics.jsonl").read_bytes()


def test_a_run_that_another_one_uses_is_refused(start, url):
    start("here", 2)
    holder = Lease(Bucket(url), 3.0, "elsewhere")
    holder.take()
    holder.keep()
    with pytest.raises(InUseError, match="is using file://"):
        start("there", 4)
    holder.release()
    assert open_steps(f"{url}/checkpoints").listed() == [2]
    start("there", 4)


def test_a_run_that_loses_its_lease_stops_and_writes_nothing_more(start, url, monkeypatch):
    plain, before = Screen.step, {}

    def step(self, number, total, metrics):
        plain(self, number, total, metrics)
        if number == 3:
            bucket = Bucket(url)
            bucket.write("lease.json", b'{"start": "other"}')
            # Until the thread has renewed it.
            threading.Event().wait(2)
            before.update({name: bucket.read(name).content for name in bucket.names()})

    monkeypatch.setattr(Screen, "step", step)
    with pytest.raises(InUseError, match="another run has taken the lease"):
        start("here", 200, "train.log_every=1")
    bucket = Bucket(url)
    assert {name: bucket.read(name).content for name in bucket.names()} == before


def test_expired_credentials_at_a_start_change_nothing(start, url, monkeypatch):
    start("here", 2)

    def refused(*_, **__):
        raise StoreError(5, "PERMISSION_DENIED: ExpiredToken", url)

    for method in ("read", "write"):
        with monkeypatch.context() as patch:
            patch.setattr(Bucket, method, refused)
            with pytest.raises(DiskError, match=r"ExpiredToken. No checkpoint was changed"):
                start("here", 4)
    assert open_steps(f"{url}/checkpoints").listed() == [2]
    start("here", 4)


def test_expired_credentials_during_a_run_cost_saves(start, url, monkeypatch, capsys):
    plain = Bucket.write

    def write(self, name, content, version=None):
        if name.startswith("data/4-"):
            raise StoreError(5, "PERMISSION_DENIED: ExpiredToken", url)
        return plain(self, name, content, version)

    monkeypatch.setattr(Bucket, "write", write)
    start("here", 8)
    assert "a checkpoint could not be saved" in capsys.readouterr().err
    # The next save may find out that it has failed, and is not made then.
    listed = open_steps(f"{url}/checkpoints").listed()
    assert (listed[0], listed[-1]) == (2, 8) and 4 not in listed


def test_an_earlier_run_in_a_bucket_is_not_moved(start):
    start("here", 2)
    with pytest.raises(InputError, match=r"--resume: never: .* Name another URL"):
        start("here", 2, resume=Resume(never=True))


def test_a_run_begins_in_another_ones_bucket(start, tiny, tiny_file, url, tmp_path, capsys):
    start("here", 4)
    run = tiny("train.steps=6")
    for place in (url, f"{url}/checkpoints", open_steps(f"{url}/checkpoints").path(4)):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        train(run, read_resume(place, (), run.config.run.checkpoints))
        assert "at step 4" in capsys.readouterr().out
    start("here", 6)
    jax.tree.map(np.testing.assert_array_equal, state_in(url, run), state_in(tmp_path / "run", run))

    for weights, name in ((url, "of-url"), (tmp_path / "run", "of-folder")):
        other = load(tiny_file, [f"run.dir={tmp_path}/{name}", f"checkpoint.weights={weights}", "train.steps=1", "run.seed=5"])
        check_places(other, Resume())
        train(other)
    assert (tmp_path / "of-url" / "metrics.jsonl").is_file() and f"Starts with the parameters of {url}" in capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, *(state_in(tmp_path / name, run) for name in ("of-url", "of-folder")))


@pytest.mark.parametrize("place", ["weights", "resume"])
def test_a_bucket_without_checkpoints_is_named(tiny_file, tmp_path, place):
    nothing = f"file://{tmp_path}/nothing"
    run = load(tiny_file, [f"run.dir={tmp_path}/run", *([f"checkpoint.weights={nothing}"] if place == "weights" else [])])
    with pytest.raises(InputError, match=f"no (whole )?checkpoint in {nothing}"):
        check_places(run, Resume())
        train(run, Resume(path=nothing))
    with pytest.raises(InputError, match="--resume: 'az://x' is not supported"):
        read_resume("az://x", (), tmp_path)


def test_a_key_trusts_no_bucket(start, url):
    start("here", 2)
    with pytest.raises(InputError, match="checkpoints in a bucket have no signatures"):
        find_checkpoint(url, Key(secret=b"secret"))


def test_the_model_of_a_run_in_a_bucket_is_loaded_and_exported(start, url, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    start("here", 4)
    tokens = np.arange(8)[None]
    for place, step in ((url, 4), (open_steps(f"{url}/checkpoints").path(2), 2)):
        loaded = jgt.load(place)
        assert loaded.step == step
        out = tmp_path / f"out-{step}"
        assert export([place, str(out)]) == 0
        np.testing.assert_allclose(jgt.load(out).logits(tokens), loaded.logits(tokens), rtol=1e-5, atol=1e-6)
    assert export([url, str(tmp_path / "two"), "--step", "2"]) == 0
    assert (tmp_path / "two" / "model.safetensors").read_bytes() == (tmp_path / "out-2" / "model.safetensors").read_bytes()
    out = f"file://{tmp_path}/objects"
    capsys.readouterr()
    assert export([url, out, "--step", "2", "--max-file", "0.02MB"]) == 0
    assert "storing" in capsys.readouterr().err
    np.testing.assert_array_equal(jgt.load(f"hf:{out}").logits(tokens), jgt.load(tmp_path / "out-2").logits(tokens))
    assert export([url, out]) == 2
    assert f"OUT {out}: is there already" in capsys.readouterr().err


def test_a_run_in_a_bucket_is_watched(start, url, tmp_path, capsys, monkeypatch):
    start("here", 2)
    capsys.readouterr()
    assert top([url, "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert (seen["name"], seen["step"], [p["state"] for p in seen["processes"]]) == ("run", 2, ["ended"])
    with contextlib.ExitStack() as stack:
        run = _in_bucket(url, stack)
        assert run.read().step == 2
        start("here", 4)
        monkeypatch.setattr("train.watch.top.view.UPDATE_SECONDS", -1.0)
        assert run.read().step == 4
        assert (run.folder / "metrics.jsonl").read_bytes() == (tmp_path / "here" / "metrics.jsonl").read_bytes()
    assert trace([url, "--output", str(tmp_path / "trace.json")]) == 0
    assert top([f"{url}/nothing"]) == 2


def test_a_copy_of_records_follows_what_grows_and_what_is_cut(tmp_path):
    bucket, folder, known, whole = Bucket(f"file://{tmp_path}/store"), tmp_path / "copy", {}, np.random.default_rng(0).bytes(3_000_000)
    for size in (100, 1_500_000, 3_000_000, 1 << 20, 10):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        for number, begin in enumerate(range(0, size, 1 << 20)):
            bucket.write(f"records/log{f'.~{number}' * (number > 0)}", whole[begin : min(size, begin + (1 << 20))])
        fetch_records(bucket, folder, known=known)
        assert (folder / "log").read_bytes() == whole[:size]


def test_the_last_copy_has_what_was_written_during_the_one_before(tmp_path, monkeypatch):
    bucket, plain, begun, go = Bucket(f"file://{tmp_path}/store"), Bucket.write, threading.Event(), threading.Event()

    def write(self, *arguments):
        begun.set()
        assert go.wait(60)
        return plain(self, *arguments)

    monkeypatch.setattr(Bucket, "write", write)
    log = tmp_path / "run" / "log"
    log.parent.mkdir()
    log.write_text("one\n")
    mirror = Mirror(bucket, log.parent, 3600, lambda name: True, lambda: True)
    mirror.wake()
    assert begun.wait(60)
    closing = threading.Thread(target=mirror.close)
    closing.start()
    log.write_text("one\ntwo\n")
    while not mirror._worker._wake.is_set():
        time.sleep(0.01)
    go.set()
    closing.join()
    assert bucket.read("records/log").content == b"one\ntwo\n"


@pytest.mark.slow
def test_a_lost_machine_costs_the_lines_since_the_last_copy(nursery, tiny_file, tmp_path):
    chance = random.Random(0)
    for number in range(4):
        url, spool = f"file://{tmp_path}/store/{number}", tmp_path / f"spool-{number}"
        steps = ["train.steps=1000000", "train.log_every=1", "checkpoint.every=0"]
        places = [f"run.dir={url}", f"run.spool={spool}", f"run.copy_seconds={COPY_SECONDS}"]
        child = nursery.start(["--config", str(tiny_file), *places, *steps], tmp_path / f"{number}.log")
        while not (spool / "metrics.jsonl").exists():
            assert child.poll() is None
            time.sleep(0.01)
        time.sleep(chance.uniform(3, 8))
        child.send_signal(signal.SIGKILL)
        killed = time.time()
        child.wait()
        fetch_records(Bucket(url), tmp_path / "copy")
        copied, whole = (folder.joinpath("metrics.jsonl").read_bytes() for folder in (tmp_path / "copy", spool))
        assert whole.startswith(copied) and copied
        lost = [json.loads(line)["time"] for line in whole[len(copied) :].splitlines()[1:-1]]
        # The time of a copy on a busy machine.
        assert not lost or killed - min(lost) < COPY_SECONDS + 5, number


def test_a_lost_folder_costs_no_line(start, tmp_path):
    start("here", 4)
    before = (tmp_path / "here" / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "here")
    start("here", 4)
    assert (tmp_path / "here" / "metrics.jsonl").read_bytes() == before
