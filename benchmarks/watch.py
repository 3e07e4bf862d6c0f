"""What it costs to watch a run: a frame of `jgt top`, its refresh, the trace of a million events, and what a run pays for its status.

    python benchmarks/watch.py [--json] [--save] [--live 20] [--processes 2]

The runs are written here, as a run of 30 days would have left them. Each command runs in a process of its own. Linux counts the memory of
this program in that of a command. With --live, real runs are watched too: one that compiles for some seconds, and this many quiet ones, in
which no process may be named as a straggler.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import ROOT, FailedError, make_parser, report, run_process
from jgt.document import InputError
from train.journal.events import read_events
from train.journal.status import Status
from train.journal.timeline import Timeline
from train.records.clock import Stretches
from train.watch.top.frame import draw_frame
from train.watch.top.view import RunView, Watched

_DAY = 86_400.0
_QUIET_STEPS = 150
_WIDE = {"COLUMNS": "200", "LINES": "60"}


def main() -> None:
    """Prints a line for each measurement, or one JSON object."""
    parser = make_parser(__doc__)
    parser.add_argument("--live", type=int, default=0, metavar="RUNS", help="also watch this many real runs")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="the processes of a quiet run (2)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, begun = Path(name), time.time() - 30 * _DAY
        write_run(folder / "large", 1_000, begun, int(30 * _DAY / 600))
        write_run(folder / "middle", 64, begun, int(30 * _DAY / 600))
        write_run(folder / "long", 1, begun, 10**6)
        found = {
            "help": command("top", "--help"),
            "frame_of_1000_processes": command("top", str(folder / "large"), "--once", environment=_WIDE),
            "trace_of_1000000_events": command("trace", str(folder / "long"), "--output", str(folder / "long.json")),
            "refresh_of_64_processes": refresh(folder / "middle"),
            "run": cost_of_a_run(folder),
        }
        if arguments.live:
            found |= {"compiling": told_to_compile(folder / "compiling"), "quiet": quiet_runs(folder, arguments.live, arguments.processes)}
    report("watch", found, arguments)


def write_run(run: Path, processes: int, begun: float, count: int) -> None:
    """The directory of a run of 30 days with this many events: stretches of steps, and every tenth a save."""
    run.mkdir()
    seconds = 30 * _DAY / count
    for process in range(processes):
        path = run / ("events.jsonl" if process == 0 else f"events-{process}.jsonl")
        if process < 2:
            start = {"phase": "start", "time": begun, "seconds": 0.0, "processes": processes, "process": process, "host": f"host-{process}"}
            with path.open("w") as file:
                file.write(json.dumps(start) + "\n")
                for number in range(count):
                    first = number * 300 + 1
                    row = {
                        "phase": "step",
                        "time": round(begun + number * seconds, 3),
                        "seconds": seconds,
                        "first": first,
                        "last": first + 299,
                    }
                    kept = {"phase": "save", "time": row["time"], "seconds": seconds, "step": first}
                    file.write(json.dumps(row | {"steps": 300, "busy": 1.0, "data": 0.5} if number % 10 else kept) + "\n")
        else:
            # The same contents for all, without a gigabyte on the disk.
            path.hardlink_to(run / "events-1.jsonl")
        status = {"process": process, "host": f"host-{process}", "pid": 1, "time": time.time(), "total": 10**7, "finished": 1, "begun": 2}
        recent = [{"seconds": 1.0, "steps": 2, "busy": 0.1, "data": 0.05}] * 2
        row = {"phase": "step", "time": time.time() - 5, "seconds": 5.0, "first": 1, "last": 2, "steps": 2}
        now = {"idle_s": 0.1, "limit_s": 60.0, "recent": recent, "memory": [[1e9, 8e10]] * 8, "row": row}
        (run / f"status-{process}.json").write_text(json.dumps(status | now))
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(0, 100_000, 10):
            row = {"step": step, "loss": 3.0, "time": begun + 26 * step, "step_time_s": 2.0, "tokens_per_s": 1e5}
            file.write(json.dumps(row) + "\n")


def command(*arguments: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Seconds, CPU seconds and the memory of a command."""
    sample = run_process([sys.executable, "-m", "jgt", *arguments], environment)
    return {"s": sample.s, "cpu_s": sample.cpu_s, "peak_mb": sample.peak_mb}


def refresh(run: Path, frames: int = 20) -> dict[str, float]:
    """CPU seconds of a frame after the first one: the share of a core at one frame a second."""
    watched, found = Watched(run), dict[str, float]()
    for width, height, lanes in ((80, 24, 0), (200, 60, 16)):
        watched.read(lanes=lanes)
        begun = time.process_time()
        for _ in range(frames):
            draw_frame(watched.read(lanes=lanes), width, height)
        found[f"{width}x{height}_cpu_s"] = (time.process_time() - begun) / frames
    return found


def cost_of_a_run(folder: Path, steps: int = 20_000, writes: int = 500) -> dict[str, float]:
    """CPU seconds of the clocks of a step, and of a status, and both as a share of steps of 100 ms."""
    timeline = Timeline(lambda row: None)
    stretches = Stretches(0, timeline)
    batches = stretches.reading(itertools.repeat({}))
    begun = time.thread_time()
    for step in range(1, steps + 1):
        next(batches)
        with stretches.waiting():
            pass
        stretches.step(step)
    of_step = (time.thread_time() - begun) / steps
    status = Status(folder, 0, timeline)
    status.close()
    begun = time.thread_time()
    for _ in range(writes):
        status.write()
    of_status = (time.thread_time() - begun) / writes
    return {"step_cpu_s": of_step, "status_cpu_s": of_status, "share_of_100_ms": of_status + of_step / 0.1}


def frames(run: Path, command: Sequence[str]) -> Iterator[RunView]:
    """Starts a run in a process of its own, and reads its present five times a second until it ends."""
    process = subprocess.Popen([sys.executable, "-m", "jgt", *command, f"run.dir={run}"], cwd=ROOT, stdout=subprocess.DEVNULL)
    watched = None
    while process.poll() is None:
        time.sleep(0.2)
        if watched is None:
            # Until the first process has written its status, the folder is none of a run.
            with contextlib.suppress(InputError):
                watched = Watched(run)
        if watched is not None:
            yield watched.read()
    if process.returncode:
        raise FailedError(f"the run {run} ended with exit code {process.returncode}")


def told_to_compile(run: Path) -> dict[str, float]:
    """The seconds of a compilation, and how long it takes until a frame shows it."""
    more = [
        "train.steps=1",
        "data.eval_tokens=0",
        "sample.tokens=0",
        "xla.cache=null",
        "pipeline.schedule=zb_interleaved",
        "model.layers=8",
    ]
    shown = [frame.now for frame in frames(run, ["train", "configs/pipeline.yaml", *more]) for m in frame.members if m.phase == "compile"]
    event = next(event for event in read_events(run / "events.jsonl")[0] if event.phase == "compile")
    return {"seconds": event.seconds, "shown_after_s": min(shown) - event.time}


def quiet_runs(folder: Path, count: int, processes: int) -> dict[str, int]:
    """Runs that nothing disturbs: their frames with measured steps, and those that name a straggler."""
    more = [f"train.steps={_QUIET_STEPS}", "data.eval_tokens=0", "sample.tokens=0", f"mesh={{data: {processes}, fsdp: 1, tensor: 1}}"]
    more += ["model.layers=2", "model.embed=64", "model.ffn=128", "model.seq=64", "devices.virtual_cpu=1", "checkpoint.every=0"]
    found = {"runs": count, "frames": 0, "named": 0}
    for number in range(count):
        run = folder / f"quiet-{number}"
        for frame in frames(run, ["launch", "--processes", str(processes), "--", "configs/quickstart.yaml", *more]):
            found["frames"] += sum(len(m.windows) == 2 for m in frame.members) > 1
            found["named"] += any(m.slower is not None for m in frame.members)
    return found


if __name__ == "__main__":
    main()
