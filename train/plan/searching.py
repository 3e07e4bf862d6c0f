"""`jgt plan --search`: the command around searches, on one target or on several."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from jgt.document import InputError
from jgt.planner import Target

from .answer import answer_json, print_answer, run_document, write_run
from .offers import Job, Offer, is_choice, print_offers, ranked, read_job, read_targets
from .search.plans import MakePlan, PlanFigures, Plans, RunFile, plans_folder
from .search.search import LayoutSearch, PlannedLayout
from .search.space import LAYOUT, OpenLayout, index_of

_REMEDY = "Use more or larger devices, or a smaller train.batch"


def search(arguments: argparse.Namespace, make: MakePlan) -> int:
    """Exit codes: 0: found. 1: nothing fits, or a file cannot be written. 2: the input is wrong. make: makes a plan."""
    try:
        opened, targets, job = _read(arguments)

        def begin(target: Target) -> LayoutSearch:
            plans = Plans(make, None if arguments.no_cache else plans_folder())
            return LayoutSearch(opened=opened, target=target, plans=plans, seconds=arguments.time, top=arguments.top, say=_say)

        found = None if is_choice(arguments) else begin(targets[0])
        if opened.given and not arguments.free:
            _say(
                f"{arguments.config} or the command line sets {', '.join(opened.given)}. They stay; --free searches what the file sets, too"
            )
        if found is None:
            return _choose(arguments, search_targets(targets, job, begin))
        own = _find(arguments, found)
    except InputError as error:
        _say("\n".join(error.problems))
        return 2
    best = found.best
    if best is None:
        _say(_nothing_fits(found))
        return 1
    if arguments.json:
        print(json.dumps({**answer_json(found, job.batch_tokens), "own": None if own is None else asdict(own)}, indent=1))
    else:
        print_answer(found, Path(arguments.config).stem, batch_tokens=job.batch_tokens)
        if own is not None and own.is_usable:
            gain = f"the best takes {best.plan.seconds / own.seconds:.2f} of its time"
            print(f"{arguments.config} as it is: {own.seconds:.3g} s, {own.peak_bytes / 1e9:.1f} GB; {gain}")
    return _write(arguments, found, best)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _read(arguments: argparse.Namespace) -> tuple[OpenLayout, Sequence[Target], Job]:
    """The run, the targets and what is to be trained on them. Raises InputError with all problems."""
    others = [name for name in ("html", "lock", "check", "diff", "devices", "sync", "generate") if getattr(arguments, name, None)]
    problems = [f"command line: --{name} cannot be combined with --search" for name in others]
    if arguments.picture is not None and importlib.util.find_spec("matplotlib") is None:
        problems.append("command line: --picture needs matplotlib: pip install 'jgt[plot]'")
    opened, targets, job = None, (), Job()
    with InputError.collect(problems):
        if arguments.config is None:
            raise InputError(["command line: a run's file is missing. Write jgt plan run.yaml --target h100:8x8 --search"])
        given = {text.partition("=")[0] for text in arguments.overrides}
        opened = OpenLayout.read(RunFile.of(arguments), [key for key in LAYOUT if arguments.free and key not in given])
    with InputError.collect(problems):
        targets = read_targets(arguments)
    with InputError.collect(problems):
        job = read_job(arguments, targets)
    if problems or opened is None:
        raise InputError(problems)
    config = opened.run.config
    return opened, targets, replace(job, batch_tokens=config.train.batch * (config.model.seq or 1))


def _find(arguments: argparse.Namespace, found: LayoutSearch) -> PlanFigures | None:
    """Searches. Returns the plan of the layout that the run's file has, if the search was to leave it. Raises InputError."""
    own, file = None, found.opened.file.adding(f"devices.virtual_cpu={found.target.num_devices}")
    if arguments.free:
        # A file without a layout for this target has none.
        with contextlib.suppress(InputError):
            found.begin = index_of(file.load(), found.opened, found.space)
            own = None if found.begin is not None else found.plans.ask(file, found.target)
    found.run()
    if found.begin is not None:
        return next((one.plan for one in found.tries if one.candidate == found.space[found.begin]), None)
    return own.result() if own is not None and own.done() and not own.cancelled() else None


def search_targets(targets: Sequence[Target], job: Job, begin: Callable[[Target], LayoutSearch]) -> list[tuple[Offer, LayoutSearch | None]]:
    """Searches on one target after another, until Ctrl-C. Returns the offers, the best first, each with its search."""
    found: list[tuple[Offer, LayoutSearch | None]] = []
    is_interrupted = False
    for target in targets:
        search, problem = None, "not reached"
        if not is_interrupted:
            _say(f"{target.text}:")
            try:
                search = begin(target)
                search.run()
                is_interrupted, problem = search.is_interrupted, "nothing fits"
            except InputError as error:
                # Another target may have a layout.
                search, problem = None, error.problems[0]
        best = None if search is None else search.best
        found.append((Offer(job=job, target=target, best=best, problem="" if best else problem), search))
    return ranked(found)


def _choose(arguments: argparse.Namespace, found: Sequence[tuple[Offer, LayoutSearch | None]]) -> int:
    """Says what each target costs. Returns the exit code."""
    offer, first = found[0]
    if arguments.json:
        print(json.dumps({"version": 1, "targets": [offer.to_json() for offer, _ in found]}, indent=1))
    else:
        if len(found) == 1 and first is not None and first.best is not None:
            print_answer(first, Path(arguments.config).stem, batch_tokens=offer.job.batch_tokens)
        print_offers([offer for offer, _ in found])
    if first is None or first.best is None:
        _say(f"jgt plan: no target has a layout that fits. {_REMEDY}")
        return 1
    return _write(arguments, first, first.best)


def _write(arguments: argparse.Namespace, found: LayoutSearch, best: PlannedLayout) -> int:
    """Writes the files that the command line asks for; the exit code."""
    try:
        if arguments.write is not None:
            path = Path(arguments.write)
            write_run(path, run_document(found.opened.file, best, path.parent), best, found.target.text)
            _say(f"Wrote {path}")
        if arguments.picture is not None:
            importlib.import_module(".picture", __package__).draw_search(found, Path(arguments.picture))
            _say(f"Wrote {arguments.picture}")
    except OSError as error:
        _say(f"jgt plan: {error}")
        return 1
    return 0


def _nothing_fits(found: LayoutSearch) -> str:
    """The nearest layout, and what it lacks."""
    planned = [t for t in found.tries if not t.plan.problems]
    if not planned:
        return "jgt plan: no layout was planned in the time there was. Give it more with --time"
    nearest = min(planned, key=lambda t: t.plan.peak_bytes)
    needs = f"The nearest needs {nearest.plan.peak_bytes / 1e9:.0f}: {nearest.candidate.text}"
    usable = found.target.usable_bytes / 1e9
    return f"jgt plan: none of {len(planned)} planned layouts fits into {usable:.0f} GB. {needs}. {_REMEDY}"
