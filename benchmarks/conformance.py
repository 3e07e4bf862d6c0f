"""Random programs through `jgt.shard`: does any compute another number than it does operation by operation?

    python benchmarks/conformance.py --programs 5000 --seed 1      # adds to results/conformance.json
    python benchmarks/conformance.py --from-empty --minutes 60     # the finder itself, without jgt: after how long it meets each class
    python benchmarks/conformance.py --table                       # these classes by the version of JAX, as docs/conformance.md has them

The programs are those of `jgt conformance` (docs/conformance.md): chains of operations, and a share of single operations with many layouts
each, which are counted apart. Nothing is muted. Programs that XLA refuses, or of which its compiler dies, are counted apart: they are not
silent. A seed that was counted before is not run again, and each version of JAX and of jgt's code has a sum of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

from jgt.conformance.campaign import Asker, Counts, Crash, versions
from jgt.conformance.search import Search

RESULTS = Path(__file__).parent / "results" / "conformance.json"
CLASSES = RESULTS.with_name("conformance-classes.json")
BLOCK = 10_000
"""The seeds of one call: `--seed 3` has those from 30,000."""
SINGLES = 10
"""One single operation, with 12 layouts, follows this number of chains."""


def run(programs, first, results, worker):
    """Runs programs until so many chains were judged, and saves the sum after each."""
    version = f"{versions()['jax']}, jgt {code()}"
    started = time.monotonic()
    told = 0.0
    read = json.loads(results.read_text()) if results.exists() else {}
    of_version = read.get(version, {"chains": {}, "single": {}, "seeds": {}, "wrong": []})
    counts = {kind: Counts(of_version[kind]) for kind in ("chains", "single")}
    mine = Counts()
    seed = of_version["seeds"].get(str(first), first)
    while mine["programs"] < programs and seed < first + BLOCK:
        jobs = [("chains", {"do": "chain", "seed": seed, "steered": False})]
        if seed % SINGLES == 0:
            jobs.append(("single", {"do": "single", "seed": seed, "layouts": 12, "steered": False}))
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
            # Others are wrong whatever their layout: XLA computes the program wrongly without one.
            wrong = [found for found in answer["wrong"] if not is_of_one_device(worker, found)]
            for some in (counts[kind], *([mine] if kind == "chains" else [])):
                some.update({"wrong on one device": len(answer["wrong"]) - len(wrong), "wrong": len(wrong) - len(answer["wrong"])})
            of_version["wrong"] += [{**job, **found} for found in wrong]
            for found in wrong:
                print(f"wrong: {job}: {json.dumps(found['differences'][0])}: {text(found['program'])}", flush=True)
        seed += 1
        of_version["seeds"][str(first)] = seed
        of_version |= {kind: dict(counted) for kind, counted in counts.items()}
        save(results, version, of_version)
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(f"{seed - first} seeds, {told - started:.0f} s, {worker.cpu:.0f} CPU-s: {dict(mine)}", flush=True)
    return {kind: dict(counted) for kind, counted in counts.items()}


DRAWING = ("grammar.py", "judge.py", "layouts.py", "operations.txt", "productions.txt", "program.py", "worker.py")
"""The files of the room jgt/conformance that draw the programs and judge them."""


def code():
    """The checksum of the code that decides which programs are drawn and what they compute: sums of different code are kept apart."""
    root = RESULTS.parents[2] / "jgt"
    files = [root / "conformance" / name for name in DRAWING]
    files += sorted(path for room in ("program", "sharding") for path in (root / room).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def is_of_one_device(worker, found):
    """Whether a wrong program is wrong on one device, too, once it is compiled."""
    answer = worker.ask({"do": "judge", "programs": [found["program"]], "draws": [found["differences"][0]["draw"]]})
    return not isinstance(answer, Crash) and answer.get("one device") == [True]


def search(minutes, seed, file):
    """Searches for so many CPU-minutes from an empty table, and saves after how many each class was met first."""
    met = {}

    def found(known, cpu):
        steps = "; ".join(step.code for step in known.program.steps)
        print(f"{cpu / 60:.1f} CPU-min: {known.name} {list(known.program.mesh)}: {steps}, {known.program.layout()}", flush=True)
        met.setdefault(known.name, round(cpu / 60, 1))
        save(file, versions()["jax"], {"seed": seed, "CPU minutes": round(finder.cpu / 60, 1), "classes": shown(finder, met)})

    finder = Search(seed, found)
    finder.run(lambda: finder.cpu > 60 * minutes)
    found_all = {"seed": seed, "CPU minutes": round(finder.cpu / 60, 1), "classes": shown(finder, met)}
    counts = {kind: dict(counted) for kind, counted in finder.counts.items()}
    more = {"unconfirmed": finder.unconfirmed, "crashes": dict(finder.crashes), "refusals": dict(finder.refusals)}
    save(file, versions()["jax"], found_all | counts | more)
    return found_all | counts | more


def shown(finder, met):
    return [known.to_json() | {"CPU minutes": met[known.name]} for known in finder.classes if known.name in met]


def save(file, key, value):
    """Replaces what a file has for a key. It is renamed into place, so that a call that is stopped leaves the file whole."""
    read = json.loads(file.read_text()) if file.exists() else {}
    fresh = file.with_suffix(".tmp")
    fresh.write_text(json.dumps(read | {key: value}, indent=1) + "\n")
    fresh.rename(file)


def table(file):
    """The classes that searches met, with the CPU-minutes until then, for each version of JAX."""
    read = json.loads(file.read_text())
    first = {version: {known["name"]: known["CPU minutes"] for known in found["classes"]} for version, found in read.items()}
    names = sorted({name for found in first.values() for name in found})
    rows = [[name, *(str(found.get(name, "")) for found in first.values())] for name in names]
    titles = [f"{version}, {found['CPU minutes']:.0f} CPU-min" for version, found in read.items()]
    lines = [["class", *titles], ["---"] * (1 + len(titles)), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def text(program):
    """A program on a line."""
    steps = "; ".join(f"{step['name']} = {step['code']}" for step in program["steps"])
    return f"{steps} on {program['mesh']} with {program['specs']}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=600, help="chains to judge; each is one program in one layout")
    parser.add_argument("--seed", type=int, default=0, help="programs of another seed are other ones")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file with the sum of all calls")
    parser.add_argument("--from-empty", action="store_true", help="search as jgt conformance does, without jgt")
    parser.add_argument("--table", action="store_true", help="print what such searches have met")
    parser.add_argument("--minutes", type=float, default=15, help="the CPU-minutes of this search")
    options = parser.parse_args()
    if options.table:
        print(table(CLASSES))
        return
    if options.from_empty:
        print(json.dumps(versions() | search(options.minutes, options.seed, CLASSES), indent=1))
        return
    worker = Asker(through_jgt=True)
    started = time.monotonic()
    try:
        counts = run(options.programs, options.seed * BLOCK, options.results, worker)
    finally:
        worker.close()
    print(json.dumps(versions() | counts | {"seconds": round(time.monotonic() - started), "CPU seconds": round(worker.cpu)}, indent=1))


if __name__ == "__main__":
    main()
