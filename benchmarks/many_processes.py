"""What grows with the number of processes of a run: its start, the agreement on a step, and the work of the first process in a save.

    python benchmarks/many_processes.py [--counts 8 16 32 64] [--saves 3] [--json] [--save]

The processes are tiny and share this machine, so CPU-seconds of the first process say more than wall seconds. Each process has the same
bytes, whatever their number, in a folder and in a bucket that is a folder (file://). A save includes the removal of the one before.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.harness import FailedError, make_parser, report, table
from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.config import CheckpointConfig
from train.processes.cluster import Cluster
from train.processes.config import WatchdogConfig
from train.processes.connect import start_jax
from train.processes.join import Membership
from train.processes.processes import barrier, exit_if_distributed, shared_store, true_on_all_processes
from train.processes.watch import Watch
from train.step.state import State

_ARRAYS = 16
_WATCH_SECONDS = 20.0
_LIMIT_S = 3000.0


def main() -> None:
    """Prints a row for each number of processes, or one JSON object."""
    parser = make_parser(__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[8, 16, 32, 64], metavar="N", help="numbers of processes")
    parser.add_argument("--saves", type=int, default=3)
    arguments = parser.parse_args()
    rows = [measure(count, arguments.saves) for count in arguments.counts]
    report("many_processes", {"rows": rows}, arguments, table(rows))


def measure(count: int, saves: int) -> dict[str, Any]:
    """The figures of the first of so many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w+") as log:
        command = [sys.executable, __file__, "--worker", str(port), str(count), str(saves), folder, repr(time.time())]
        children = [subprocess.Popen([*command, str(process)], stdout=log, stderr=log) for process in range(count)]
        try:
            # The first process is the coordinator. Once it has exited, the exit codes of the others say nothing.
            code = children[0].wait(_LIMIT_S)
        finally:
            for child in children:
                child.kill()
                child.wait()
        if code:
            log.seek(0)
            raise FailedError(log.read()[-3000:])
        return {"processes": count, **json.loads(Path(folder, "found.json").read_text())}


class Worker:
    """One of the processes, and what it has found."""

    def __init__(self, port: str, count: str, begun: str, process: str):
        wall, cpu = time.time(), time.process_time()
        cluster = Cluster(coordinator=f"localhost:{port}", num_processes=int(count), process=int(process))
        start_jax(cluster, 1, heartbeat_seconds=600, member=Membership(seconds=_LIMIT_S))
        self.sharding = NamedSharding(Mesh(jax.devices(), "fsdp"), PartitionSpec("fsdp"))
        barrier("devices")
        self.is_first = process == "0"
        self.found = {"start_s": time.time() - float(begun), "join_s": time.time() - wall, "join_cpu_s": time.process_time() - cpu}

    def state(self) -> State:
        """A state with the same bytes for each device, whatever their number."""
        shape, whole = (self.sharding.mesh.size * 64, 64), NamedSharding(self.sharding.mesh, PartitionSpec())
        params = {f"kernel{i}": jax.jit(lambda: jnp.ones(shape), out_shardings=self.sharding)() for i in range(_ARRAYS)}
        return State(jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=whole)(), params, {})

    def timed(self, name: str, call: Callable[[int], object], times: int) -> None:
        """Finds the medians of the wall and CPU-seconds of a call that all processes begin together."""
        spent = list[tuple[float, float]]()
        for number in range(1, times + 2):
            barrier(f"{name} {number}")
            wall, cpu = time.perf_counter(), time.process_time()
            call(number)
            spent.append((time.perf_counter() - wall, time.process_time() - cpu))
        self.found[f"{name}_s"], self.found[f"{name}_cpu_s"] = (median(values) for values in zip(*spent[1:], strict=True))

    def save(self, name: str, place: Path | str, state: State, times: int) -> None:
        """Times saves, each of which removes the one before."""
        checkpoints = Checkpoints(place, CheckpointConfig(keep=1))

        def save(number: int) -> None:
            checkpoints.save(state, number, samples=0)
            checkpoints.wait()

        self.timed(name, save, times)
        checkpoints.close()

    def watch(self, folder: Path) -> None:
        """Finds the share of a core that the watch takes, and the time from a request for a save until all have agreed on its step."""
        with Watch(WatchdogConfig(peer_seconds=_LIMIT_S), folder, shared_store()) as watch:
            barrier("watch")
            cpu, step = time.process_time(), 1
            time.sleep(_WATCH_SECONDS)
            self.found["watch_cpu_share"] = (time.process_time() - cpu) / _WATCH_SECONDS
            barrier("watched")
            wall = time.perf_counter()
            if self.is_first:
                watch.request("save")
            while "save" not in watch.asked_for(step):
                watch.may_begin(step)
                time.sleep(0.01)
                step += 1
            self.found["request_s"] = time.perf_counter() - wall
            barrier("end")


def work(port: str, count: str, saves: str, folder: str, begun: str, process: str) -> None:
    """One of the processes, from its start to its end."""
    worker = Worker(port, count, begun, process)
    state = worker.state()
    worker.timed("agree", lambda number: true_on_all_processes(True), 5)
    worker.save("folder", Path(folder, "run"), state, int(saves))
    worker.save("bucket", f"file://{folder}/bucket", state, int(saves))
    worker.watch(Path(folder))
    if worker.is_first:
        Path(folder, "found.json").write_text(json.dumps({name: round(value, 4) for name, value in worker.found.items()}))
    exit_if_distributed(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
    else:
        main()
