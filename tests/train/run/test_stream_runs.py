"""Runs on streams of the user's own: they resume bit for bit, on other numbers of processes too, and every command takes them."""

import json
import random
import signal
import time
from pathlib import Path

import pytest
from runs import flags, free_port, rows

from jgt import document
from jgt.document import InputError
from train.checkpoint.saved import find_checkpoint, stored_data
from train.checkpoint.steps import FOLDER
from train.config import load
from train.records.windows import data_windows
from train.run.check import check_placement
from train.run.directory.identity import Resume
from train.run.opened import dry_run, opened_data
from train.run.replay import replay
from train.run.train import train
from train.settings.code.files import read_code
from train.setup import prepare
from train.verify.compare import sample_batch

MODULE = """
import time
import grain, jax.numpy as jnp, numpy as np
from flax import nnx


class Line(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.dense = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, x):
        return self.dense(x)[:, 0]


def squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2), {"number": jnp.mean(batch["number"].astype(jnp.float32))}


def sample(number):
    x = np.random.default_rng(number).normal(size=2).astype(np.float32)
    return {"x": x, "y": np.float32(x.sum()), "number": np.int32(number)}


class Numbers:
    def __init__(self, numbers):
        self.numbers, self.at = numbers, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        time.sleep(PAUSE)
        return sample(self.numbers[self.at - 1])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def stateful(split: str, shard: int, shards: int):
    return Numbers(range(shard, 48, shards)) if split == "train" else (sample(n) for n in range(100, 116))


def stateless(split: str, epoch: int):
    return (sample(n + epoch) for n in (range(48) if split == "train" else range(100, 116)))


def grains(shard: int, shards: int, epoch: int):
    return grain.MapDataset.range(shard, 48, shards).shuffle(seed=epoch).map(sample).to_iter_dataset()
"""
SECTIONS = {
    "model": {"kind": "mine:Line"},
    "mesh": {"data": 2},
    "devices": {"virtual_cpu": 8},
    "optimizer": {"lr": 0.01, "warmup": 0, "schedule": "constant"},
    "train": {"loss": "mine:squares", "steps": 14, "batch": 8, "log_every": 1, "eval_every": 7, "accumulate": 2},
    "checkpoint": {"every": 3},
}


@pytest.fixture
def run_of(tmp_path):
    """A run in a folder of this name, on a stream."""
    (tmp_path / "mine.py").write_text(f"PAUSE = 0.0\n{MODULE}")
    code = read_code([tmp_path / "mine.py"])

    def _run_of(name, source, *overrides):
        sections = {**SECTIONS, "data": {"source": f"mine:{source}"}, "run": {"dir": str(tmp_path / name)}}
        return load(sections, ["mesh={data: 1}", *overrides], code=code)

    return _run_of


def logged(folder):
    return [{key: row[key] for key in row if "loss" in key or key in ("step", "number")} for row in rows(folder / "metrics.jsonl")]


@pytest.mark.parametrize(("source", "buffer"), [("stateful", 0), ("stateless", 5)])
def test_a_run_that_was_killed_ends_as_the_unbroken_one(source, buffer, run_of, tmp_path, stopped_at, capsys):
    keys = f"data.shuffle_buffer={buffer}"
    train(run_of("straight", source, keys))
    broken = run_of("broken", source, keys)
    for step in (4, 11):
        with stopped_at(step):
            train(broken)
    train(broken)
    assert logged(tmp_path / "broken") == logged(tmp_path / "straight") and len(logged(tmp_path / "broken")) == 14 + 2
    output = capsys.readouterr()
    assert ("stream without a state" in output.out) == ("read again up to sample 72: " in output.err) == (source == "stateless")
    assert {"open", "stop"} <= {row["phase"] for row in rows(tmp_path / "broken" / "events.jsonl")}
    saved, _ = find_checkpoint(tmp_path / "broken")
    (stored,) = stored_data(saved)
    assert json.loads(stored)["shards"] == 1 and (saved.folder / "data" / "0.json").exists()


@pytest.mark.slow
def test_a_run_can_begin_at_the_checkpoint_of_another_one_or_with_other_data(run_of, tmp_path):
    train(run_of("first", "stateful"))
    at = tmp_path / "first" / FOLDER / "12"
    train(run_of("second", "stateful"), Resume(path=at))
    assert logged(tmp_path / "second") == [row for row in logged(tmp_path / "first") if row["step"] > 12]
    train(run_of("other", "grains", "train.eval_every=0"), Resume(path=at, allow=("data",)))
    # Two batches of other data, from its beginning.
    expected = [values["number"] for values in opened_data(run_of("other", "grains")).train_batches(0, 8, range(8), 2)]
    assert [row["number"] for row in logged(tmp_path / "other")] == [values.mean() for values in expected]


@pytest.mark.slow
def test_a_step_is_replayed(run_of):
    run = run_of("run", "stateful", "data.shuffle_buffer=5")
    train(run)
    assert replay(run, 11).fault == "none"


def test_other_commands_look_at_the_first_samples(run_of, capsys):
    run = run_of("run", "stateful", "data.shuffle_buffer=5")
    assert check_placement(run).program.element["x"].shape == (2,)
    dry_run(run)
    assert "Compiled the step" in capsys.readouterr().out
    assert sample_batch(prepare(run))["number"].tolist() == [*range(8)]
    assert len([*data_windows(run, opened_data(run), 2, None)]) == 2


def test_epochs_of_a_stream_are_refused(run_of):
    with pytest.raises(
        InputError, match=r"train\.epochs: the length of a stream is unknown, so epochs cannot be counted\. Set train\.steps instead"
    ):
        train(run_of("run", "stateful", "train.epochs=2", "train.steps=null"))


# -- real processes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("source", "buffer", "processes"), [("stateful", 5, 1), ("stateful", 0, 2), ("grains", 5, 2), ("stateless", 5, 1)])
def test_processes_that_are_killed_at_random_end_where_an_unbroken_run_ends(source, buffer, processes, nursery, tmp_path):
    chance = random.Random(f"{source}{buffer}{processes}")
    (tmp_path / "mine.py").write_text(f"PAUSE = 0.002\n{MODULE}")
    limits = {"join_seconds": 20, "peer_seconds": 2, "step_seconds": 20}
    sections = {
        **SECTIONS,
        "data": {"source": f"mine:{source}", "shuffle_buffer": buffer},
        "watchdog": limits,
        "devices": {"virtual_cpu": 1},
    }
    (tmp_path / "run.yaml").write_text(document.dump({**sections, "mesh": {"data": -1}}))

    def start(folder):
        port = free_port()
        arguments = ["--config", str(tmp_path / "run.yaml"), "--code", str(tmp_path / "mine.py"), f"run.dir={folder}", "train.steps=40"]
        joined = [flags(port, processes, i) if processes > 1 else [] for i in range(processes)]
        return [nursery.start([*arguments, *more], folder.with_suffix(f".{i}.log")) for i, more in enumerate(joined)]

    begun = time.monotonic()
    assert [child.wait() for child in start(tmp_path / "straight")] == [0] * processes
    seconds = time.monotonic() - begun
    for _ in range(5):
        children = start(tmp_path / "broken")
        time.sleep(chance.uniform(0.2, seconds))
        chance.choice(children).send_signal(signal.SIGKILL)
        for child in children:
            child.wait()
    assert [child.wait() for child in start(tmp_path / "broken")] == [0] * processes, Path(tmp_path / "broken.0.log").read_text()
    assert logged(tmp_path / "broken") == logged(tmp_path / "straight")
