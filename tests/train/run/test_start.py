"""The checkpoint that a run starts from; starting leaves other files as they were."""

import contextlib
import shutil

import jax
import numpy as np
import pytest

from jgt.document import InputError
from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.saved import find_checkpoint
from train.config import load
from train.run.directory.identity import Resume
from train.run.opened import open_run
from train.run.restored import restore_state
from train.run.start import Start
from train.run.train import train
from train.settings.code.files import read_code


@pytest.fixture
def copied(earlier, tmp_path):
    """A copy of the earlier run, to be damaged."""
    shutil.copytree(earlier, tmp_path / "copied")
    return tmp_path / "copied"


@pytest.fixture
def position():
    """The position at which a run would start, and its messages."""

    def _position(run, resume=None):
        resume, said = resume or Resume(), []
        setup, data = open_run(run, resume)
        checkpoints = Checkpoints(run.config.run.path / "checkpoints", run.config.checkpoint)
        with contextlib.closing(checkpoints):
            start = Start(setup, data.fingerprint, lambda name, **details: contextlib.nullcontext(), said.append)
            return start.position(checkpoints, resume), said

    return _position


@pytest.fixture
def losses(read_rows):
    """Step → loss of a run directory."""
    return lambda folder: {row["step"]: row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row}


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def state_of(run, step):
    return restore_state(open_run(run)[0], find_checkpoint(step)[0])


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip_a_bit(step):
    """Damages a checkpoint."""
    largest = max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    damaged = bytearray(largest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    largest.write_bytes(damaged)


def wrong(position, run, resume):
    with pytest.raises(InputError) as caught:
        position(run, resume)
    return caught.value.problems


# -- never -----------------------------------------------------------------------------------------------------------


def test_a_run_that_begins_again_leaves_the_earlier_one_beside(copied, tiny, losses, capsys):
    before, beside = content(copied), copied.with_name("copied.1")
    train(tiny("train.steps=1", f"run.dir={copied}", "run.seed=5"), Resume(never=True))
    assert f"The earlier run was moved to {beside}" in capsys.readouterr().out.replace("\n", "")
    assert list(losses(copied)) == [1]
    assert find_checkpoint(copied)[0].manifest.step == 1
    del before["lock"]
    assert content(beside) == before


# -- another run's checkpoints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "step"), [("", 6), ("checkpoints", 6), ("checkpoints/4", 4)])
def test_a_run_goes_on_from_another_one_or_from_one_of_its_steps(earlier, tiny, position, path, step):
    found, said = position(tiny(), Resume(path=earlier / path))
    assert (found.step, found.samples, found.state.step) == (step, step * 16, step)
    same(found.state, state_of(tiny(), earlier / "checkpoints" / str(step)))
    assert said == [f"Continues from {earlier}/checkpoints/{step}, at step {step}"]


def test_it_ends_where_the_unbroken_run_ends_and_goes_on_from_its_own_checkpoints(earlier, tiny, losses, tmp_path, capsys, stopped_at):
    before = content(earlier)
    resume, run = Resume(path=earlier / "checkpoints" / "2"), tiny("train.steps=6", "checkpoint.every=2")
    with stopped_at(5):
        train(run, resume)
    assert list(losses(tmp_path / "run")) == [3, 4, 5]
    train(run, resume)
    assert f"Resumed from step 4 in {tmp_path / 'run'}" in capsys.readouterr().out.replace("\n", "")
    assert losses(tmp_path / "run") == {step: loss for step, loss in losses(earlier).items() if step > 2}
    assert content(earlier) == before


def test_another_model_and_other_data_are_refused_by_name(earlier, tiny, position, text_file, tmp_path):
    (tmp_path / "other.txt").write_text(text_file.read_text()[:-1])
    run = tiny("model.rope_theta=5000", "run.seed=3", f"data.path={tmp_path / 'other.txt'}")
    found = wrong(position, run, Resume(path=earlier))
    where = f"{earlier}/checkpoints/6"
    assert found[0].startswith(f"command line: model.rope_theta=5000: model.rope_theta: is 5000.0, but {where} was started with 10000.0. ")
    assert [problem.split(": ")[2] for problem in found[1:3]] == ["data.path", "run.seed"]
    assert f"data: is not the data that {where} was started with: " in found[3]
    assert len(found) == 4
    (last,) = wrong(position, run, Resume(path=earlier, allow=("model", "data")))
    assert "run.seed: is 3" in last
    assert position(run, Resume(path=earlier, allow=("model.rope_theta", "data", "run.seed")))[0].step == 6


def test_a_model_with_other_arrays_cannot_be_allowed(earlier, tiny, position):
    assert "params/layers/attn/k_proj/kernel: is float32[2, 32, 32] in the checkpoint, but float32[3, 32, 32] in this run" in "\n".join(
        wrong(position, tiny("model.layers=3"), Resume(path=earlier, allow=("model.layers",)))
    )


def test_where_no_checkpoint_is_there_is_nothing_to_go_on_from(tiny, position, tmp_path):
    what = f"no whole checkpoint in {tmp_path}. Name a run directory, or one of the steps in its checkpoints/"
    assert wrong(position, tiny(), Resume(path=tmp_path)) == (f"--resume: {what}",)
    run = tiny(f"checkpoint.weights={tmp_path}")
    assert wrong(position, run, Resume()) == (f"command line: checkpoint.weights={tmp_path}: checkpoint.weights: {what}",)


# -- another run's parameters ----------------------------------------------------------------------------------------

NORMED = """
import numpy as np
from flax import nnx

class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.layer, self.norm, self.drop = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

def loss(model, batch):
    return (model.drop(model.norm(model.layer(batch["x"]))) ** 2).mean()

def data():
    return [{"x": np.arange(3, dtype=np.float32) * (i % 7)} for i in range(64)]
"""


@pytest.mark.parametrize("sync", [(), ("mesh={replica: 2, data: 4}", "sync={axis: replica, every: 2}")], ids=["plain", "phases"])
def test_a_run_starts_with_the_statistics_of_another_one_and_keys_of_its_own(tmp_path, position, sync):
    (tmp_path / "normed.py").write_text(NORMED)
    names = {"model": {"kind": "normed:Net"}, "data": {"source": "normed:data"}, "train": {"loss": "normed:loss", "steps": 3, "batch": 8}}

    def run(name, *overrides):
        return load({**names, "run": {"dir": str(tmp_path / name)}}, [*overrides], code=read_code([tmp_path / "normed.py"]))

    train(run("first", "mesh={data: 1}"))
    trained = state_of(run("first", "mesh={data: 1}"), tmp_path / "first")
    assert np.any(trained.variables["norm"]["mean"])
    other = run("second", f"checkpoint.weights={tmp_path / 'first'}", "run.seed=5", *(sync or ("mesh={data: 1}",)))
    found, _ = position(other)
    fresh, _ = position(run("third", "run.seed=5", *(sync or ("mesh={data: 1}",))))
    same(open_run(other)[0].eval_variables(found.state)["norm"], trained.variables["norm"])
    same(found.state.variables["drop"], fresh.state.variables["drop"])
    if sync:
        assert found.state.variables["norm"]["mean"].shape == (2, 4)


def test_a_run_starts_with_the_parameters_of_another_one_alone(earlier, tiny, position):
    found, said = position(tiny(f"checkpoint.weights={earlier}", "run.seed=5"))
    assert (found.step, found.samples, found.state.step) == (0, 0, 0)
    same(found.state.params, state_of(tiny(), earlier).params)
    assert not any(np.any(x) for x in jax.tree.leaves(found.state.opt_state))
    assert said == [f"Starts with the parameters of {earlier}/checkpoints/6"]


def test_a_damaged_step_is_passed_over_and_left_as_it_is(copied, tiny, position, capsys):
    flip_a_bit(copied / "checkpoints" / "6")
    before = content(copied)
    found, said = position(tiny(f"checkpoint.weights={copied}"))
    assert said == [f"Starts with the parameters of {copied}/checkpoints/4"]
    same(found.state.params, state_of(tiny(), copied / "checkpoints" / "4").params)
    assert f"jgt: the checkpoint {copied}/checkpoints/6 is damaged (" in capsys.readouterr().err
    assert content(copied) == before


def test_its_own_checkpoints_come_first(earlier, copied, tiny, position):
    shutil.rmtree(copied / "checkpoints" / "6")
    run = tiny(f"run.dir={copied}", f"checkpoint.weights={earlier}")
    for resume in (Resume(), Resume(path=earlier)):
        found, said = position(run, resume)
        assert found.step == 4 and said == [f"Resumed from step 4 in {copied}"]


def test_its_own_damaged_step_is_set_aside(copied, tiny, position, capsys):
    flip_a_bit(copied / "checkpoints" / "6")
    assert position(tiny(f"run.dir={copied}"))[0].step == 4
    assert sorted(path.name for path in (copied / "checkpoints").iterdir()) == ["2", "4", "6.broken"]
    assert "the checkpoint of step 6 is damaged" in capsys.readouterr().err


def test_weights_of_another_model_name_the_keys_that_differ(earlier, tiny, position):
    with pytest.raises(InputError) as caught:
        position(tiny("model.embed=64", "model.ffn=128", f"checkpoint.weights={earlier}"))
    (problem,) = caught.value.problems
    assert (
        f"checkpoint.weights: {earlier}/checkpoints/6: model.embed is 32 there and 64 here, model.ffn is 64 there and 128 here." in problem
    )
