"""Seconds of a step of two groups over a slow link, with each policy of `sync:`. On Linux, as root.

    python benchmarks/link.py [POLICY ...] [--mbit N] [--steps N] [--json] [--save]

The two processes of configs/two-pods.yaml run in two network namespaces of this machine, with one device and one sequence a step each. A
pair of virtual Ethernet devices joins them, whose rate `tc` limits in both directions, and gradients and parameters have no other way. A
step's time is the time from one exchange to a later one, divided by the steps between them: exchanges count as much as in a long run.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import ROOT, FailedError, make_parser, report

POLICIES = {
    "never": "{axis: replica, every: 1000}",
    "every 1, f32": "{axis: replica}",
    "every 1, int8": "{axis: replica, wire: int8}",
    "every 10, f32": "{axis: replica, every: 10}",
    "every 10, int8": "{axis: replica, every: 10, wire: int8}",
}
FIRST = 20
"""The first measured step follows this one. At the exchange before it, of step 10, processes still wait for the one that started last."""
OPTIONS = (
    "log=[]",
    "sample.tokens=0",
    "checkpoint.every=0",
    "train.eval_every=0",
    "data.eval_tokens=0",
    "train.log_every=1",
    "train.batch=2",
)
PORT = 41_893
SECONDS = 600


def main() -> None:
    """Prints the seconds of a step with each policy."""
    parser = make_parser(__doc__)
    parser.add_argument("policies", nargs="*", metavar="POLICY", help="; ".join(POLICIES))
    parser.add_argument("--mbit", type=int, default=10, help="the link's rate in each direction, in 10^6 bits per second (10)")
    parser.add_argument("--steps", type=int, default=20, help="measured steps, a multiple of 10 (20)")
    arguments = parser.parse_args()
    with joined(arguments.mbit) as groups, tempfile.TemporaryDirectory() as folder:
        found = {
            name: {"step_s": step_seconds(groups, Path(folder) / str(index), POLICIES[name], arguments.steps)}
            for index, name in enumerate(arguments.policies or POLICIES)
        }
    report("link", {"mbit": arguments.mbit} | found, arguments)


@contextlib.contextmanager
def joined(mbit: int) -> Generator[list[tuple[str, str]], None, None]:
    """Two network namespaces that reach each other at this rate: the name and the address of each."""
    groups = [(f"jgt{os.getpid()}{end}", f"10.77.0.{number}") for number, end in enumerate("ab", 1)]
    with contextlib.ExitStack() as undo:
        for name, address in groups:
            run("ip", "netns", "add", name)
            undo.callback(run, "ip", "netns", "del", name)
            # Each process takes the address of this machine's name for its own.
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True)
            undo.callback(hosts.parent.rmdir)
            hosts.write_text(f"127.0.0.1 localhost\n{address} {os.uname().nodename}\n")
            undo.callback(hosts.unlink)
        (first, _), (second, _) = groups
        run("ip", "link", "add", "link0", "netns", first, "type", "veth", "peer", "name", "link0", "netns", second)
        for name, address in groups:
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "link0")
            run("ip", "-n", name, "link", "set", "link0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            limit = ("tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "400ms")
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "link0", "root", *limit)
        yield groups


def step_seconds(groups: Sequence[tuple[str, str]], folder: Path, sync: str, steps: int) -> float:
    """The mean seconds of a step with this `sync:` section."""
    options = [f"sync={sync}", f"run.dir={folder}", f"train.steps={max(FIRST + steps + 2, 1000)}", *OPTIONS]
    config = [str(ROOT / "configs" / "two-pods.yaml"), "devices.virtual_cpu=1", "mesh.fsdp=1", *options]
    joining = ["--coordinator", f"{groups[0][1]}:{PORT}", "--processes", str(len(groups))]
    with contextlib.ExitStack() as ending:
        started: list[subprocess.Popen[Any]] = []
        for number, (name, _) in enumerate(groups):
            log = ending.enter_context(folder.with_suffix(f".{number}.log").open("w"))
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "jgt", "train", *config, *joining, "--process", str(number)]
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
            ending.callback(process.wait)
            ending.callback(process.kill)
            started.append(process)
        ends = ends_of_steps(folder / "metrics.jsonl", FIRST + steps, started)
    return (ends[FIRST + steps] - ends[FIRST]) / steps


def ends_of_steps(metrics: Path, last: int, started: Sequence[subprocess.Popen[Any]]) -> dict[int, float]:
    """The times at which the steps up to `last` were finished."""
    deadline = time.monotonic() + SECONDS
    while True:
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        ends = {row["step"]: row["time"] for row in rows}
        if last in ends:
            return ends
        if time.monotonic() > deadline or any(process.poll() is not None for process in started):
            tail = metrics.parent.with_suffix(".0.log").read_text()[-2000:]
            raise FailedError(f"a process has ended, or {SECONDS} s were too few for {last} steps. Process 0 wrote: {tail}")
        time.sleep(0.5)


def run(*command: str) -> None:
    """Runs a command of the system. Raises FailedError if it fails."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise FailedError(f"{' '.join(command)}: {error.stderr.strip()}") from None


if __name__ == "__main__":
    try:
        main()
    except FailedError as failure:
        sys.exit(str(failure))
