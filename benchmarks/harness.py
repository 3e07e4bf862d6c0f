"""How the benchmarks measure. Programs take turns, figures are medians with quartiles, and ratios are computed for each pair.

`interleave` runs functions in turn in one process. `alternate` runs commands in turn, each in a fresh process. The order is reversed in
every round, so that no program always runs after the same other program. If the machine becomes slower during a measurement, both sides
of a pair become slower, and their ratio stays the same. A saved result records the machine, the versions and the commit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_SIGNIFICANT = 4
_STDERR_LINES = 30


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement: wall seconds, and CPU-seconds of the process (with its children, if it is a separate process).

    peak_mb: peak resident memory of a separate process, in 10^6 bytes. found: the value that the function returned or the JSON that the
    process printed.
    """

    s: float
    cpu_s: float
    peak_mb: float | None = None
    found: Any = None


Samples = dict[str, list[Sample]]


class FailedError(Exception):
    """A benchmark has no result. If a measured process failed, the message ends with the last lines of its output."""


def turns(names: Sequence[str], rounds: int, warmup: int) -> Iterator[tuple[str, bool]]:
    """Each turn's name, and whether it counts. Every second round is in reversed order. The first `warmup` rounds do not count."""
    for index in range(warmup + rounds):
        for name in names[:: -1 if index % 2 else 1]:
            yield name, index >= warmup


def interleave(programs: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 1) -> Samples:
    """Measures functions in turn in this process. They must wait for their results (block_until_ready) before they return."""
    samples: Samples = {name: [] for name in programs}
    for name, counts in turns(list(programs), rounds, warmup):
        cpu, started = time.process_time(), time.perf_counter()
        found = programs[name]()
        sample = Sample(s=time.perf_counter() - started, cpu_s=time.process_time() - cpu, found=found)
        if counts:
            samples[name].append(sample)
    return samples


def alternate(commands: Mapping[str, Sequence[str]], rounds: int, warmup: int = 0, environment: Mapping[str, str] | None = None) -> Samples:
    """Measures commands in turn, each in a fresh process. Raises FailedError."""
    samples: Samples = {name: [] for name in commands}
    for name, counts in turns(list(commands), rounds, warmup):
        sample = run_process(commands[name], environment)
        if counts:
            samples[name].append(sample)
    return samples


def run_process(command: Sequence[str], environment: Mapping[str, str] | None = None, limit_s: float = 3600.0) -> Sample:
    """Measures one process from launch to exit, in the repository's root. environment: added to this process's variables.

    Call it from a small process, because Linux counts the memory of the launching process in the peak of the new one. Raises FailedError
    if the process fails or runs longer than limit_s.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        variables = (
            os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))} | dict(environment or {})
        )
        started = time.perf_counter()
        process = subprocess.Popen(list(command), stdout=out, stderr=err, cwd=ROOT, env=variables)
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        finally:
            timer.cancel()
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            said = "\n".join([*out.read().splitlines(), *err.read().splitlines()][-_STDERR_LINES:])
            raise FailedError(f"{' '.join(map(str, command))}: exit code {process.returncode} after {seconds:.0f} s\n{said}")
        found = _last_json(out.read())
    unit = 1 if sys.platform == "darwin" else 1024
    return Sample(s=seconds, cpu_s=usage.ru_utime + usage.ru_stime, peak_mb=usage.ru_maxrss * unit / 1e6, found=found)


def _last_json(text: str) -> Any:
    """The JSON that a program printed: its whole output, or else the last line. None if neither is JSON."""
    for part in (text, *text.splitlines()[-1:]):
        try:
            return json.loads(part)
        except ValueError:
            continue
    return None


def spread(values: Iterable[float]) -> dict[str, float]:
    """The median and the quartiles of n values."""
    known = sorted(values)
    low, middle, high = statistics.quantiles(known, n=4, method="inclusive") if len(known) > 1 else known * 3
    return {"median": _rounded(middle), "q1": _rounded(low), "q3": _rounded(high), "n": len(known)}


def figures(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """The spread of each measured quantity."""
    kinds = {kind: [getattr(sample, kind) for sample in samples] for kind in ("s", "cpu_s", "peak_mb")}
    return {kind: spread(values) for kind, values in kinds.items() if None not in values}


def ratios(over: Sequence[Sample], under: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """The spread of the ratios of the pairs: of wall seconds, CPU-seconds and, if it was measured, peak memory."""
    found = {}
    for kind in ("s", "cpu_s", "peak_mb"):
        pairs = [(getattr(a, kind), getattr(b, kind)) for a, b in zip(over, under, strict=True)]
        if all(a is not None and b for a, b in pairs):
            found[f"{kind}_ratio"] = spread(a / b for a, b in pairs)
    return found


def compared(samples: Samples) -> dict[str, Any]:
    """The figures of two programs, and the ratios of the first to the second."""
    (over, a), (under, b) = samples.items()
    return {over: figures(a), under: figures(b), **ratios(a, b)}


def bar(value: float, most: float) -> dict[str, Any]:
    """A figure compared with its upper limit."""
    return {"value": value, "at_most": most, "reached": value <= most}


def _rounded(value: float) -> float:
    return float(f"{value:.{_SIGNIFICANT}g}")


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with --json and --save. doc: the docstring of the program, which --help prints."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/NAME-DEVICE-DATE.json")
    return parser


def report(name: str, found: Mapping[str, Any], arguments: argparse.Namespace, lines: Iterable[str] | None = None) -> Path | None:
    """Prints a result, as JSON or as `lines`. With --save it is also written to a file; returns its path. name: of the program."""
    path = save(name, found) if arguments.save else None
    if path is not None:
        print(f"Wrote {path}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(tell(found) if lines is None else lines))
    return path


def save(name: str, found: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Writes a result with the device, the date, the versions and the command line of the measurement."""
    device = find_device()
    date = datetime.datetime.now(datetime.UTC)
    about = {
        "benchmark": name,
        "date": date.isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "device": device,
        "versions": {
            "python": platform.python_version(),
            "jax": metadata.version("jax"),
            "jaxlib": metadata.version("jaxlib"),
            "jgt": _commit(),
        },
    }
    kind = re.sub(r"[^a-z0-9]+", "-", device["kind"].lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{kind}-x{device['count']}-{date:%Y-%m-%d}.json"
    path.write_text(without_places(json.dumps({**about, "found": found}, indent=1)) + "\n")
    return path


def without_places(text: str) -> str:
    """A text without the folders of this machine: paths in the repository start at its root, others keep only their last part."""
    return re.sub(r"(?<![\w.:/])/(?:[\w.@+-]+/)+([\w.@+-]*)", r"\1", text.replace(f"{ROOT}/", ""))


def find_device() -> dict[str, Any]:
    """The GPUs that the driver lists, or `cpu` and the number of usable cores. JAX is not started: it would take the GPUs' memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        names = []
    if names:
        return {"kind": names[0].strip(), "count": len(names), "cores": cores, "machine": platform.machine()}
    return {"kind": "cpu", "count": cores, "cores": cores, "machine": platform.machine()}


def _commit() -> str | None:
    """The commit that is checked out, followed by + if tracked files have changed."""
    try:
        git = ["git", "-C", str(ROOT)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def tell(found: Mapping[str, Any], indent: int = 0) -> Iterator[str]:
    """A result as lines of text. A spread is shown as its median, followed by the quartiles."""
    for name, value in found.items():
        start = f"{' ' * indent}{name}"
        if isinstance(value, Mapping) and value.keys() != {"median", "q1", "q3", "n"}:
            yield start
            yield from tell(value, indent + 2)
        else:
            yield f"{start:36} {shown(value)}"


def shown(value: Any) -> str:
    """A figure as text."""
    if isinstance(value, Mapping):
        return f"{value['median']:.4g} ({value['q1']:.4g} to {value['q3']:.4g}, n {value['n']})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A header, and a line for each row; all rows have the same keys. A spread is shown as its median."""
    cells = [[name.replace("_", " ") for name in rows[0]]]
    cells += [[shown(v["median"] if isinstance(v, Mapping) else "-" if v is None else v) for v in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(
            f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}" for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
