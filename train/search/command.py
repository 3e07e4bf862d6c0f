"""`jgt plan --search`: the command around a search."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from jgt.document import InputError, collect
from jgt.hardware.chip import Target

from ..code.files import read_code
from ..config import Run, load
from .answer import answer_json, print_answer, run_document, write_run
from .layout import layout_text
from .plans import Answer, Plans, Question, plans_folder
from .search import LayoutSearch, Try
from .space import LAYOUT, Open, candidates, index_of
from .step import Shape
from .targets import is_choice, read_job, read_target, search_targets, show_offers


def search(arguments: argparse.Namespace) -> int:
    """Exit codes: 0: found. 1: nothing fits, or a file cannot be written. 2: the input is wrong."""
    if is_choice(arguments):
        return _choose(arguments)
    try:
        found = _search(arguments, _target(arguments))
        _say_given(arguments)
        own_run = _own_run(arguments, found.target)
        found.begin = None if own_run is None else index_of(own_run, _opened(arguments), found.space)
        # Raises if not even the simplest layouts can be compiled, with what is wrong with them.
        own = None if own_run is None or found.begin is not None else _plan_of(found, arguments.overrides)
        found.run()
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    if found.begin is not None:
        own = next((t.plan for t in found.tries if t.candidate == found.space[found.begin]), None)
    config, tokens = arguments.config, _tokens(arguments)
    best = found.best
    if best is None:
        print(_nothing_fits(found), file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({**answer_json(found, tokens), "own": None if own is None else asdict(own)}, indent=1))
    else:
        print_answer(found, Path(config).stem, batch_tokens=tokens)
        if own is not None and own.is_usable:
            gain = f"the best takes {best.plan.seconds / own.seconds:.2f} of its time"
            print(f"{config} as it is: {own.seconds:.3g} s, {own.peak_bytes / 1e9:.1f} GB; {gain}")
    return _write(arguments, found, best)


def _choose(arguments: argparse.Namespace) -> int:
    """Searches on one or several targets, and says what they cost; exit codes as in `search`."""

    def begin(target: Target) -> LayoutSearch:
        return _search(arguments, target)

    try:
        _check(arguments)
        targets, job = read_job(arguments, _tokens(arguments))
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    _say_given(arguments)
    found = search_targets(targets, job, begin)
    first = found[0][1]
    if len(targets) == 1 and first is not None and first.best is not None and not arguments.json:
        print_answer(first, Path(arguments.config).stem, batch_tokens=job.batch_tokens)
    show_offers([offer for offer, _ in found], job, as_json=arguments.json)
    if first is None or first.best is None:
        print("jgt plan: no target has a layout that fits. Use more or larger devices, or a smaller train.batch", file=sys.stderr)
        return 1
    return _write(arguments, first, first.best)


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
        with collect(problems):
            _opened(arguments)
    if problems:
        raise InputError(problems)


def _target(arguments: argparse.Namespace) -> Target:
    """The target of a search on one. Raises InputError with all problems of the command line."""
    problems: list[str] = []
    with collect(problems):
        _check(arguments)
    target = None
    with collect(problems):
        if arguments.target is None:
            raise InputError(
                ["command line: --search needs a target, such as --target h100:8x8: without a chip there are no times to compare"]
            )
        target = read_target(arguments)
    if problems or target is None:
        raise InputError(problems)
    return target


def _search(arguments: argparse.Namespace, target: Target) -> LayoutSearch:
    """A search that has not begun. Raises InputError if there is nothing to search."""
    opened = _opened(arguments)
    space = candidates(opened, target.num_devices)
    return LayoutSearch(
        question=Question.on(target, str(arguments.config), arguments.overrides, arguments.code),
        target=target,
        space=space,
        plans=Plans(None if arguments.no_cache else plans_folder()),
        seconds=arguments.time,
        top=arguments.top,
        model=Shape.of(opened.run.config.model),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )


def _opened(arguments: argparse.Namespace) -> Open:
    given = {text.partition("=")[0] for text in arguments.overrides}
    free = [key for key in LAYOUT if arguments.free and key not in given]
    return Open.read(arguments.config, arguments.overrides, read_code(arguments.code), free)


def _own_run(arguments: argparse.Namespace, target: Target) -> Run | None:
    """The run with the layout that its file has; None if it has none for this target, or if the search was not to leave it."""
    if arguments.free:
        with contextlib.suppress(InputError):
            overrides = (*arguments.overrides, f"devices.virtual_cpu={target.num_devices}")
            return load(arguments.config, overrides, code=read_code(arguments.code))
    return None


def _plan_of(found: LayoutSearch, overrides: Sequence[str]) -> Answer:
    """The plan of the run as its file has it."""
    try:
        question = replace(found.question, overrides=(*overrides, f"devices.virtual_cpu={found.target.num_devices}"))
        return found.plans.ask(question).result()
    except KeyboardInterrupt:
        found.plans.close()
        raise


def _tokens(arguments: argparse.Namespace) -> int:
    config = _opened(arguments).run.config
    return config.train.batch * (config.model.seq or 1)


def _nothing_fits(found: LayoutSearch) -> str:
    """The nearest layout, and what it lacks."""
    planned = [t for t in found.tries if not t.plan.problems]
    if not planned:
        return "jgt plan: no layout was planned in the time there was. Give it more with --time"
    nearest = min(planned, key=lambda t: t.plan.peak_bytes)
    limit = found.target.chip.hbm_gb * 0.95
    needs = f"The nearest needs {nearest.plan.peak_bytes / 1e9:.0f}: {layout_text(nearest.candidate)}"
    remedy = "Use more or larger devices, or a smaller train.batch"
    return f"jgt plan: none of {len(planned)} planned layouts fits into {limit:.0f} GB. {needs}. {remedy}"
