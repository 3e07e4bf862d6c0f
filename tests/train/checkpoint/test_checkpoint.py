"""Checkpoints of a small state are restored bit for bit on any layout, and the newest ones are kept."""

import contextlib
import errno
import json
import os
import shutil
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import newest_of
from jax._src import compiler
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgt.document import InputError
from train.checkpoint import manifest, steps
from train.checkpoint.checkpoint import Checkpoints, SaveError
from train.checkpoint.config import CheckpointConfig
from train.checkpoint.manifest import BrokenError
from train.checkpoint.restore import restore, restore_params
from train.checkpoint.saved import find_checkpoint
from train.step.state import State


def state_on(spec):
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), spec)
    kernel = jax.device_put(jax.random.normal(jax.random.key(0), (8, 16)), sharding)
    return State(jnp.asarray(3), {"kernel": kernel}, {"mu": kernel * 2, "count": jnp.asarray(3)})


def shapes_of(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state), jax.tree.map(lambda x: x.sharding, state)


@pytest.fixture
def checkpoints(tmp_path):
    opened = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    yield opened
    opened.close()


def test_a_state_comes_back_bit_for_bit_in_the_layout_asked_for(checkpoints):
    saved, other = state_on(PartitionSpec("data")), state_on(PartitionSpec(None, "data"))
    checkpoints.save(saved, 3, samples=48)
    checkpoints.wait()
    found, reports = newest_of(checkpoints)
    assert (found.manifest.step, found.manifest.samples, reports) == (3, 48, [])
    restored = restore(found, *shapes_of(other))
    jax.tree.map(np.testing.assert_array_equal, restored, saved)
    assert restored.params["kernel"].sharding == other.params["kernel"].sharding


def test_the_newest_is_the_last_finished_and_old_ones_go(checkpoints, tmp_path):
    assert newest_of(checkpoints) == (None, [])
    for step in (1, 2, 10):
        checkpoints.save(state_on(PartitionSpec()), step, samples=step)
    checkpoints.wait()
    assert newest_of(checkpoints)[0].manifest.step == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "2"]


def refused(thread):
    raise RuntimeError("can't start new thread")


# Orbax leaves a coroutine and an event loop behind.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::RuntimeWarning")
def test_a_save_without_a_further_thread_fails_and_the_next_one_works(checkpoints, monkeypatch):
    checkpoints.save(state_on(PartitionSpec()), 1, samples=1)
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        for step in (2, 3):
            with pytest.raises(SaveError, match="can't start new thread"):
                checkpoints.save(state_on(PartitionSpec()), step, samples=step)
                checkpoints.wait()
    checkpoints.save(state_on(PartitionSpec()), 4, samples=4)
    checkpoints.wait()
    assert newest_of(checkpoints)[0].manifest.step == 4


def test_the_manifest_says_what_there_is(tmp_path):
    opened = Checkpoints(tmp_path, CheckpointConfig(sha256=True), mesh={"data": 8}, fingerprints={"config": 7})
    opened.save(state_on(PartitionSpec()), 1, samples=5)
    opened.close()
    found = newest_of(opened)[0].manifest
    assert (found.mesh, found.fingerprints) == ({"data": 8}, {"config": 7})
    assert {(a.path, a.shape, a.dtype) for a in found.arrays} == {
        ("step", (), "int32"),
        ("params/kernel", (8, 16), "float32"),
        ("opt_state/mu", (8, 16), "float32"),
        ("opt_state/count", (), "int32"),
    }
    assert all(entry.sha256 and entry.size == (tmp_path / "1" / entry.path).stat().st_size for entry in found.files)


def damaged_ways():
    """Ways to damage a file."""

    def cut(path):
        path.write_bytes(path.read_bytes()[:-1])

    def zero(path):
        path.write_bytes(bytes(path.stat().st_size))

    def flip(path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 16
        path.write_bytes(content)

    def link(path):
        content = path.with_name("elsewhere")
        path.rename(content)
        path.symlink_to(content)

    return [lambda path: path.unlink(), cut, zero, flip, link]


def test_a_save_that_failed_after_its_step_had_a_name_is_repeated(checkpoints, tmp_path, monkeypatch):
    plain, state = steps.sync, state_on(PartitionSpec())

    def fail_once(path):
        if path == tmp_path:
            monkeypatch.setattr(steps, "sync", plain)
            raise OSError(errno.EIO, "Input/output error", str(path))
        plain(path)

    monkeypatch.setattr(steps, "sync", fail_once)
    checkpoints.save(state, 1, samples=16)
    with pytest.raises(SaveError, match="Input/output error"):
        checkpoints.wait()
    checkpoints.save(state, 1, samples=16)
    checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    restored = restore(newest_of(checkpoints)[0], *shapes_of(state))
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_no_bit_of_a_manifest_may_flip(checkpoints, tmp_path):
    checkpoints.save(state_on(PartitionSpec()), 1, samples=16)
    checkpoints.wait()
    path, before = tmp_path / "1" / manifest.NAME, manifest.read(tmp_path / "1")
    whole, wrong = path.read_bytes(), []
    for bit in range(8 * len(whole)):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(BrokenError):
            if manifest.parse(bytes(content)) != before:
                wrong.append(bit)
    assert not wrong
    # As earlier versions wrote it.
    values = {name: value for name, value in json.loads(whole).items() if name != "crc32"}
    assert manifest.parse(json.dumps(values | {"format": 1}).encode()) == before
    with pytest.raises(BrokenError, match=r"manifest\.json is damaged"):
        manifest.parse(json.dumps(values).encode())


@pytest.mark.parametrize("spoil", damaged_ways(), ids=["deleted", "cut", "zeroed", "flipped", "linked"])
def test_a_damaged_step_is_never_used(spoil, checkpoints, tmp_path):
    """Damages each file of the newest step in turn: the step before is used, and the damage is reported."""
    states = {1: state_on(PartitionSpec()), 2: jax.tree.map(lambda x: x + 1, state_on(PartitionSpec()))}
    for step, state in states.items():
        checkpoints.save(state, step, samples=step)
    checkpoints.wait()
    shutil.copytree(tmp_path / "2", tmp_path / "whole")
    for file in sorted(path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()):
        if (tmp_path / "whole" / file).stat().st_size == 0:
            continue
        shutil.rmtree(tmp_path / "2", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "2")
        spoil(tmp_path / "2" / file)
        found, reports = newest_of(checkpoints)
        assert found.manifest.step == 1, file
        (report,) = reports
        assert "the checkpoint of step 2 is damaged" in report
        shutil.rmtree(tmp_path / report.rpartition("/")[2])
    restored = restore(found, *shapes_of(states[1]))
    jax.tree.map(np.testing.assert_array_equal, restored, states[1])


def test_what_was_never_finished_is_no_checkpoint(checkpoints, tmp_path):
    checkpoints.save(state_on(PartitionSpec()), 1, samples=1)
    checkpoints.wait()
    (tmp_path / "5").mkdir()
    (tmp_path / "7").symlink_to(tmp_path / "1")
    (tmp_path / "6.saving").mkdir()
    (tmp_path / "trash").mkdir()
    again = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    found, (report,) = newest_of(again)
    assert found.manifest.step == 1 and "it was never finished" in report
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "5.broken", "7"]
    again.close()


def test_another_tree_is_refused_array_by_array(checkpoints):
    checkpoints.save(state_on(PartitionSpec()), 1, samples=1)
    checkpoints.wait()
    found, _ = newest_of(checkpoints)
    shapes, shardings = shapes_of(state_on(PartitionSpec()))
    params = {"kernel": jax.ShapeDtypeStruct((8, 15), "bfloat16"), "bias": shapes.step}
    other = State(shapes.step, params, {"mu": shapes.opt_state["mu"]})
    with pytest.raises(InputError) as caught:
        restore(found, other, shardings)
    change = "Give the run another name (run.name=...), or the model and the optimizer that it was started with"
    assert [problem.split(": ")[1:3] for problem in caught.value.problems] == [
        ["opt_state/count", f"is not part of this run. {change}"],
        ["params/bias", f"is missing in the checkpoint. {change}"],
        ["params/kernel", f"is float32[8, 16] in the checkpoint, but bfloat16[8, 15] in this run. {change}"],
    ]


def test_another_type_is_converted_on_request_alone(checkpoints):
    saved = state_on(PartitionSpec())
    checkpoints.save(saved, 1, samples=1)
    checkpoints.wait()
    found, _ = newest_of(checkpoints)
    shapes, shardings = shapes_of(saved)
    narrow = replace(shapes, params={"kernel": jax.ShapeDtypeStruct((8, 16), "bfloat16")})
    with pytest.raises(
        InputError,
        match=r"params/kernel: is float32\[8, 16\] in the checkpoint, but bfloat16\[8, 16\] in this run. checkpoint.cast=true converts it",
    ):
        restore(found, narrow, shardings)
    cast = restore(found, narrow, shardings, cast=True)
    np.testing.assert_array_equal(cast.params["kernel"], saved.params["kernel"].astype("bfloat16"))
    count = replace(shapes, opt_state=shapes.opt_state | {"count": jax.ShapeDtypeStruct((), "float32")})
    with pytest.raises(InputError, match="opt_state/count: is int32"):
        restore(found, count, shardings, cast=True)


def test_parameters_come_alone(checkpoints, tmp_path):
    saved = state_on(PartitionSpec())
    checkpoints.save(saved, 1, samples=1)
    checkpoints.wait()
    found, _ = find_checkpoint(tmp_path)
    shapes, shardings = shapes_of(saved)
    restored = restore_params(found, shapes.params, shardings.params)
    jax.tree.map(np.testing.assert_array_equal, restored, saved.params)


def test_names_that_would_be_one_are_not_saved(checkpoints):
    x = jnp.zeros(2)
    with pytest.raises(ValueError, match=r"cannot tell these names apart: params/a/b, params/a.b"):
        checkpoints.save(State(x, {"a.b": x, "a": {"b": x}}, {"mu": x}), 1, samples=1)


def test_a_foreign_checkpoint_is_read_and_not_touched(checkpoints, tmp_path):
    for step in (1, 2):
        checkpoints.save(state_on(PartitionSpec()), step, samples=step)
    checkpoints.wait()
    run = tmp_path / "run"
    run.mkdir()
    shutil.copytree(tmp_path / "1", run / "checkpoints" / "1")
    shutil.copytree(tmp_path / "2", run / "checkpoints" / "2")
    (run / "checkpoints" / "2" / "manifest.json").unlink()
    for path in (run, run / "checkpoints"):
        found, (report,) = find_checkpoint(path)
        assert found.folder == run / "checkpoints" / "1"
        assert report == f"the checkpoint {run}/checkpoints/2 is damaged (it has no manifest.json: it was never finished); it is not used"
    assert find_checkpoint(run / "checkpoints" / "1")[0].folder == run / "checkpoints" / "1"
    assert find_checkpoint(tmp_path / "nowhere") == (None, [])
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["1", "2"]


def test_one_checkpoint_of_an_hour_remains(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path, CheckpointConfig(keep=1, keep_hours=1, keep_every=7))) as opened:
        for step, minutes in enumerate((0, 30, 59, 70, 100, 129, 130, 140, 300), 1):
            opened.save(state_on(PartitionSpec()), step, samples=step)
            opened.wait()
            os.utime(tmp_path / str(step) / "manifest.json", (1e9 + 60 * minutes,) * 2)
        (tmp_path / "2").mkdir()
        opened.save(state_on(PartitionSpec()), 10, samples=10)
        opened.wait()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [1, 4, 7, 9, 10]


@pytest.mark.parametrize(("keep", "left"), [(None, [2, 3]), (3, [1, 2])])
def test_a_full_disk_costs_the_oldest_step_unless_the_config_asks_for_it(tmp_path, monkeypatch, capsys, keep, left):
    usage = shutil.disk_usage(tmp_path)
    full = lambda _: usage._replace(free=0 if (tmp_path / "1").is_dir() and (tmp_path / "2").is_dir() else usage.free)  # noqa: E731
    monkeypatch.setattr("train.checkpoint.checkpoint.shutil.disk_usage", full)
    with contextlib.closing(Checkpoints(tmp_path, CheckpointConfig(keep=keep))) as opened:
        for step in (1, 2, 3):
            with pytest.raises(SaveError, match="but 0 B are free") if (step, keep) == (3, 3) else contextlib.nullcontext():
                opened.save(state_on(PartitionSpec()), step, samples=step)
            opened.wait()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == left
    assert ("the disk has no room, so the checkpoint of step 1 is removed for the next one" in capsys.readouterr().err) == (keep is None)


def test_a_save_that_finds_no_room_is_told_and_leaves_nothing(checkpoints, tmp_path, monkeypatch):
    checkpoints.save(state_on(PartitionSpec()), 1, samples=1)
    checkpoints.wait()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("train.checkpoint.checkpoint.shutil.disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(SaveError, match=r"1\.\d KB are needed in .*, but 100 B are free"):
        checkpoints.save(state_on(PartitionSpec()), 2, samples=2)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    checkpoints.save(state_on(PartitionSpec()), 2, samples=2)
    checkpoints.wait()
    assert newest_of(checkpoints)[0].manifest.step == 2


def test_a_save_compiles_nothing_while_training_waits(checkpoints, monkeypatch):
    """Orbax would cut an array that several devices have into their parts, with a program for each shape."""
    state, plain, compiled = state_on(PartitionSpec()), compiler.compile_or_get_cached, []
    monkeypatch.setattr(compiler, "compile_or_get_cached", lambda *arguments: compiled.append(arguments) or plain(*arguments))
    checkpoints.save(state, 1, samples=1)
    assert not compiled
    checkpoints.wait()
    jax.jit(lambda x: x + 2.5)(state.params["kernel"])
    assert compiled
