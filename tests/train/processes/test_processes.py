"""Two real processes with four devices each give the numbers of one process with eight, and either reads the other's checkpoints."""

import argparse
import types

import jax
import numpy as np
import pytest
from checkpoints import newest_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from runs import flags, run_both

from jgt.document import InputError
from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.restore import restore
from train.config import load
from train.processes.cluster import Cluster, cluster_problems, find_cluster, flag_problems
from train.processes.connect import start_jax
from train.processes.join import Address
from train.run.train import train
from train.settings.command_line import join_seconds, read_token, whole_number
from train.setup import prepare
from train.setup.feed import local_rows

# Each test shares processes that take long to start.
pytestmark = pytest.mark.slow

STEPS = 20
SRUN = {"SLURM_STEP_NODELIST": "a[1-2]", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
OVERRIDES = ("mesh={data: 2, fsdp: 4}", f"train.steps={STEPS}", f"checkpoint.every={STEPS}")
RULES = {
    "axes": {"batch": ["data", "fsdp"]},
    "signals": {"layers/*": {"params": {"*/kernel": ["fsdp", None]}, "out": ["batch", None, None]}},
    "default": "replicate",
}


@pytest.fixture(scope="module")
def rules(tmp_path_factory):
    """The override that sets these rules."""
    from jgt import document

    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(document.dump(RULES))
    return f"rules={path}"


@pytest.fixture(scope="module")
def two_processes(tiny_file, rules, tmp_path_factory, pytestconfig):
    """The directory of a run of some steps on two processes, and the output of each process."""
    folder = tmp_path_factory.mktemp("two")
    command = ["-m", "train", "--config", str(tiny_file), f"run.dir={folder}", rules, *OVERRIDES, "devices.virtual_cpu=4"]
    return folder, run_both(tmp_path_factory.mktemp("logs"), lambda port, i: [*command, *flags(port, 2, i)], pytestconfig.rootpath)


def losses(rows):
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def one_process(tiny_file, rules, tmp_path_factory):
    """The directory of the same steps on this process alone, with all eight devices."""
    folder = tmp_path_factory.mktemp("one")
    train(load(tiny_file, [f"run.dir={folder}", rules, *OVERRIDES]))
    return folder


def test_two_processes_have_the_curve_of_one(two_processes, one_process, read_rows):
    alone, both = (losses(read_rows(folder / "metrics.jsonl")) for folder in (one_process, two_processes[0]))
    assert len(both) == STEPS
    np.testing.assert_allclose(both, alone, rtol=0, atol=1e-5)


def test_only_the_first_process_speaks(two_processes):
    first, second = two_processes[1]
    assert "Mesh: data 2 x fsdp 4 = 8 x cpu on 2 processes" in first
    assert f"step {STEPS}/{STEPS}" in first
    assert "step" not in second


def test_one_device_reads_the_checkpoint_of_two_processes(two_processes, one_process, tiny_file):
    (params, samples), (expected, _) = (restored(load(tiny_file, [f"run.dir={folder}"])) for folder in (two_processes[0], one_process))
    assert samples == STEPS * 16
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), params, expected)


INIT = """
import sys, jax, numpy as np
from train.processes.cluster import Cluster
from train.config import load
from train.processes.connect import start_jax
from train.setup import prepare
config, port, process, folder, *overrides = sys.argv[1:]
start_jax(Cluster(coordinator=f"localhost:{port}", num_processes=2, process=int(process)), 4)
leaves = jax.tree.leaves(prepare(load(config, overrides, num_processes=2)).init().params)
shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
np.savez(f"{folder}/{process}.npz", *[shard.data for shard in shards])
index = [np.array([[s.start or 0, -1 if s.stop is None else s.stop] for s in shard.index]) for shard in shards]
np.savez(f"{folder}/{process}-index.npz", *index)
"""


@pytest.mark.slow
def test_parameters_start_with_the_same_bits_on_two_processes(tiny_file, rules, tmp_path, pytestconfig):
    overrides = [rules, *OVERRIDES]
    run_both(
        tmp_path,
        lambda port, i: ["-c", INIT, str(tiny_file), str(port), str(i), str(tmp_path), *overrides, "devices.virtual_cpu=4"],
        pytestconfig.rootpath,
    )
    alone = jax.device_get(jax.tree.leaves(prepare(load(tiny_file)).init().params))
    for process in range(2):
        shards, indices = (list(np.load(tmp_path / f"{process}{name}.npz").values()) for name in ("", "-index"))
        for place, (shard, index) in enumerate(zip(shards, indices, strict=True)):
            whole = alone[place // 4]
            part = tuple(slice(start, None if stop < 0 else stop) for start, stop in index)
            np.testing.assert_array_equal(shard, whole[part])


def restored(run):
    setup = prepare(run)
    checkpoints = Checkpoints(run.config.run.path / "checkpoints", run.config.checkpoint)
    found, _ = newest_of(checkpoints)
    state = restore(found, setup.saved_shapes, setup.saved_shardings)
    checkpoints.close()
    assert found.manifest.step == STEPS
    return jax.device_get(state.params), found.manifest.samples


@pytest.mark.parametrize(
    "variables",
    [
        {**SRUN, "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_PROCID": "x"},
        {**SRUN, "SLURM_NTASKS": "4", "SLURM_JOB_ID": "abc"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_MCA_orte_hnp_uri": "junk"},
    ],
)
def test_variables_that_jax_cannot_read_are_wrong_input(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=r"environment: JAX cannot read the variables of this cluster: .* Give --coordinator, --processes"):
        start_jax(Cluster(num_processes=2), None)


# -- rows --------------------------------------------------------------------------------------------------------


class Sharding:
    """Replaces the sharding of an array of which this process's devices hold some parts."""

    def __init__(self, *indices):
        self._indices = dict(enumerate(indices))

    def addressable_devices_indices_map(self, shape):
        return self._indices


def test_a_process_reads_the_rows_that_its_devices_hold_and_no_other():
    every = slice(None)
    assert local_rows(Sharding((slice(4, 6), every), (slice(6, 8), every)), (8, 32)) == [4, 5, 6, 7]
    assert local_rows(Sharding((slice(0, 2), every), (slice(4, 6), every)), (8, 32)) == [0, 1, 4, 5]


def test_rows_that_several_devices_hold_are_read_once():
    assert local_rows(Sharding((slice(2, 4), slice(0, 16)), (slice(2, 4), slice(16, 32)), None), (8, 32)) == [2, 3]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (PartitionSpec("data"), [0, 1, 2, 3, 4, 5, 6, 7]),
        (PartitionSpec(), [0, 1, 2, 3, 4, 5, 6, 7]),
        (PartitionSpec(None, "data"), list(range(8))),
    ],
)
def test_one_process_reads_all_rows(spec, expected):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert local_rows(NamedSharding(mesh, spec), (8, 32)) == expected


# -- who joins whom ----------------------------------------------------------------------------------------------


def test_flags_name_a_cluster():
    assert find_cluster("host:1", 2, 1) == Cluster(coordinator="host:1", num_processes=2, process=1)
    assert list(flag_problems("host:1", 2, 1)) == []
    assert list(flag_problems(None, None, None)) == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("host:1", None, None), "command line: --processes, --process: missing"),
        ((None, None, 0), "command line: --coordinator, --processes: missing"),
        (("host:1", 2, 2), "command line: --process: must be between 0 and 1 (--processes 2), not 2"),
        (("host:1", 0, 0), "command line: --processes: must be at least 1, not 0"),
        (("host", 2, 0), "command line: --coordinator: 'host' has no port. Write HOST:PORT, for example localhost:8476"),
        (("host:0", 2, 0), "command line: --coordinator: 'host:0' is not HOST:PORT with a port from 1 to 65,535"),
        (("host:99999", 2, 0), "command line: --coordinator: 'host:99999' is not HOST:PORT with a port from 1 to 65,535"),
        ((":1", 2, 0), "command line: --coordinator: ':1' is not HOST:PORT with a port from 1 to 65,535"),
    ],
)
def test_flags_that_name_none(flags, expected):
    (problem,) = flag_problems(*flags)
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "1"}, None),
        ({"SLURM_NTASKS": "16"}, None),
        ({"SLURM_NTASKS": "16", **SRUN}, Cluster(num_processes=16)),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, Cluster(num_processes=4)),
        # mpirun in a Slurm job of three nodes: srun has started what starts the processes.
        ({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_NTASKS": "2", **SRUN}, Cluster(num_processes=4)),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, Cluster()),
    ],
)
def test_the_environment_names_a_cluster(monkeypatch, environment, expected):
    for name in ("SLURM_NTASKS", *SRUN, "OMPI_COMM_WORLD_SIZE", "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_cluster(None, None, None) == expected


@pytest.mark.parametrize("installed", [True, False])
def test_kubernetes_needs_its_package_unless_flags_are_given(monkeypatch, installed):
    monkeypatch.setattr("train.processes.cluster.importlib.util.find_spec", lambda name: object() if installed else None)
    problems = list(cluster_problems(Cluster()))
    assert [problem.startswith("environment: JOB_COMPLETION_INDEX: ") for problem in problems] == [True] * (not installed)
    for cluster in (None, Cluster(num_processes=2), Cluster(coordinator="host:1", num_processes=2, process=0)):
        assert list(cluster_problems(cluster)) == []


def test_open_mpi_needs_the_address_of_mpirun_unless_flags_are_given(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.delenv("OMPI_MCA_orte_hnp_uri", raising=False)
    (problem,) = cluster_problems(Cluster(num_processes=2))
    assert problem.startswith("environment: OMPI_COMM_WORLD_SIZE: ") and "--process $OMPI_COMM_WORLD_RANK" in problem
    assert list(cluster_problems(Cluster(coordinator="host:1", num_processes=2, process=0))) == []
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1.0;tcp://10.0.0.1:2")
    assert list(cluster_problems(Cluster(num_processes=2))) == []


@pytest.fixture
def started(monkeypatch):
    """Starts JAX with a cluster. Returns where the processes meet, and what JAX is told."""
    for variable in ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_LOCAL_DEVICE_IDS"):
        monkeypatch.delenv(variable, raising=False)

    def _started(cluster, found=(None, None, None, None)):
        places, calls = [], []
        initialize = types.SimpleNamespace(initialize=lambda *flags, **options: calls.append((flags, options)))
        fake = types.SimpleNamespace(config=types.SimpleNamespace(update=lambda *_: None), distributed=initialize)
        monkeypatch.setattr("train.processes.connect.jax", fake)
        monkeypatch.setattr("train.processes.connect.join", lambda place, *_: places.append(place))
        detected = types.SimpleNamespace(auto_detect_unset_distributed_params=lambda *_: found)
        monkeypatch.setattr("train.processes.connect.ClusterEnv", detected)
        start_jax(cluster, None)
        ((flags, options),), (place,) = calls, places
        assert options["cluster_detection_method"] == "deactivate"
        return place, flags, options["coordinator_bind_address"]

    return _started


@pytest.mark.parametrize(
    ("address", "place", "expected", "bound"),
    [
        ("host:1", Address(host="host", port=1, listen="::"), "host:1", "[::]:1"),
        ("localhost:1", Address(host="127.0.0.1", port=1, listen="127.0.0.1"), "127.0.0.1:1", "127.0.0.1:1"),
        ("[fe80::1]:1", Address(host="fe80::1", port=1, listen="::"), "[fe80::1]:1", "[::]:1"),
    ],
)
def test_processes_meet_where_jax_connects_them(started, address, place, expected, bound):
    cluster = Cluster(coordinator=address, num_processes=2, process=1)
    assert started(cluster) == (place, (expected, 2, 1, None), bound)


def test_the_address_to_listen_at_may_be_given(started, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "10.0.0.1:1")
    place, _, bound = started(Cluster(coordinator="localhost:1", num_processes=2, process=1))
    assert (place.listen, bound) == ("10.0.0.1", "10.0.0.1:1")


def test_jax_finds_the_processes_of_a_cluster(started):
    place, flags, _ = started(Cluster(num_processes=2), ("node:7", 2, 1, [1]))
    assert (place, flags) == (Address(host="node", port=7), ("node:7", 2, 1, [1]))


def test_a_cluster_that_jax_does_not_find(started):
    with pytest.raises(InputError, match="environment: JAX does not find the other processes"):
        started(Cluster(num_processes=2))


# -- what a process is given -----------------------------------------------------------------------------------------


def test_the_token_comes_from_the_file_or_else_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("JGT_TOKEN", raising=False)
    assert read_token(None) == (b"", [])
    monkeypatch.setenv("JGT_TOKEN", " secret\n")
    assert read_token(None) == (b"secret", [])
    (tmp_path / "token").write_text("another\n")
    # As in a mounted Secret of Kubernetes.
    (tmp_path / "link").symlink_to(tmp_path / "token")
    assert read_token(str(tmp_path / "token")) == read_token(str(tmp_path / "link")) == (b"another", [])


@pytest.mark.parametrize(
    ("content", "expected"),
    [("", "is empty. Write a long random text into it"), ("x" * 5000, "is larger than 4,096 bytes"), (None, "cannot be read")],
)
def test_files_without_a_token(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "token").write_text(content)
    token, (problem,) = read_token(str(tmp_path / "token"))
    assert problem.startswith(f"command line: --token-file: {tmp_path / 'token'}: ") and expected in problem
    assert token == b""


def test_launched_processes_wait_less_for_each_other(monkeypatch):
    monkeypatch.delenv("JGT_LAUNCHED", raising=False)
    assert (join_seconds(None), join_seconds(7.0)) == (300, 7)
    monkeypatch.setenv("JGT_LAUNCHED", "1")
    assert (join_seconds(None), join_seconds(7.0)) == (30, 7)


@pytest.mark.parametrize("number", ["0", "256", "-1", "1.5", "nan", "9" * 5000])
def test_exit_codes_have_eight_bits(number):
    assert whole_number(high=255)("255") == 255
    with pytest.raises(argparse.ArgumentTypeError, match="must be a whole number from 1 to 255"):
        whole_number(high=255)(number)
