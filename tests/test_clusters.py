"""deploy/slurm.sbatch under a real Slurm, and a run under a real mpirun: four processes of one machine find each other, stop and resume.

apt-get install slurmctld slurmd munge openmpi-bin && pytest -m cluster -n 0
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import rows, wait_for_step
from slurm import Slurm, missing_commands, wait_for

from jgt import document
from train.files.ends import Exit

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "deploy" / "slurm.sbatch"
STEPS, PROCESSES, SECONDS, STOPPED = 40, 4, 200, 75
RUN = {
    "run": {"name": "tiny"},
    "devices": {"virtual_cpu": 1},
    "model": {"kind": "llama", "layers": 2, "embed": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab": 256, "seq": 32},
    "mesh": {"fsdp": -1},
    "rules": "jgt:fsdp",
    "data": {"source": "text", "path": "text.txt", "eval_tokens": 0},
    "optimizer": {"lr": 3e-3, "schedule": "constant", "warmup": 2},
    "train": {"steps": STEPS, "batch": 16},
    "checkpoint": {"every": 1000},
}
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": ""}
# The script has the sizes of a real cluster. The job's own are these.
SIZES = ("--nodes=1", f"--ntasks-per-node={PROCESSES}", f"--gpus-per-node={PROCESSES}", "--cpus-per-task=1", "--mem=100")

pytestmark = pytest.mark.cluster
needs_slurm = pytest.mark.skipif(bool(missing_commands()), reason=f"not installed: {', '.join(missing_commands())}")
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="not installed: mpirun")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    # kill_wait: from SIGTERM to SIGKILL when a job is requeued.
    with Slurm(tmp_path_factory.mktemp("slurm"), PROCESSES, kill_wait=60) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the file of a run and its text, which all runs of these tests train."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(" ".join(str(i * i) for i in range(4000)))
    (folder / "run.yaml").write_text(document.dump(RUN))
    (folder / "wrong.yaml").write_text(document.dump(RUN | {"mesh": {"fsdp": 3}}))
    return folder


def environment(path=""):
    # The script's `python` is the one that runs the tests.
    return ENVIRONMENT | {"PATH": f"{Path(sys.executable).parent}:{path or os.environ['PATH']}"}


def losses(run):
    return {row["step"]: row["loss"] for row in rows(run / "metrics.jsonl") if "loss" in row}


def starts(run):
    return [event for event in rows(run / "events.jsonl") if event["phase"] == "start"]


# -- Slurm -------------------------------------------------------------------------------------------------------


@pytest.fixture
def submit(slurm, folder):
    """Submits the script for a run directory. Returns the number of the job."""

    def _submit(run, config="run.yaml", **variables):
        path = slurm.environment["PATH"]
        variables = environment(path) | {"CONFIG": config, "RUN": str(run)} | variables
        return slurm.submit(*SIZES, SCRIPT, environment=variables, cwd=folder)

    return _submit


@pytest.fixture(scope="module")
def unbroken(slurm, folder):
    """The losses of an unbroken run of four tasks, which srun starts without the script."""
    command = ["srun", f"--ntasks={PROCESSES}", sys.executable, "-m", "jgt", "train", "run.yaml", "run.dir=unbroken"]
    slurm.run(*command, environment=environment(slurm.environment["PATH"]), cwd=folder, seconds=SECONDS)
    return losses(folder / "unbroken")


@needs_slurm
def test_a_job_that_is_signalled_and_requeued_resumes(slurm, submit, unbroken, folder):
    run = folder / "requeued"
    job = submit(run)
    wait_for_step(run, 3)
    # As before the time limit: to the tasks, not to the script.
    slurm.run("scancel", "--signal=TERM", job)
    wait_for(lambda: slurm.restarts(job) == 1, "the job did not requeue itself")
    slurm.skip_delay(job)
    step = max(losses(run))
    wait_for_step(run, step + 3)
    # As after a preemption with a grace time: to tasks and script, and the job ends.
    slurm.run("scontrol", "requeue", job)
    slurm.skip_delay(job)
    assert slurm.wait_until_over(job, SECONDS) == "COMPLETED"
    log = (folder / f"jgt-{job}.log").read_text()
    assert f"stopped by a signal, and saved; requeued, to resume from step {step}" in log and log.endswith("done\n")
    first, second, third = starts(run)
    assert [start["processes"] for start in (first, second, third)] == [PROCESSES] * 3
    restored = [event["step"] for event in rows(run / "events.jsonl") if event["phase"] == "restore"]
    assert restored[0] == step < restored[1] < STEPS
    assert losses(run) == unbroken and len(unbroken) == STEPS
    assert {path.name for path in (run / "logs").iterdir()} == {f"process-{i}.log" for i in range(PROCESSES)}


@needs_slurm
def test_a_job_that_scancel_ends_is_saved_and_not_requeued(slurm, submit, folder):
    run = folder / "cancelled"
    job = submit(run)
    wait_for_step(run, 2)
    slurm.run("scancel", job)
    assert slurm.wait_until_over(job, SECONDS) == "CANCELLED"
    assert slurm.restarts(job) == 0
    assert [path.name for path in (run / "checkpoints").iterdir()] == [str(max(losses(run)))]


@needs_slurm
def test_a_task_that_is_killed_costs_a_restart(slurm, submit, unbroken, folder):
    run = folder / "killed"
    job = submit(run)
    wait_for_step(run, 2)
    os.kill(starts(run)[0]["pid"], signal.SIGKILL)
    wait_for(lambda: slurm.restarts(job) == 1, "the job did not requeue itself")
    slurm.skip_delay(job)
    assert slurm.wait_until_over(job, SECONDS) == "COMPLETED"
    assert "ended with exit code 137; requeued, to resume from step 0" in (folder / f"jgt-{job}.log").read_text()
    assert losses(run) == unbroken


@needs_slurm
def test_wrong_input_is_not_requeued(slurm, submit, folder):
    job = submit(folder / "wrong", "wrong.yaml")
    assert slurm.wait_until_over(job, SECONDS) == "FAILED"
    assert slurm.restarts(job) == 0
    assert "the input is wrong" in (folder / f"jgt-{job}.log").read_text()
    assert "wrong.yaml:" in (folder / "wrong" / "logs" / "process-0.log").read_text()


@needs_slurm
def test_the_slurm_of_the_readme():
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "slurm.py")]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True) as process:
        try:
            name, _, path = process.stdout.readline().strip().removeprefix("export ").partition("=")
            command = ["srun", "--ntasks=4", "--gpus-per-node=4", "printenv", "SLURM_PROCID"]
            done = subprocess.run(command, env=os.environ | {name: path}, capture_output=True, text=True, timeout=SECONDS)
            assert sorted(done.stdout.split()) == list("0123"), done.stderr
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=SECONDS) == 0
        assert not Path(path).exists()


# -- Open MPI ----------------------------------------------------------------------------------------------------

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(PROCESSES)]


def train(run):
    return [sys.executable, "-m", "jgt", "train", "run.yaml", f"run.dir={run}", "--stopped-code", str(STOPPED)]


@needs_mpirun
def test_mpirun_trains_saves_stops_and_resumes(folder, tmp_path):
    run = folder / "mpirun"
    variables = os.environ | environment()
    # Twice this time passes between SIGTERM to mpirun and SIGKILL to the processes; after the first half they get SIGTERM.
    command = [*MPIRUN, "--mca", "odls_base_sigkill_timeout", "5", *train(run)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, "train.steps=1000"], cwd=folder, env=variables, stdout=log, stderr=log)
    try:
        wait_for_step(run, 3)
        process.send_signal(signal.SIGUSR1)
        wait_for(lambda: any((run / "checkpoints").glob("[0-9]")), "mpirun did not pass SIGUSR1 on")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=SECONDS) != 0
    finally:
        process.kill()
        process.wait()
    assert "SIGTERM: the steps under way" in (tmp_path / "log").read_text()
    saved = max(int(path.name) for path in (run / "checkpoints").iterdir())
    assert saved == max(losses(run))
    done = subprocess.run(
        [*command, f"train.steps={saved + 5}"], cwd=folder, env=variables, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == Exit.DONE, done.stdout + done.stderr
    assert f"Resumed from step {saved}" in done.stdout
    assert [start["processes"] for start in starts(run)] == [PROCESSES] * 2
    assert sorted(losses(run)) == list(range(1, saved + 6))


@needs_slurm
@needs_mpirun
def test_mpirun_within_a_slurm_job(slurm, unbroken, folder):
    run = folder / "both"
    script = folder / "both.sh"
    script.write_text(f"#!/bin/bash\n{' '.join([*MPIRUN, *train(run)])}\n")
    variables = environment(slurm.environment["PATH"])
    job = slurm.submit(f"--ntasks={PROCESSES}", "--output=both.log", script, environment=variables, cwd=folder)
    assert slurm.wait_until_over(job, SECONDS) == "COMPLETED", (folder / "both.log").read_text()
    assert losses(run) == unbroken
