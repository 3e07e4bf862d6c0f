"""Random programs through `jgt.shard`: does any compute another number than it does operation by operation?

    python benchmarks/conformance.py --programs 5000 --seed 1      # adds to results/conformance.json
    python benchmarks/conformance.py --from-empty --minutes 60     # the finder itself, without jgt: when it meets each class first

The programs are those of `jgt conformance` (docs/conformance.md): chains of operations, and a share of single operations with many layouts
each, which are counted apart. Nothing is muted. Programs that XLA refuses, or of which its compiler dies, are counted apart: they are not
silent. A seed that was counted before is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from jgt.conformance.campaign import Asker, Counts, Crash, versions

RESULTS = Path(__file__).parent / "results" / "conformance.json"
BLOCK = 10_000
"""The seeds of one call: `--seed 3` has those from 30,000."""
SINGLES = 10
"""One single operation, with 12 layouts, follows this number of chains."""


def run(programs, first, results, worker):
    """Runs programs until so many chains were judged, and saves the sum after each."""
    version = versions()["jax"]
    started = time.monotonic()
    told = 0.0
    read = json.loads(results.read_text()) if results.exists() else {}
    of_version = read.setdefault(version, {"chains": {}, "single": {}, "seeds": {}, "wrong": []})
    counts = {kind: Counts(of_version[kind]) for kind in ("chains", "single")}
    mine = Counts()
    seed = of_version["seeds"].get(str(first), first)
    while mine["programs"] < programs and seed < first + BLOCK:
        jobs = [("chains", {"do": "chain", "seed": seed, "steered": False})]
        if seed % SINGLES == 0:
            jobs.append(("single", {"do": "single", "seed": seed, "bundle": 12, "steered": False}))
        for kind, job in jobs:
            answer = worker.ask(job)
            counts[kind].take(answer)
            if kind == "chains":
                mine.take(answer)
            if isinstance(answer, Crash):
                print(f"died: {job}: {answer.reason}", flush=True)
                continue
            for reason in answer["refused"]:
                print(f"refused: {job}: {reason}", flush=True)
            for found in answer["wrong"]:
                of_version["wrong"].append({**job, **found})
                print(f"wrong: {job}: {json.dumps(found['differences'][0])}: {text(found['program'])}", flush=True)
        seed += 1
        of_version["seeds"][str(first)] = seed
        of_version |= {kind: dict(counted) for kind, counted in counts.items()}
        # Written beside it and renamed, so that a call that is stopped leaves the file whole.
        fresh = results.with_suffix(".tmp")
        fresh.write_text(json.dumps(read, indent=1))
        fresh.rename(results)
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(f"{seed - first} seeds, {told - started:.0f} s, {worker.cpu:.0f} CPU-s: {dict(mine)}", flush=True)
    return {kind: dict(counted) for kind, counted in counts.items()}


def text(program):
    """A program on a line."""
    steps = "; ".join(f"{step['name']} = {step['code']}" for step in program["steps"])
    return f"{steps} on {program['mesh']} with {program['specs']}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=600, help="chains to judge; each is one program in one layout")
    parser.add_argument("--seed", type=int, default=0, help="programs of another seed are other ones")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file with the sum of all calls")
    options = parser.parse_args()
    worker = Asker(through_jgt=True)
    started = time.monotonic()
    try:
        counts = run(options.programs, options.seed * BLOCK, options.results, worker)
    finally:
        worker.close()
    print(json.dumps(versions() | counts | {"seconds": round(time.monotonic() - started), "CPU seconds": round(worker.cpu)}, indent=1))


if __name__ == "__main__":
    main()
