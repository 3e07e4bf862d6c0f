"""The examples: the same losses on one device, on a mesh and in a pipeline, no bit lost by a kill, and what they learn."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import Processes

from jgt.document import InputError
from train.checkpoint.restore import restore
from train.checkpoint.saved import find_checkpoint
from train.config import load
from train.journal.rows import read_metrics
from train.run.train import train
from train.settings.code.files import read_code
from train.setup import prepare

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = {
    "state_space": ("model.width=32", "model.states=32", "model.seq=32", "train.batch=8", "data.eval_tokens=1000"),
    "digits": ("model.width=32", "model.depth=2", "train.batch=16"),
}
CUBE = ("mesh={data: 2, fsdp: 2, tensor: 2}", "rules=rules.yaml")
STAGES = ("mesh={data: 2, fsdp: 1, tensor: 2, stage: 2}", "rules=rules.yaml", "pipeline={signal: layers, axis: stage, microbatches: 2}")
STEPS = 20


def arguments(name, folder, *overrides, steps=STEPS):
    common = (f"run.dir={folder}", f"train.steps={steps}", "train.log_every=1", "train.eval_every=0", "xla.cache=null", "log=[jsonl]")
    return [*SMALL[name], *common, *overrides]


def run_of(name, folder, *overrides, steps=STEPS):
    if name == "digits":
        pytest.importorskip("sklearn", reason="scikit-learn has the digits")
    return load(
        EXAMPLES / name / "run.yaml", arguments(name, folder, *overrides, steps=steps), code=read_code([EXAMPLES / name / "model.py"])
    )


def losses(folder):
    return np.array([row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of an example on one device."""
    known = {}

    def _alone(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            train(run_of(name, folder, "mesh={data: 1}"))
            known[name] = losses(folder)
        return known[name]

    return _alone


@pytest.mark.parametrize(
    ("name", "layout"), [("state_space", CUBE), ("state_space", STAGES), ("digits", CUBE)], ids=["cube", "stages", "digits"]
)
def test_losses_are_those_of_one_device(alone, tmp_path, name, layout):
    train(run_of(name, tmp_path / "run", *layout))
    found = losses(tmp_path / "run")
    assert len(found) == STEPS and found[-1] < found[0]
    np.testing.assert_allclose(found, alone(name), rtol=0, atol=1e-5)


def test_a_killed_run_of_ones_own_code_resumes_bit_for_bit(tmp_path, nursery, pytestconfig):
    """With the statistics of a BatchNorm, the keys of dropout, and data of one's own."""
    run_of("digits", tmp_path)
    killed = ("debug.faults=[{at_step: 5, kind: kill}]",)
    code = ["--code", str(EXAMPLES / "digits" / "model.py")]
    for name, starts in (("straight", [()]), ("broken", [killed, killed])):
        folder = tmp_path / name
        for overrides in starts:
            common = ("checkpoint.every=2", "devices.virtual_cpu=2", "mesh={data: 2}", "rules={axes: {batch: [data]}, default: replicate}")
            command = ["--config", str(EXAMPLES / "digits" / "run.yaml"), *code, *arguments("digits", folder, *common, *overrides, steps=8)]
            logs = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
            logs.mkdir()
            with Processes(logs, [command], pytestconfig.rootpath, nursery=nursery) as processes:
                code_of_exit = processes.wait(0)
                output = processes.output(0)
        assert code_of_exit == 0, output
    np.testing.assert_array_equal(losses(tmp_path / "straight"), losses(tmp_path / "broken"))
    setup = prepare(run_of("digits", tmp_path / "straight"))
    states = []
    for name in ("straight", "broken"):
        found, _ = find_checkpoint(tmp_path / name)
        states.append(jax.device_get(restore(found, setup.saved_shapes, setup.saved_shardings)))
    assert jax.tree.leaves(states[0].variables)
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.slow
def test_the_launcher_restarts_a_run_of_ones_own_code_bit_for_bit(tmp_path):
    """Two processes, one of which is killed: batches of own data are cut for both, and its position is in the checkpoint."""
    run_of("digits", tmp_path)
    layout = ("devices.virtual_cpu=2", "mesh={data: -1}", "checkpoint.every=2")
    for name, fault in (("straight", ()), ("broken", ("debug.faults=[{at_step: 5, kind: kill, process: 1}]",))):
        common = arguments("digits", tmp_path / name, *layout, *fault, steps=8)
        run = [str(EXAMPLES / "digits" / "run.yaml"), "--code", str(EXAMPLES / "digits" / "model.py"), *common]
        command = [sys.executable, "-m", "train.launch", "--processes", "2", "--", *run]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=EXAMPLES.parent, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    np.testing.assert_array_equal(losses(tmp_path / "straight"), losses(tmp_path / "broken"))


def test_held_out_samples_that_cannot_be_split_are_refused(tmp_path):
    few = run_of("digits", tmp_path / "run", "mesh={data: 8}", "data.held_out=2")
    with pytest.raises(InputError, match=r"data\.source: 2 held-out samples are fewer than the 8 devices that split a batch"):
        train(few)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_an_example_can_be_planned(tmp_path, name):
    run_of(name, tmp_path)
    layout = [*arguments(name, tmp_path / "run", *CUBE, "devices.virtual_cpu=8")]
    code = ["--code", str(EXAMPLES / name / "model.py")]
    command = [sys.executable, "-m", "jgt", "plan", str(EXAMPLES / name / "run.yaml"), *code, *layout]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "layers" in done.stdout and "collectives" in done.stdout.lower()


@pytest.mark.slow
def test_digits_are_recognised(tmp_path):
    pytest.importorskip("sklearn")
    folder = tmp_path / "run"
    config = EXAMPLES / "digits" / "run.yaml"
    train(load(config, [f"run.dir={folder}", "xla.cache=null"], code=read_code([EXAMPLES / "digits" / "model.py"])))
    rows = list(read_metrics(folder / "metrics.jsonl"))
    assert rows[-1]["eval_accuracy"] > 0.95


@pytest.mark.slow
def test_fine_tuning_begins_where_the_first_run_ended(tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    train(run_of("state_space", tmp_path / "first", steps=60))
    code = read_code([EXAMPLES / "state_space" / "model.py"])
    found = {}
    for name, weights in (("tuned", f"checkpoint.weights={tmp_path / 'first'}"), ("fresh", "checkpoint.weights=null")):
        overrides = [*arguments("state_space", tmp_path / name, weights, steps=5)]
        train(load(EXAMPLES / "state_space" / "finetune.yaml", overrides, code=code))
        found[name] = losses(tmp_path / name)
    assert found["tuned"][0] < found["fresh"][0] - 0.3
