"""The files in deploy/ are valid, and agree with the trainer's flags, exit codes and cluster detection."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from jgt import document
from train.__main__ import parser
from train.config import Config, load
from train.files.ends import Exit
from train.processes.cluster import Cluster, cluster_problems, find_cluster, flag_problems

ROOT = Path(__file__).parent.parent
SLURM, JOBSET, IN_BUCKET, README = (ROOT / "deploy" / name for name in ("slurm.sbatch", "jobset.yaml", "jobset-bucket.yaml", "README.md"))
STOPPED = 75
COUNT = r"[1-9]\d*"
OPTIONS = {
    "job-name": r"[\w-]+",
    "nodes": COUNT,
    "ntasks-per-node": COUNT,
    "gpus-per-node": COUNT,
    "cpus-per-task": COUNT,
    "mem": r"0|\d+[KMGT]",
    "time": r"(\d+-)?\d+:\d\d:\d\d",
    # No B: in front: the signal is for the processes.
    "signal": r"TERM@\d+",
    "requeue": "",
    "open-mode": "append",
    "output": r"[\w%.-]+",
}


# -- Slurm -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def options():
    """Name → value of the #SBATCH lines. All of them come before the first command, because sbatch stops reading there."""
    head, _ = SLURM.read_text().split("\n\n", 1)
    lines = [line.removeprefix("#SBATCH --") for line in head.splitlines() if line.startswith("#SBATCH")]
    assert SLURM.read_text().count("#SBATCH") == len(lines)
    return dict(line.partition("=")[::2] for line in lines)


@pytest.fixture
def job(tmp_path):
    """Runs the script with fake Slurm commands: srun writes its arguments to a file, runs `work` and exits with a code."""
    bin_dir, run = tmp_path / "bin", tmp_path / "run"
    bin_dir.mkdir()

    def command(name, body):
        path = bin_dir / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def _job(code, work=":", **variables):
        command("srun", f'printf "%s\\n" "$@" >"{tmp_path}/srun"\n{work}\nexit {code}')
        command("scontrol", f'echo "$@" >>"{tmp_path}/scontrol"')
        environment = os.environ | {
            "PATH": f"{bin_dir}:{os.environ['PATH']}",
            "RUN": str(run),
            "SLURM_JOB_ID": "7",
            "SLURM_CPUS_PER_TASK": "12",
            **variables,
        }
        done = subprocess.run(["bash", SLURM], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (code, "")
        asked = tmp_path / "scontrol"
        requeued = asked.read_text().splitlines() if asked.exists() else []
        asked.unlink(missing_ok=True)
        assert requeued in ([], ["requeue 7"])
        return bool(requeued), done.stdout

    return _job


def test_the_script_is_bash():
    subprocess.run(["bash", "-n", SLURM], check=True)


def test_options_are_those_of_sbatch(options):
    assert options.keys() == OPTIONS.keys()
    for name, value in options.items():
        assert re.fullmatch(OPTIONS[name], value), name


def test_a_task_for_each_gpu(options):
    assert options["ntasks-per-node"] == options["gpus-per-node"]


@pytest.mark.parametrize(
    ("code", "again"),
    [
        *((code, False) for code in (Exit.DONE, Exit.INPUT, Exit.LOST)),
        *((code, True) for code in (STOPPED, Exit.FAILED, Exit.HUNG, Exit.PEER, Exit.UNJOINED, 137)),
    ],
)
def test_what_follows_an_exit_code(job, code, again):
    requeued, said = job(int(code))
    assert requeued == again
    assert said.count("\n") == 1 and ("; requeued, " in said) == again


def test_every_exit_code_has_an_answer():
    (param,) = test_what_follows_an_exit_code.pytestmark
    assert {code for code, _ in param.args[1]} >= set(Exit)


def test_failures_without_a_newer_checkpoint_come_to_an_end(job, tmp_path):
    checkpoint = f"mkdir -p {tmp_path}/run/checkpoints/20 {tmp_path}/run/checkpoints/30.broken"
    assert [job(1)[0] for _ in range(3)] == [True, True, True]
    assert [job(1, checkpoint)[0] for _ in range(4)] == [True, True, True, False]
    assert "3 restarts brought no checkpoint newer than step 20" in job(1)[1]
    assert job(STOPPED)[0]
    assert "to resume from step 20" in job(STOPPED)[1]


def test_srun_starts_what_the_trainer_reads(job, tmp_path):
    job(0)
    srun = (tmp_path / "srun").read_text().splitlines()
    at = srun.index("python")
    names = dict(option.partition("=")[::2] for option in srun[:at])
    assert names == {
        "--cpus-per-task": "12",
        "--gpu-bind": "none",
        "--kill-on-bad-exit": "0",
        "--wait": "120",
        "--output": f"{tmp_path}/run/logs/process-%t.log",
        "--open-mode": "append",
    }
    assert int(names["--wait"]) > Config().watchdog.peer_seconds + 5
    check_command(srun[at:], f"{tmp_path}/run")


def test_a_run_in_a_bucket_has_its_steps_in_its_spool(job, tmp_path):
    spool, rows = tmp_path / "spool", ['{"phase": "write", "time": 1.5, "seconds": 1.0, "step": 20}', '{"phase": "step", "step": 25}']
    spool.mkdir()
    (spool / "events.jsonl").write_text("".join(f"{row}\n" for row in rows))
    assert "to resume from step 20" in job(1, BUCKET="s3://bucket/gpu", SPOOL=str(spool))[1]
    srun = (tmp_path / "srun").read_text().splitlines()
    command = srun[srun.index("python") :]
    assert {"run.dir=s3://bucket/gpu", f"run.spool={spool}"} <= set(command)
    assert check_command(command, str(spool)).stopped_code == STOPPED


def test_the_trainer_sees_the_tasks_of_srun(options, monkeypatch):
    forget_clusters(monkeypatch)
    tasks = int(options["nodes"]) * int(options["ntasks-per-node"])
    monkeypatch.setenv("SLURM_NTASKS", str(tasks))
    assert find_cluster(None, None, None) is None
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "a[1-2]", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(name, value)
    assert find_cluster(None, None, None) == Cluster(num_processes=tasks)
    # What JAX makes of the same variables.
    from jax._src.clusters import SlurmCluster

    assert SlurmCluster.is_env_present()
    assert (SlurmCluster.get_process_count(), SlurmCluster.get_process_id(), SlurmCluster.get_local_process_id()) == (tasks, 9, 1)
    assert SlurmCluster.get_coordinator_address(None, None).startswith("a1:")


# -- Kubernetes --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[JOBSET, IN_BUCKET], ids=["disk", "bucket"])
def manifests(request):
    """Kind → manifest."""
    parts = [document.parse(text, request.param.name).plain() for text in request.param.read_text().split("\n---\n")]
    return {part["kind"]: part for part in parts}


@pytest.fixture
def jobset(manifests):
    return manifests["JobSet"]


@pytest.fixture
def job_spec(jobset):
    (job,) = jobset["spec"]["replicatedJobs"]
    assert job["replicas"] == 1
    return job["template"]["spec"]


@pytest.fixture
def pod(job_spec):
    return job_spec["template"]["spec"]


@pytest.fixture
def container(pod):
    (container,) = pod["containers"]
    return container


NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
SCHEMA = {
    "PersistentVolumeClaim": {"apiVersion": "v1", "spec": {"accessModes", "resources"}},
    "JobSet": {"apiVersion": "jobset.x-k8s.io/v1alpha2", "spec": {"network", "failurePolicy", "replicatedJobs"}},
}


def test_kinds_and_names(manifests, jobset, container):
    assert manifests.keys() in (SCHEMA.keys(), {"JobSet"})
    for kind, manifest in manifests.items():
        assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
        assert (manifest["apiVersion"], manifest["spec"].keys()) == (SCHEMA[kind]["apiVersion"], SCHEMA[kind]["spec"])
    for name in (jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"], container["name"]):
        assert NAME.fullmatch(name)


def test_all_processes_start_together(jobset, job_spec, pod):
    assert (job_spec["completionMode"], job_spec["backoffLimit"], pod["restartPolicy"]) == ("Indexed", 0, "Never")
    assert job_spec["completions"] == job_spec["parallelism"] > 1
    policy = jobset["spec"]["failurePolicy"]
    assert policy["restartStrategy"] == "BlockingRecreate" and policy["maxRestarts"] > 0


def test_processes_find_each_other(jobset, job_spec, container, monkeypatch):
    name, (job,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    assert jobset["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    (port,) = container["ports"]
    # The environment of an indexed job, which flags overrule.
    forget_clusters(monkeypatch)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    for index in range(job_spec["completions"]):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        folder = "/runs/gpu" if "run.dir=/runs/gpu" in container["args"] else "/spool/gpu"
        arguments = check_command(command_of(container, index), folder)
        flags = (arguments.coordinator, arguments.processes, arguments.process)
        assert list(flag_problems(*flags)) == []
        found = find_cluster(*flags)
        address = f"{name}-{job['name']}-0-0.{name}:{port['containerPort']}"
        assert found == Cluster(coordinator=address, num_processes=job_spec["parallelism"], process=index)
        assert list(cluster_problems(found)) == []


def test_exit_codes_have_the_same_meaning_for_pods_and_for_the_set(jobset, job_spec, container):
    pods = [on_exit(rule, container["name"]) for rule in job_spec["podFailurePolicy"]["rules"]]
    assert pods == [Exit.INPUT, Exit.LOST, STOPPED, "DisruptionTarget"]
    # What Kubernetes writes of a job that a rule failed.
    container_text = "Container train for pod default/gpu-train-0-1-x failed with exit code {} matching FailJob rule at index 0"
    messages = {
        Exit.INPUT: container_text.format(2),
        Exit.LOST: container_text.format(6),
        STOPPED: container_text.format(STOPPED),
        "DisruptionTarget": "Pod default/gpu-train-0-1-x has condition DisruptionTarget matching FailJob rule at index 2",
    }
    actions = {what: action(jobset, "PodFailurePolicy", message) for what, message in messages.items()}
    assert actions == {
        Exit.INPUT: "FailJobSet",
        Exit.LOST: "FailJobSet",
        STOPPED: "RestartJobSetAndIgnoreMaxRestarts",
        "DisruptionTarget": "RestartJobSetAndIgnoreMaxRestarts",
    }
    assert action(jobset, "BackoffLimitExceeded", "Job has reached the specified backoff limit") == "RestartJobSet"


def test_a_pod_has_gpus_its_volumes_and_time_for_a_checkpoint(manifests, pod, container):
    assert pod["terminationGracePeriodSeconds"] >= 120
    assert container["resources"]["limits"]["nvidia.com/gpu"] >= 1
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys() and mounts["shm"] == "/dev/shm"
    if claim := manifests.get("PersistentVolumeClaim"):
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    else:
        assert volumes["spool"]["emptyDir"] == {} and pod["serviceAccountName"]
    assert all(set(variable) == {"name", "value"} and isinstance(variable["value"], str) for variable in container["env"])


def test_the_image_has_a_version(container):
    assert re.fullmatch(r"[\w.-]+(/[\w.-]+)+:v?\d[\w.-]*", container["image"])


def command_of(container, index):
    """The command of the pod with an index. Kubernetes replaces $(NAME) by the value of a variable."""
    command = [*container["command"], *container["args"]]
    assert set(re.findall(r"\$\((\w+)\)", " ".join(command))) == {"JOB_COMPLETION_INDEX"}
    return [part.replace("$(JOB_COMPLETION_INDEX)", str(index)) for part in command]


def on_exit(rule, name):
    """The exit code, or the condition, that a pod's rule applies to."""
    assert rule["action"] == "FailJob"
    if "onExitCodes" in rule:
        (value,) = rule["onExitCodes"]["values"]
        assert rule["onExitCodes"] == {"containerName": name, "operator": "In", "values": [value]}
        return value
    ((condition),) = rule["onPodConditions"]
    assert condition["status"] == "True"
    return condition["type"]


def action(jobset, reason, message):
    """The action of JobSet: that of the first rule with this reason and with a pattern that the message matches."""
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        assert rule.keys() == {"name", "action", "onJobFailureReasons", "onJobFailureMessagePatterns"}
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"]):
            return rule["action"]
    return "RestartJobSet"


# -- both --------------------------------------------------------------------------------------------------------


def check_command(command, folder):
    """The parsed arguments of a command line. Its config must exist and use `folder` as the run directory."""
    assert command[:4] == ["python", "-m", "jgt", "train"]
    arguments = parser().parse_args(command[4:])
    assert arguments.stopped_code == STOPPED
    assert STOPPED not in set(Exit)
    run = load(ROOT / arguments.config, arguments.overrides, num_processes=None)
    assert str(run.config.run.path) == folder
    return arguments


def forget_clusters(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "JOB_COMPLETION_")):
            monkeypatch.delenv(name)


def test_the_readme_names_what_is_there():
    text, files = README.read_text(), SLURM.read_text() + JOBSET.read_text() + IN_BUCKET.read_text()
    for command in re.findall(r"^    (.*)", text, re.MULTILINE):
        assert any((ROOT / word).is_file() for word in shlex.split(command) if "/" in word and "=" not in word), command
    for line in re.findall(r"^\| (.*?) \|", text, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", line):
            assert name.partition(":")[0] in files, name
