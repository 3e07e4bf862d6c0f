"""Checkpoints in a bucket: restored bit for bit on any layout, and never with an object that was changed."""

import errno
import itertools
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import newest_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgt.document import InputError
from train.checkpoint.bucket_steps import seal
from train.checkpoint.checkpoint import Checkpoints, SaveError
from train.checkpoint.config import CheckpointConfig
from train.checkpoint.objects import piece_shape
from train.checkpoint.pieces import pieces
from train.checkpoint.restore import restore
from train.checkpoint.saved import UnusableError, find_checkpoint, stored_data
from train.checkpoint.steps import open_steps
from train.files.bucket import Bucket, StoreError
from train.files.disk import DiskError
from train.step.state import State

SPECS = [PartitionSpec(), PartitionSpec("data"), PartitionSpec(None, "data"), PartitionSpec("tensor", "data")]


def state_on(spec, value=0):
    sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor")), spec)
    kernel = jax.device_put(jax.random.normal(jax.random.key(value), (8, 16)), sharding)
    others = {"count": jnp.asarray(3 + value), "half": (kernel * 2).astype(jnp.bfloat16), "zeros": kernel * 0, "none": jnp.zeros((0, 4))}
    return State(jnp.asarray(3), {"kernel": kernel}, {**others, "small": kernel.astype(jnp.float8_e4m3fn), "flag": kernel > 0})


def shapes_of(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state), jax.tree.map(lambda x: x.sharding, state)


def assert_equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/run/checkpoints"


@pytest.fixture
def folder(tmp_path):
    """The files that a store in a folder has for objects."""
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def checkpoints(url):
    opened = Checkpoints(url, CheckpointConfig(keep=2))
    yield opened
    opened.close()


def save(checkpoints, step, value=0, spec=SPECS[1], **more):
    checkpoints.save(state_on(spec, value), step, samples=step, **more)
    checkpoints.wait()


@pytest.mark.parametrize("old", range(len(SPECS)))
def test_a_state_comes_back_bit_for_bit_in_the_layout_asked_for(checkpoints, old, monkeypatch):
    monkeypatch.setattr("train.checkpoint.objects._PIECE_BYTES", 64)
    saved = state_on(SPECS[old])
    checkpoints.save(saved, 3, samples=48)
    checkpoints.wait()
    found, reports = newest_of(checkpoints)
    assert (found.manifest.step, found.manifest.samples, reports) == (3, 48, [])
    for spec in SPECS:
        other = state_on(spec, 1)
        restored = restore(found, *shapes_of(other))
        assert_equal(restored, saved)
        assert restored.params["kernel"].sharding == other.params["kernel"].sharding
    entry = next(entry for entry in found.manifest.arrays if entry.path == "params/kernel")
    whole = np.zeros(entry.shape, np.float32)
    for place, part in pieces(found, entry, most=128):
        whole[place] = part
    np.testing.assert_array_equal(whole, saved.params["kernel"])


def test_a_step_that_takes_the_memory_of_a_state_changes_nothing_of_its_save(checkpoints, monkeypatch):
    step, begun, plain = jax.jit(lambda x: x + 1, donate_argnums=0), threading.Event(), Bucket.write
    monkeypatch.setattr(Bucket, "write", lambda self, *args: begun.wait(60) and plain(self, *args))
    kernel = step(state_on(SPECS[1]).params["kernel"])
    before = np.array(kernel)
    checkpoints.save(State(jnp.asarray(3), {"kernel": kernel}, {}), 1, samples=1)
    later = step(kernel)
    last = step(later)
    begun.set()
    checkpoints.wait()
    assert later.is_deleted()
    state = State(jnp.asarray(3), {"kernel": last}, {})
    assert_equal(restore(newest_of(checkpoints)[0], *shapes_of(state)).params["kernel"], before)


def test_the_newest_steps_stay_and_nothing_of_the_others(checkpoints, url):
    for step in (1, 2, 10):
        save(checkpoints, step)
    steps = open_steps(url)
    assert steps.listed() == [2, 10] and newest_of(checkpoints)[0].manifest.step == 10
    assert {name.split("/")[1].split("-")[0] for name in steps.bucket.names("data/")} == {"2", "10"}


def test_each_process_removes_what_it_has_written(checkpoints, url):
    other = Checkpoints(url, CheckpointConfig(keep=2))
    # As in another process: it writes objects and no manifests.
    other._is_first = False
    left = []
    for step in (1, 2, 3):
        save(checkpoints, step)
        left.append(len(open_steps(url).bucket.names("data/1-")))
        save(other, step)
    # Those of both before the other process has written, and those of the other one alone.
    assert left[0] == left[2] and left[1] == 2 * left[0]
    assert open_steps(url).bucket.names("data/1-") == [] and open_steps(url).listed() == [2, 3]
    other.close()
    assert len(open_steps(url).bucket.names("data/3-")) == 2 * left[0]


def test_what_a_killed_save_left_is_removed_by_the_next_start(checkpoints, url, folder):
    save(checkpoints, 1)
    (folder / "data" / "2-abc-0" / "params").mkdir(parents=True)
    (folder / "data" / "2-abc-0" / "params" / "0-0").write_bytes(b"half")
    before = {name for name in open_steps(url).bucket.names("data/") if not name.startswith("data/2-")}
    Checkpoints(url, CheckpointConfig()).close()
    assert set(open_steps(url).bucket.names("data/")) == before


def objects_of(folder, step):
    """The files of a step: its manifest and its objects."""
    return [folder / "manifests" / f"{step:010d}.json", *sorted(path for path in folder.glob(f"data/{step}-*/**/*") if path.is_file())]


def flip(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


HARM = {
    "flipped": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "empty": lambda path: path.write_bytes(b""),
    "removed": Path.unlink,
}


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("harm", HARM)
def test_a_step_with_a_harmed_object_is_named_and_never_used(url, folder, tmp_path, harm, stride):
    checkpoints = Checkpoints(url, CheckpointConfig(keep=2))
    save(checkpoints, 1, value=1)
    save(checkpoints, 2, value=2, data="place")
    checkpoints.close()
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    objects = objects_of(folder, 2)
    assert len(objects) > 20
    for path in objects[::stride]:
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "whole", tmp_path / "run")
        HARM[harm](path)
        opened = Checkpoints(url, CheckpointConfig())
        search = opened.search()
        while True:
            found = search.next()
            try:
                restored = restore(found, *shapes_of(state_on(SPECS[2])))
            except UnusableError as error:
                search.refuse(found.manifest.step, error.why)
            else:
                search.drop_refused()
                break
        opened.close()
        assert found.manifest.step == 1, path
        assert_equal(restored, state_on(SPECS[0], 1))
        if path.parent.name == "manifests" and harm == "removed":
            continue
        (report,) = search.reports
        assert "the checkpoint of step 2" in report and "broken/2-" in report
        assert path.name in report


def test_objects_in_each_others_places_are_not_used(checkpoints, url, folder):
    save(checkpoints, 1, value=1)
    save(checkpoints, 2, value=2)
    one, two = (next(folder.glob(f"data/{step}-*/params/kernel/0-0")) for step in (1, 2))
    two.write_bytes(one.read_bytes())
    found = find_checkpoint(url.removesuffix("/checkpoints"))[0]
    with pytest.raises(UnusableError, match="params/kernel/0-0 has other content than was written"):
        restore(found, *shapes_of(state_on(SPECS[0])))


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["objects"].update(folder="../../other"),
        lambda values: values["objects"].update(pieces=[[0]] * len(values["arrays"])),
        lambda values: values["objects"].update(pieces=[]),
        lambda values: values.update(objects=None),
        lambda values: values.update(step=7),
        lambda values: values["arrays"][0].update(dtype="O"),
    ],
)
def test_a_forged_manifest_is_not_used(checkpoints, url, change):
    save(checkpoints, 1)
    bucket, name = Bucket(url), "manifests/0000000001.json"
    values = json.loads(bucket.read(name).content[:-8])
    change(values)
    bucket.write(name, seal(name, json.dumps(values).encode()))
    found, (report,) = newest_of(checkpoints)
    assert found is None and "step 1" in report


def test_the_place_in_the_data_is_stored(checkpoints):
    save(checkpoints, 1, data='{"row": 3}')
    assert stored_data(newest_of(checkpoints)[0]) == ('{"row": 3}',)


def refused(*_, **__):
    raise StoreError(5, "PERMISSION_DENIED: ExpiredToken", "s3://bucket/x")


def test_a_store_that_fails_costs_a_save_and_no_step(checkpoints, url, monkeypatch):
    save(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "write", refused)
        with pytest.raises(SaveError, match="ExpiredToken"):
            save(checkpoints, 2)
    save(checkpoints, 3)
    assert open_steps(url).listed() == [1, 3]


def test_a_manifest_that_comes_late_is_replaced_by_that_of_the_next_try(checkpoints, url, monkeypatch):
    plain, late = Bucket.write, []

    def write(bucket, name, content, *condition):
        if "manifests/" in name and not late:
            late.append((bucket, name, content, *condition))
            raise StoreError(errno.EIO, "no answer", name)
        return plain(bucket, name, content, *condition)

    monkeypatch.setattr(Bucket, "write", write)
    with pytest.raises(SaveError, match="no answer"):
        save(checkpoints, 2)
    # The store does it all the same, when the objects of that try are removed.
    plain(*late[0])
    save(checkpoints, 2)
    assert newest_of(checkpoints)[0].manifest.step == 2


def test_a_store_that_cannot_be_read_is_no_verdict_on_a_step(checkpoints, url, monkeypatch):
    save(checkpoints, 1)
    plain = Bucket.read
    with monkeypatch.context() as patch:
        patch.setattr("train.files.disk._PAUSES", ())
        found = newest_of(checkpoints)[0]
        patch.setattr(Bucket, "read", lambda self, name: refused() if "kernel" in name else plain(self, name))
        with pytest.raises(DiskError, match="ExpiredToken"):
            restore(found, *shapes_of(state_on(SPECS[0])))
        patch.setattr(Bucket, "read", refused)
        with pytest.raises(DiskError, match="No checkpoint was changed"):
            newest_of(checkpoints)
    assert open_steps(url).listed() == [1]


def test_a_run_that_has_lost_its_bucket_finishes_nothing(url, monkeypatch):
    ours, lost, plain = [True], threading.Event(), Bucket.write
    checkpoints = Checkpoints(url, CheckpointConfig(), is_ours=lambda: ours[0])
    save(checkpoints, 1)
    monkeypatch.setattr(Bucket, "write", lambda self, *args: lost.wait(60) and plain(self, *args))
    checkpoints.save(state_on(SPECS[0]), 2, samples=2)
    ours[0] = False
    lost.set()
    with pytest.raises(SaveError, match="no longer belongs to this run"):
        checkpoints.wait()
    checkpoints.close()
    assert open_steps(url).listed() == [1]


def test_arrays_of_another_type_need_a_cast(checkpoints):
    saved = state_on(SPECS[1])
    checkpoints.save(saved, 1, samples=1)
    checkpoints.wait()
    other = replace(saved, params={"kernel": saved.params["kernel"].astype(jnp.bfloat16)})
    found = newest_of(checkpoints)[0]
    with pytest.raises(InputError, match=r"checkpoint\.cast=true"):
        restore(found, *shapes_of(other))
    assert_equal(restore(found, *shapes_of(other), cast=True), other)


def test_pieces_are_parts_of_shards_and_small():
    for shape, ways, itemsize in itertools.product([(50257, 768), (1 << 24,), (3, 32003, 4096), (1, 1), ()], (1, 8), (2, 4)):
        shard = [size // ways if dim == 0 and size % ways == 0 else size for dim, size in enumerate(shape)]
        piece = piece_shape(shape, shard, itemsize)
        assert np.prod(piece) * itemsize <= 1 << 24
        assert all(size in (part, whole) or size % part == 0 for part, size, whole in zip(piece, shard, shape, strict=True))
        assert np.prod(piece) == np.prod(shard) or np.prod(piece) * itemsize > 1 << 22
