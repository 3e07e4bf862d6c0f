"""Real processes killed at random moments: every restart goes on, and ends bit for bit where the unbroken run ends."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from train.checkpoint import Checkpoints, restore
from train.config import load
from train.setup import prepare

ROOT = Path(__file__).parents[2]
STEPS = 12
OVERRIDES = [f"train.steps={STEPS}", "checkpoint.every=2", "checkpoint.keep=2", "train.log_every=1"]
SCRIPT = """
import sys, jax
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
from train.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def start(tiny_file, tmp_path_factory):
    """Starts a run in a process of its own, which writes beside its folder."""
    cache = tmp_path_factory.mktemp("compiled")

    def _start(folder):
        arguments = [sys.executable, "-c", SCRIPT, str(cache), "--config", str(tiny_file), f"run.dir={folder}", *OVERRIDES]
        environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
        with folder.with_suffix(".log").open("w") as log:
            return subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    return _start


def outcome(tiny_file, folder, read_rows):
    """Parameters and optimizer state at the end, and every step's loss."""
    run = load(tiny_file, [f"run.dir={folder}", *OVERRIDES])
    setup = prepare(run)
    checkpoints = Checkpoints(folder / "checkpoints", run.config.checkpoint)
    found, reports = checkpoints.find()
    assert reports == [] and found.manifest.step == STEPS
    state = jax.device_get(restore(found, setup.shapes, setup.shardings))
    checkpoints.close()
    return jax.tree.leaves(state), {row["step"]: row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row}


def kill_at_random(process, longest, chance):
    """Kills a run after a random time; whether it was still there."""
    time.sleep(chance.uniform(0.2, longest))
    if process.poll() is not None:
        return False
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return True


@pytest.mark.parametrize("num_kills", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_a_killed_run_ends_where_the_unbroken_one_ends(num_kills, start, tiny_file, tmp_path, read_rows):
    whole = start(tmp_path / "whole")
    begun = time.perf_counter()
    assert whole.wait(timeout=300) == 0
    longest, kills, runs = time.perf_counter() - begun, 0, 0
    chance = random.Random(num_kills)
    straight = outcome(tiny_file, tmp_path / "whole", read_rows)
    while kills < num_kills:
        runs += 1
        folder, done = tmp_path / f"broken{runs}", False
        while not done and kills < num_kills:
            process = start(folder)
            killed = kill_at_random(process, longest, chance)
            kills += killed
            done = not killed
            assert killed or process.wait() == 0, folder.with_suffix(".log").read_text()
        code, output = start(folder).wait(timeout=300), folder.with_suffix(".log").read_text()
        assert code == 0, output
        assert "damaged" not in output
        states, losses = outcome(tiny_file, folder, read_rows)
        assert losses == straight[1]
        for found, expected in zip(states, straight[0], strict=True):
            np.testing.assert_array_equal(found, expected)
