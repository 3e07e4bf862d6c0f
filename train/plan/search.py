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

from ..code.files import read_code
from ..config import load
from ..search.plans import Answer, MakePlan, Plans, Question, plans_folder
from ..search.search import LayoutSearch, Try
from ..search.space import LAYOUT, Open, candidates, index_of
from .answer import answer_json, print_answer, run_document, write_run
from .offers import Job, Offer, is_choice, offer_of, print_offers, ranked, read_job


def search(arguments: argparse.Namespace, make: MakePlan) -> int:
    """Exit codes: 0: found. 1: nothing fits, or a file cannot be written. 2: the input is wrong. make: makes a plan."""
    try:
        if is_choice(arguments):
            return _choose(arguments, make)
        found = _search(arguments, _target(arguments), make)
        _say_given(arguments)
        own = _find(arguments, found)
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    best, tokens = found.best, _tokens(arguments)
    if best is None:
        print(_nothing_fits(found), file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({**answer_json(found, tokens), "own": None if own is None else asdict(own)}, indent=1))
    else:
        print_answer(found, Path(arguments.config).stem, batch_tokens=tokens)
        if own is not None and own.is_usable:
            gain = f"the best takes {best.plan.seconds / own.seconds:.2f} of its time"
            print(f"{arguments.config} as it is: {own.seconds:.3g} s, {own.peak_bytes / 1e9:.1f} GB; {gain}")
    return _write(arguments, found, best)


def _find(arguments: argparse.Namespace, found: LayoutSearch) -> Answer | None:
    """Searches. Returns the plan of the layout that the run's file has, if the search was to leave it. Raises InputError."""
    own, overrides = None, (*arguments.overrides, f"devices.virtual_cpu={found.target.num_devices}")
    if arguments.free:
        # A file without a layout for this target has none.
        with contextlib.suppress(InputError):
            found.begin = index_of(load(arguments.config, overrides, code=read_code(arguments.code)), _opened(arguments), found.space)
            own = None if found.begin is not None else found.plans.ask(replace(found.question, overrides=overrides))
    found.run()
    if found.begin is not None:
        return next((one.plan for one in found.tries if one.candidate == found.space[found.begin]), None)
    return own.result() if own is not None and own.done() and not own.cancelled() else None


def _choose(arguments: argparse.Namespace, make: MakePlan) -> int:
    """Searches on one or several targets, and says what they cost; exit codes as in `search`. Raises InputError."""
    _check(arguments)
    targets, job = read_job(arguments, _tokens(arguments))
    _say_given(arguments)
    found = search_targets(targets, job, lambda target: _search(arguments, target, make))
    first = found[0][1]
    if len(targets) == 1 and first is not None and first.best is not None and not arguments.json:
        print_answer(first, Path(arguments.config).stem, batch_tokens=job.batch_tokens)
    if arguments.json:
        print(json.dumps({"version": 1, "targets": [offer.to_json() for offer, _ in found]}, indent=1))
    else:
        print_offers([offer for offer, _ in found], job)
    if first is None or first.best is None:
        print("jgt plan: no target has a layout that fits. Use more or larger devices, or a smaller train.batch", file=sys.stderr)
        return 1
    return _write(arguments, first, first.best)


def search_targets(targets: Sequence[Target], job: Job, begin: Callable[[Target], LayoutSearch]) -> list[tuple[Offer, LayoutSearch | None]]:
    """Searches on one target after another, until Ctrl-C. Returns the offers, the best first, each with its search."""
    found: list[tuple[Offer, LayoutSearch | None]] = []
    is_interrupted = False
    for target in targets:
        search, problem = None, "not reached"
        if not is_interrupted:
            print(f"{target.text}:", file=sys.stderr, flush=True)
            try:
                search = begin(target)
                search.run()
                is_interrupted, problem = search.is_interrupted, "nothing fits"
            except InputError as error:
                # Another target may have a layout.
                search, problem = None, error.problems[0]
        found.append((offer_of(target, None if search is None else search.best, problem, job), search))
    return ranked(found, job)


def _say_given(arguments: argparse.Namespace) -> None:
    if (given := _opened(arguments).given) and not arguments.free:
        keys = ", ".join(given)
        print(f"{arguments.config} and the command line set {keys}. They stay; --free searches what the file sets, too", file=sys.stderr)


def _write(arguments: argparse.Namespace, found: LayoutSearch, best: Try) -> int:
    """Writes the files that the command line asks for; the exit code."""
    try:
        if arguments.write is not None:
            path = Path(arguments.write)
            document = run_document(arguments.config, arguments.overrides, best, path.parent)
            write_run(path, document, best, found.target.text)
            print(f"Wrote {path}", file=sys.stderr)
        if arguments.picture is not None:
            importlib.import_module(".picture", __package__).draw_search(found, Path(arguments.picture))
            print(f"Wrote {arguments.picture}", file=sys.stderr)
    except OSError as error:
        print(f"jgt plan: {error}", file=sys.stderr)
        return 1
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raises InputError for options that do not fit each other, and for a run's file that cannot be read."""
    problems: list[str] = []
    if arguments.config is None:
        problems.append("command line: a run's file is missing. Write jgt plan run.yaml --target h100:8x8 --search")
    others = [name for name in ("html", "lock", "check", "diff", "devices", "sync") if getattr(arguments, name, None)]
    problems += [f"command line: --{name} cannot be combined with --search" for name in others]
    if arguments.picture is not None and importlib.util.find_spec("matplotlib") is None:
        problems.append("command line: --picture needs matplotlib: pip install 'jgt[plot]'")
    if arguments.config is not None:
        with InputError.collect(problems):
            _opened(arguments)
    if problems:
        raise InputError(problems)


def _target(arguments: argparse.Namespace) -> Target:
    """The target of a search on one. Raises InputError with all problems of the command line."""
    problems: list[str] = []
    with InputError.collect(problems):
        _check(arguments)
    target = None
    if arguments.target is None:
        problems.append("command line: --search needs a target, such as --target h100:8x8: without a chip there are no times to compare")
    else:
        with InputError.collect(problems):
            target = Target.parse(arguments.target, arguments.chip, arguments.set)
    if problems or target is None:
        raise InputError(problems)
    return target


def _search(arguments: argparse.Namespace, target: Target, make: MakePlan) -> LayoutSearch:
    """A search that has not begun. Raises InputError if there is nothing to search."""
    opened = _opened(arguments)
    return LayoutSearch(
        question=Question.on(target, str(arguments.config), arguments.overrides, arguments.code),
        space=candidates(opened, target.num_devices),
        plans=Plans(make, None if arguments.no_cache else plans_folder()),
        seconds=arguments.time,
        top=arguments.top,
        model=opened.run.config.model,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )


def _opened(arguments: argparse.Namespace) -> Open:
    given = {text.partition("=")[0] for text in arguments.overrides}
    free = [key for key in LAYOUT if arguments.free and key not in given]
    return Open.read(arguments.config, arguments.overrides, read_code(arguments.code), free)


def _tokens(arguments: argparse.Namespace) -> int:
    config = _opened(arguments).run.config
    return config.train.batch * (config.model.seq or 1)


def _nothing_fits(found: LayoutSearch) -> str:
    """The nearest layout, and what it lacks."""
    planned = [t for t in found.tries if not t.plan.problems]
    if not planned:
        return "jgt plan: no layout was planned in the time there was. Give it more with --time"
    nearest = min(planned, key=lambda t: t.plan.peak_bytes)
    needs = f"The nearest needs {nearest.plan.peak_bytes / 1e9:.0f}: {nearest.candidate.text}"
    remedy = "Use more or larger devices, or a smaller train.batch"
    return f"jgt plan: none of {len(planned)} planned layouts fits into {found.target.usable_bytes / 1e9:.0f} GB. {needs}. {remedy}"
