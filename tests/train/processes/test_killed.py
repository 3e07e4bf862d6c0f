"""Real processes killed at random moments: every restart resumes, and the end is bit for bit that of an uninterrupted run."""

import random
import signal
import time

import jax
import numpy as np
import pytest
from runs import flags, free_port

from jgt import document
from train.checkpoint.restore import restore
from train.checkpoint.saved import find_checkpoint
from train.checkpoint.steps import FOLDER, Steps
from train.config import load
from train.setup import prepare

STEPS = 12
OVERRIDES = [
    f"train.steps={STEPS}",
    "checkpoint.every=2",
    "checkpoint.keep=2",
    "train.log_every=1",
    "watchdog={peer_seconds: 2, step_seconds: 20}",
]
RULES = {
    "axes": {"batch": ["data", "fsdp"]},
    "signals": {"layers/*": {"params": {"*/kernel": ["fsdp", None]}, "out": ["batch", None, None]}},
    "default": "replicate",
}
MESHES = {1: "mesh={data: 1, fsdp: 2}", 2: "mesh={data: 2, fsdp: 2}"}


@pytest.fixture
def start(nursery, tiny_file, tmp_path):
    """Starts the processes of a run. Their logs are beside its folder."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(document.dump(RULES))

    def _start(folder, count):
        port = free_port()
        arguments = ["--config", str(tiny_file), f"run.dir={folder}", f"rules={rules}", MESHES[count], "devices.virtual_cpu=2", *OVERRIDES]
        return [
            nursery.start([*arguments, *(flags(port, count, i) if count > 1 else [])], folder.with_suffix(f".{i}.log"))
            for i in range(count)
        ]

    return _start


def ended(children):
    """Waits for the processes of a run to end by themselves. Returns their exit codes."""
    return [child.wait() for child in children]


def kill_at_random(children, longest, chance):
    """Kills one process of a run, or all, after a random time. Returns whether any of them was still running."""
    time.sleep(chance.uniform(0.1, longest))
    victims = chance.choice([children, *([child] for child in children)])
    there = [child.poll() is None for child in victims]
    for child in victims:
        child.send_signal(signal.SIGKILL)
    return any(there)


def outcome(tiny_file, folder, read_rows):
    """The parameters and the optimizer state at the end, and the loss of every step."""
    setup = prepare(load(tiny_file, [f"run.dir={folder}", *OVERRIDES]))
    found, reports = find_checkpoint(folder)
    assert reports == [] and found.manifest.step == STEPS
    state = jax.device_get(restore(found, setup.shapes, setup.shardings))
    return jax.tree.leaves(state), {row["step"]: row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row}


def check_listed(folder):
    """Every listed step is complete."""
    steps = Steps(folder / FOLDER)
    for step in steps.listed():
        assert steps.read(step).step == step


@pytest.mark.parametrize(
    ("count", "num_kills"),
    [(1, 17), (2, 3), *(pytest.param(count, 100, marks=pytest.mark.slow, id=f"{count}-100") for count in (1, 2))],
)
def test_a_killed_run_ends_where_the_unbroken_one_ends(count, num_kills, start, tiny_file, tmp_path, read_rows):
    assert ended(start(tmp_path / "first", count)) == [0] * count  # compiles
    begun = time.perf_counter()
    assert ended(start(tmp_path / "whole", count)) == [0] * count
    longest, kills, runs = time.perf_counter() - begun, 0, 0
    chance = random.Random(num_kills)
    straight = outcome(tiny_file, tmp_path / "whole", read_rows)
    while kills < num_kills:
        runs += 1
        folder, killed = tmp_path / f"broken{runs}", True
        while killed and kills < num_kills:
            children = start(folder, count)
            killed = kill_at_random(children, longest, chance)
            kills += killed
            codes = ended(children)
            assert killed or codes == [0] * count, folder.with_suffix(".0.log").read_text()
            check_listed(folder)
        codes, output = ended(start(folder, count)), folder.with_suffix(".0.log").read_text()
        assert codes == [0] * count, output
        assert "damaged" not in output
        states, losses = outcome(tiny_file, folder, read_rows)
        assert losses == straight[1]
        for found, expected in zip(states, straight[0], strict=True):
            np.testing.assert_array_equal(found, expected)
