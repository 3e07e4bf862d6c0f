"""A run stops on one shape and resumes on another: the same bits at the checkpoint, then the losses of the uninterrupted run.

A shape is everything that may change between two starts without changing the mathematics: devices, processes, mesh, rules, pipeline,
parts of a batch, recomputation.
"""

import functools
import itertools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import newest_of
from runs import Processes, flags, free_port

from jgt.sharding.inputs import path_text
from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.restore import restore
from train.config import load
from train.run.train import train
from train.setup import prepare

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
RULES = ROOT / "configs" / "rules"
STOP, STEPS = 10, 30
ALWAYS = (f"train.steps={STEPS}", f"checkpoint.every={STOP}")
TOLERANCE = 1e-5
"""Of a loss, in nats per token: what is left of the order in which f32 is summed."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape that a start runs on. devices: in each process."""

    overrides: tuple[str, ...]
    devices: int = 8
    processes: int = 1

    @property
    def is_here(self):
        """Whether the shape is that of the test process itself."""
        return (self.processes, self.devices) == (1, 8)


def shape(rules, mesh, *overrides, **where):
    return Shape(overrides=(f"rules={RULES / rules}.yaml", f"mesh={mesh}", *overrides), **where)


def staged(**pipeline):
    text = ", ".join(f"{key}: {value}" for key, value in {"signal": "layers", "microbatches": 4, **pipeline}.items())
    return shape("pipeline", "{data: 4, fsdp: 1, stage: 2, tensor: 1}", f"pipeline={{{text}}}")


SHAPES = {
    "cube": shape("fsdp_tensor", "{data: 2, fsdp: 2, tensor: 2}"),
    "accumulate": shape("fsdp_tensor", "{data: 2, fsdp: 2, tensor: 2}", "train.accumulate=4"),
    "remat": shape("fsdp_tensor", "{data: 2, fsdp: 2, tensor: 2}", "train.remat=block"),
    "fsdp": shape("fsdp", "{fsdp: 8}"),
    "zero1": shape("zero1", "{data: 8}"),
    "1f1b": staged(schedule="1f1b"),
    "gpipe": staged(schedule="gpipe"),
    "four devices": shape("fsdp_tensor", "{data: 2, fsdp: 1, tensor: 2}", devices=4),
    "two processes": shape("fsdp", "{fsdp: 2}", devices=1, processes=2),
}
PAIRS = [("1f1b", "cube"), ("two processes", "cube")]
REST = [pair for pair in itertools.permutations(SHAPES, 2) if pair not in PAIRS]

SCRIPT = """
import sys
from test_reshape import copy_and_train
from train.__main__ import parser
from train.processes.cluster import find_cluster
from train.config import load
from train.processes.connect import start_jax
arguments = parser().parse_args(sys.argv[1:])
cluster = find_cluster(arguments.coordinator, arguments.processes, arguments.process)
run = load(arguments.config, arguments.overrides, num_processes=1 if cluster is None else cluster.num_processes)
start_jax(cluster, run.config.devices.virtual_cpu)
copy_and_train(run)
"""


def restored(run, devices=None):
    """The state of a run's newest checkpoint, on all devices or on `devices`, and its manifest."""
    setup = prepare(run, devices=devices)
    checkpoints = Checkpoints(run.config.run.path / "checkpoints", run.config.checkpoint)
    found, reports = newest_of(checkpoints)
    checkpoints.close()
    assert reports == []
    return restore(found, setup.saved_shapes, setup.saved_shardings), found.manifest


def copy_and_train(run):
    """Saves the restored state again, beside the run's own checkpoints, and then trains to the last step."""
    state, manifest = restored(run)
    copies = Checkpoints(run.config.run.path / "copy" / "checkpoints", run.config.checkpoint)
    copies.save(state, manifest.step, manifest.samples)
    copies.wait()
    copies.close()
    train(run)


@pytest.fixture(scope="module")
def start(tiny_file, tmp_path_factory):
    """Starts a run on a shape, in this process or in as many processes as the shape has."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), str(ROOT / "tests" / "helpers")]),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def _start(where, folder, *, resumes):
        overrides = [f"run.dir={folder}", *ALWAYS, *where.overrides]
        if where.is_here:
            train(load(tiny_file, overrides))
            return
        program = ["-c", SCRIPT] if resumes else ["-m", "train"]
        command = [*program, "--config", str(tiny_file), *overrides, f"devices.virtual_cpu={where.devices}"]
        port, count = free_port(), where.processes
        commands = [[*command, *(flags(port, count, i) if count > 1 else [])] for i in range(count)]
        with Processes(tmp_path_factory.mktemp("logs"), commands, ROOT, environment) as processes:
            assert processes.wait_all() == [0] * count, [processes.output(i) for i in range(count)]

    return _start


@pytest.fixture(scope="module")
def unbroken(start, tmp_path_factory):
    """The directory of an uninterrupted run on a shape, which is trained only once."""
    known = {}

    def _unbroken(name):
        if name not in known:
            known[name] = tmp_path_factory.mktemp("unbroken")
            start(SHAPES[name], known[name], resumes=False)
        return known[name]

    return _unbroken


@pytest.fixture
def broken(unbroken, start, tmp_path):
    """The directory of a run that stopped on one shape and resumed on another."""

    def _broken(before, after):
        folder = tmp_path / "broken"
        (folder / "checkpoints").mkdir(parents=True)
        for kept in ("config.yaml", "data.json"):
            shutil.copy(unbroken(before) / kept, folder)
        shutil.copytree(unbroken(before) / "checkpoints" / str(STOP), folder / "checkpoints" / str(STOP))
        start(SHAPES[after], folder, resumes=True)
        return folder

    return _broken


@pytest.fixture
def losses(read_rows):
    """The losses of a run directory after the checkpoint."""

    def _losses(folder):
        rows = {row["step"]: row["loss"] for row in read_rows(folder / "metrics.jsonl") if row["step"] > STOP}
        assert list(rows) == list(range(STOP + 1, STEPS + 1))
        return np.array(list(rows.values()))

    return _losses


@pytest.fixture(scope="module")
def state(tiny_file, tmp_path_factory):
    """The state at the checkpoint of a run directory, as arrays by name, restored in this process on as many devices as the shape has."""

    def _state(name, folder):
        alone = tmp_path_factory.mktemp("alone")
        shutil.copytree(folder / "checkpoints" / str(STOP), alone / "checkpoints" / str(STOP))
        run = load(tiny_file, [f"run.dir={alone}", *ALWAYS, *SHAPES[name].overrides])
        found, manifest = restored(run, jax.devices()[: SHAPES[name].devices * SHAPES[name].processes])
        assert (manifest.step, manifest.samples) == (STOP, STOP * run.config.train.batch)
        return {path_text(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(jax.device_get(found.arrays()))}

    return functools.cache(_state)


def assert_same_bits(found, expected):
    assert {"step", "params", "opt_state"} == {name.partition("/")[0] for name in expected}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize(
    ("before", "after"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in REST)],
    ids=lambda name: name.replace(" ", "-"),
)
def test_a_run_goes_on_on_another_shape(before, after, unbroken, broken, losses, state):
    straight, folder = unbroken(before), broken(before, after)
    expected = state(before, straight)
    assert_same_bits(state(after, straight) if SHAPES[after].is_here else state(before, folder / "copy"), expected)
    np.testing.assert_allclose(losses(folder), losses(straight), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES, ids=lambda name: name.replace(" ", "-"))
def test_a_run_goes_on_on_the_same_shape_bit_for_bit(name, unbroken, broken, losses):
    np.testing.assert_array_equal(losses(broken(name, name)), losses(unbroken(name)))


def test_the_losses_fall_and_the_shapes_do_differ(unbroken, losses):
    cube, staged = losses(unbroken("cube")), losses(unbroken("1f1b"))
    assert cube[-1] < cube[0] - 0.2
    assert not np.array_equal(cube, staged)
