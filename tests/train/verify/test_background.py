"""A run whose layout was never compared: a process beside it compares it, once, and a wrong one ends the run by itself."""

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from runs import Processes, flags, free_port, rows, wait_for_path, wait_for_step

from train.checkpoint.steps import FOLDER, Steps
from train.config import load
from train.journal.accounts import read_accounts
from train.verify.compare import is_verified
from train.verify.limits import Limits
from train.verify.small import small_run

MANY = 1_000_000
# JGT_AVOID_FAULTS: XLA loses the update behind the end of a split dim (openxla/xla#49118).
MODULE = '''
import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal


class Bigrams(nnx.Module):
    """Tokens [b, s] -> logits [b, s, vocab]."""

    def __init__(self, *, vocab: int, width: int = 64, depth: int = 3, dtype=jnp.float32, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, width, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(width, width, dtype=dtype, rngs=rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, vocab, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        with signal.context("embed"):
            x = self.embed(tokens)
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        with signal.context("head"):
            return self.head(x)


def right(model, batch):
    return jnp.mean(jnp.square(model(batch["inputs"])))


def wrong(model, batch):
    tokens = batch["inputs"]
    logits = model(tokens)
    start = tokens.shape[1] + jnp.min(tokens)
    return jnp.mean(jnp.square(jax.lax.dynamic_update_slice(logits, logits[:, :1] * 5, (0, start, 0))))  # LINE
'''
RULES = {"inputs": {"batch/**": ["data", "seq"]}, "default": "replicate"}
PATCH = "from train.verify import background; background.free_cores = lambda: {cores}"


@pytest.fixture
def started(nursery, tmp_path, pytestconfig):
    """Starts the processes of a run with a loss of MODULE, on a machine with so many free cores. Its memory of layouts is its own."""
    (tmp_path / "mine.py").write_text(MODULE)

    def _started(loss, *overrides, cores=4.0, count=1, steps=MANY):
        config = {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"kind": "mine:Bigrams", "seq": 32},
            "devices": {"virtual_cpu": 4 // count},
            "mesh": {"data": 2, "seq": 2},
            "rules": RULES,
            "data": {"source": "tokens", "path": str(tmp_path / "tokens.bin"), "eval_tokens": 0},
            "train": {"loss": f"mine:{loss}", "steps": steps, "batch": 4},
        }
        np.resize(np.arange(200, dtype=np.uint16), 20_000).tofile(tmp_path / "tokens.bin")
        (tmp_path / "run.yaml").write_text(json.dumps(config))
        command = ["--config", str(tmp_path / "run.yaml"), "--code", str(tmp_path / "mine.py"), *overrides]
        port, environment = free_port(), {"XDG_CACHE_HOME": str(tmp_path / "cache"), "JGT_AVOID_FAULTS": "0", "JGT_VERIFY": "auto"}
        commands = [[*command, *(flags(port, count, i) if count > 1 else [])] for i in range(count)]
        first = dict.fromkeys(range(count), PATCH.format(cores=cores))
        return Processes(tmp_path, commands, pytestconfig.rootpath, nursery=nursery, environment=environment, first=first)

    return _started


def layouts(tmp_path):
    return [row for row in rows(tmp_path / "run" / "events.jsonl") if row["phase"] == "layout"]


def check_message(text, tmp_path):
    line = next(n for n, line in enumerate(MODULE.splitlines(), 1) if "# LINE" in line)
    assert "The layout changes the numbers" in text
    assert "instead of" in text
    assert f"the value of dynamic_update_slice at {tmp_path}/mine.py:{line}" in text
    assert "output of signal head" in text


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_a_wrong_layout_ends_the_run_behind_a_checkpoint(count, started, tmp_path):
    with started("wrong", "alerts={}", count=count) as processes:
        # Of several processes, the watch may end those whose peer has failed.
        codes = processes.wait_all()
        outputs = [processes.output(n) for n in range(count)]
    assert codes[0] == 1, outputs
    assert set(codes) <= {1, 4}, outputs
    check_message(outputs[0], tmp_path)
    (found,) = layouts(tmp_path)
    assert found["ok"] is False
    check_message(found["message"], tmp_path)
    assert read_accounts(tmp_path / "run").layout_cpu_s == found["cpu_seconds"] > 0
    alerts = [row for row in rows(tmp_path / "run" / "events.jsonl") if row["phase"] == "alert" and row["kind"] == "layout"]
    assert [alert["message"] for alert in alerts] == [found["message"]]
    # The run went on until its checkpoint, which is whole.
    assert Steps(tmp_path / "run" / FOLDER).newest() > 0
    assert sum("compared with one device, at small sizes" in output for output in outputs) == 1


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_before_the_first_step_a_wrong_layout_trains_nothing(count, started, tmp_path):
    with started("wrong", "run.verify=before", cores=0.0, count=count) as processes:
        assert set(processes.wait_all()) <= {1, 4}
        check_message(processes.output(0), tmp_path)
    assert len(layouts(tmp_path)) == 1
    assert not rows(tmp_path / "run" / "metrics.jsonl")


def test_a_right_layout_is_compared_once(started, tmp_path):
    with started("right", "run.verify=before", steps=2) as processes:
        assert processes.wait_all() == [0]
        assert "The layout changes no number" in processes.output(0)
    with started("right", "run.verify=before", steps=4) as processes:
        assert processes.wait_all() == [0]
        assert "compared with one device" not in processes.output(0)
    assert [found["ok"] for found in layouts(tmp_path)] == [True]
    # A note that is damaged, or that is another program's, is none.
    (note,) = (tmp_path / "cache" / "jgt" / "verified").iterdir()
    run = load(tmp_path / "run.yaml", code=[tmp_path / "mine.py"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        whole = note.read_bytes()
        assert not is_verified(run), "with the mends it is another program"
        patch.setenv("JGT_AVOID_FAULTS", "0")
        assert is_verified(run)
        assert not is_verified(load(run.root, ["train.remat=block"], code=run.code))
        note.write_bytes(whole[:-1] + b"?")
        assert not is_verified(run)


@pytest.mark.parametrize(("cores", "overrides", "line"), [(2.0, [], "2.0 cores are free"), (4.0, ["run.verify=off"], None)])
def test_without_cores_or_with_off_nothing_is_compared(cores, overrides, line, started, tmp_path):
    with started("wrong", *overrides, cores=cores, steps=3) as processes:
        assert processes.wait_all() == [0]
        assert (line or "") in processes.output(0)
        assert ("never compared" in processes.output(0)) == (line is not None)
    assert not layouts(tmp_path)


def children_of(pid):
    stats = {int(path.name): _stat(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()}
    return [child for child, stat in stats.items() if stat and int(stat[1]) == pid]


def _stat(name):
    try:
        return Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


@pytest.mark.slow
def test_the_process_ends_with_its_parent_and_its_death_is_a_line(started, tmp_path):
    with started("right") as processes:
        wait_for_path(tmp_path / "run" / "metrics.jsonl")
        (child,) = children_of(processes.pid(0))
        assert int(_stat(child)[16]) == 19
        os.kill(child, 9)
        wait_for_step(tmp_path / "run", rows(tmp_path / "run" / "metrics.jsonl")[-1]["step"] + 50)
        assert "the layout was not compared with one device" in processes.output(0)
        assert "Training continues" in processes.output(0)
    with started("right", "run.dir=" + str(tmp_path / "other")) as processes:
        wait_for_path(tmp_path / "other" / "metrics.jsonl")
        (child,) = children_of(processes.pid(0))
        os.kill(processes.pid(0), 9)
        deadline = time.monotonic() + 20
        while (stat := _stat(child)) and stat[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_model_of_ones_own_shrinks_by_its_arguments(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    config = {
        "model": {"kind": "mine:Bigrams", "width": 4096, "depth": 40, "seq": 2048},
        "mesh": {"data": 2, "seq": 2},
        "rules": {**RULES, "signals": {"head": {"params": {"kernel": ["data", None]}}}},
        "train": {"loss": "mine:right", "batch": 4096},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    small = small_run(load(tmp_path / "run.yaml", code=[tmp_path / "mine.py"]), 8)
    assert small.config.model.arguments["width"] <= 16
    assert small.config.model.arguments["depth"] == 2
    assert small.config.model.seq <= 64
    assert small.config.train.batch <= 16
    given = small_run(load(tmp_path / "run.yaml", ["model.depth=5"], code=[tmp_path / "mine.py"]), 8, ["model.depth=5"])
    assert given.config.model.arguments["depth"] == 5


@pytest.mark.parametrize(("limits", "words"), [(Limits(cpu_seconds=0), "0 CPU-seconds"), (Limits(gigabytes=0), "0 GB"), (Limits(), "")])
def test_a_comparison_that_takes_too_much_is_ended(limits, words):
    ended = threading.Event()
    told = []
    with limits.watched(lambda text: (told.append(text), ended.set())):
        assert ended.wait(5 if words else 0.5) == bool(words)
    assert told == ([f"more than {words}"] if words else [])
