"""Runs that are killed with SIGKILL while they export: all that they export is whole, and is what the unbroken run exports."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from runs import Processes, flags, free_port, rows, wait_for_path
from test_export import equal, names, saved_arrays

from jgt import document
from train.run.load import load_model
from train.weights.safetensors import open_folder

GOLDEN = Path(__file__).parents[2] / "goldens" / "weights" / "qwen3"
RULES = {
    "axes": {"batch": ["data", "fsdp"]},
    "signals": {"layers/*": {"params": {"*/kernel": ["fsdp", None]}, "out": ["batch", None, None]}},
    "default": "replicate",
}
SLOWLY = """
import time
from pathlib import Path
from train.weights import writing

plain, begun = writing._write, Path({begun!r})

def slowly(place, *arguments):
    if place.file.parent.name == "{step}.writing":
        begun.touch()
        time.sleep({seconds})
    plain(place, *arguments)

writing._write = slowly
"""
REFERENCE = os.environ.get("JGT_REFERENCE", sys.executable)
"""The Python that has transformers. The name is that of a helper of the tests here, so that it runs in a process of its own."""
TRANSFORMERS = """
import sys
import numpy as np, torch, transformers

options = {"output_loading_info": True, "dtype": torch.float32, "attn_implementation": "eager"}
model, report = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], **options)
assert not any(report.values()), report
with torch.no_grad():
    np.save(sys.argv[3], model.eval()(torch.tensor(np.load(sys.argv[2]))).logits.numpy())
"""
STEPS = 20
JOBS = {
    "1": {"count": 1},
    "2": {"count": 2},
    "frozen": {"count": 1, "optimizer": {"train": ["layers/attn/**"]}},
    "adapter": {"count": 1, "lora": {"rank": 2, "alpha": 4, "dropout": 0.1}, "optimizer": {"lr": 0.01}},
}
"""The processes and sections of the jobs that are killed."""
pytestmark = pytest.mark.slow


class Job:
    """A run of some processes, each with two devices, that begins from a published model."""

    def __init__(self, nursery, folder, count, **sections):
        self.folder, self._nursery, self._count = folder, nursery, count
        folder.mkdir()
        np.save(folder / "tokens.npy", np.random.default_rng(0).integers(3, 64, 8000, np.uint16))
        config = {
            "run": {"dir": str(folder / "run")},
            "devices": {"virtual_cpu": 2},
            "mesh": {"data": count, "fsdp": 2},
            "rules": RULES,
            "model": {"hf": str(GOLDEN), "seq": 16},
            "data": {"source": "tokens", "path": str(folder / "tokens.npy"), "eval_tokens": 0},
            **sections,
            "train": {"steps": STEPS, "batch": 8},
            "checkpoint": {"every": 4, "export": {"every": 10, "path": str(folder / "exports")}},
            "watchdog": {"join_seconds": 60, "peer_seconds": 5, "step_seconds": 60},
        }
        (folder / "run.yaml").write_text(document.dump(config))

    def start(self, first=""):
        port, count = free_port(), self._count
        commands = [[str(self.folder / "run.yaml"), *(flags(port, count, i) if count > 1 else [])] for i in range(count)]
        return Processes(self.folder, commands, self.folder, nursery=self._nursery, first=dict.fromkeys(range(count), first))

    @contextlib.contextmanager
    def exporting(self, step, seconds):
        """A start that exports a step. Each tensor takes so many seconds."""
        begun = self.folder / "begun"
        # A folder that a killed start was writing is there from the beginning.
        begun.unlink(missing_ok=True)
        with self.start(SLOWLY.format(begun=str(begun), step=step, seconds=seconds)) as processes:
            wait_for_path(begun)
            yield processes

    def kill(self, step, seconds):
        """Kills all processes some seconds after the export of a step has begun."""
        with self.exporting(step, 0.2) as processes:
            time.sleep(seconds)
            for process in range(self._count):
                processes.send(process, signal.SIGKILL)
            assert processes.wait_all() == [-signal.SIGKILL] * self._count
        assert (self.folder / "exports" / f"{step}.writing").is_dir()

    def kill_anywhere(self, seconds):
        """Kills all processes some seconds after their start."""
        # On a fast machine too, none has ended by then: it waits for its export.
        with self.start(SLOWLY.format(begun=str(self.folder / "begun"), step=10, seconds=2)) as processes:
            time.sleep(seconds)
            for process in range(self._count):
                processes.send(process, signal.SIGKILL)
            assert processes.wait_all() == [-signal.SIGKILL] * self._count

    def end(self):
        with self.start() as processes:
            assert processes.wait_all() == [0] * self._count, processes.output(0)
        return self.folder


@pytest.fixture(scope="module", params=JOBS)
def killed(request, nursery, tmp_path_factory):
    """The folders of an unbroken run and of one that was killed while it exported, and later."""
    folder, chance = tmp_path_factory.mktemp("runs"), random.Random(request.param)
    straight, broken = (Job(nursery, folder / name, **JOBS[request.param]) for name in ("straight", "broken"))
    for _ in range(7 if len(JOBS[request.param]) > 1 else 0):
        broken.kill_anywhere(chance.uniform(2, 9))
    for step in (10, 10, 20):
        broken.kill(step, chance.uniform(0, 0.8))
        assert all(open_folder(path).tensors for path in (broken.folder / "exports").iterdir() if path.suffix != ".writing")
    return straight.end(), broken.end()


def test_what_a_killed_run_exports_is_what_the_unbroken_one_exports(killed):
    straight, broken = killed
    assert names(straight / "exports") == names(broken / "exports") == ["10", "20"]
    for step in ("10", "20"):
        equal(straight / "exports" / step, broken / "exports" / step)
    one, other = (saved_arrays(folder / "run" / "checkpoints", STEPS) for folder in killed)
    assert one.keys() == other.keys()
    for path, value in one.items():
        np.testing.assert_array_equal(value, other[path], err_msg=path)
    losses = [{row["step"]: row["loss"] for row in rows(folder / "run" / "metrics.jsonl")} for folder in killed]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS


def test_transformers_loads_what_a_killed_run_exports(killed, tmp_path):
    if subprocess.run([REFERENCE, "-I", "-c", "import torch, transformers"], capture_output=True).returncode:
        pytest.skip("needs the extra reference, here or in the environment of JGT_REFERENCE")
    tokens, folder = np.random.default_rng(1).integers(3, 64, (2, 16), np.int64), killed[1]
    np.save(tmp_path / "tokens.npy", tokens)
    files = [folder / "exports" / str(STEPS), tmp_path / "tokens.npy", tmp_path / "logits.npy"]
    subprocess.run([REFERENCE, "-I", "-c", TRANSFORMERS, *files], check=True)
    theirs, ours = np.load(tmp_path / "logits.npy"), load_model(folder / "run", ["devices.virtual_cpu=null"]).logits(tokens)
    assert np.abs(ours - theirs).max() < 5e-5 * theirs.std()


def test_all_processes_learn_that_the_folder_of_exports_is_another_runs(nursery, tmp_path):
    job = Job(nursery, tmp_path / "job", 2)
    (job.folder / "exports" / "7").mkdir(parents=True)
    with job.start() as processes:
        assert processes.wait_all() == [2, 2], processes.output(0)
        assert "checkpoint.export.path: has" in processes.output(0)
        assert "stopped because of the problems that process 0 reports" in processes.output(1)


def test_a_run_that_is_stopped_ends_its_export_and_the_next_start_writes_it(nursery, tmp_path):
    job = Job(nursery, tmp_path / "job", 1)
    with job.exporting(10, 0.5) as processes:
        processes.send(0, signal.SIGTERM)
        assert processes.wait_all() == [0], processes.output(0)
    assert names(job.folder / "exports") == []
    assert names(job.end() / "exports") == ["10", "20"]
    took = [json.loads(line) for line in (job.folder / "run" / "events.jsonl").read_text().splitlines() if '"export"' in line]
    assert sorted(event["step"] for event in took) == [10, 20]
