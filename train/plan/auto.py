"""`train.auto: true`: a run takes the best layout for the devices at hand.

The layout has to be known before JAX starts, because XLA reads its flags then, and a pipeline has other flags. So other processes look at
the devices, plan layouts and measure the steps of the best few. The run directory keeps the layout. A later start on the same devices takes
it from there, and one on other devices searches again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from jgt.document import InputError, read_bytes
from jgt.planner import Target

from ..config import Config, Run
from ..files.disk import write_whole
from ..files.json_text import read_object
from ..run.directory.folder import CHOICE
from .make import answer
from .search.plans import Plans, RunFile, in_process, plans_folder
from .search.search import LayoutSearch, PlannedLayout
from .search.space import OpenLayout, candidates
from .trial import devices_at_hand, step_seconds

SECONDS, TOP = 120, 5
"""SECONDS: the time of the search at a start. TOP: the number of layouts that fit among which it chooses."""
_NEAR = 1.35
"""The best TOP layouts are measured if their plans take at most this many times as long as the best one: plans are off by as much."""
_MAX_BYTES = 100_000

Say = Callable[[str], None]


def with_best_layout(run: Run, arguments: argparse.Namespace, num_processes: int, say: Say) -> Run:
    """The run with the best layout for this machine's devices.

    arguments: the command line, with `config`, `overrides` and `code`. say: prints a line for a person. Raises InputError if the run has
    several processes, if there are no times for these devices, and if no layout fits them.
    """
    where = f"{run.where('train.auto')}: train.auto"
    if num_processes != 1:
        remedy = "Search with jgt plan --search --write FILE, and start all processes with that file"
        raise InputError([f"{where}: is for a run of one process, and this one has {num_processes}. {remedy}"])
    target, path = target_at_hand(run, where), run.config.run.path / CHOICE
    file = RunFile.of(arguments)
    opened = OpenLayout.read(file)
    asked = {"target": target.text, "run": _checksum(opened)}
    known = _read(path)
    if known is not None and known["asked"] == asked:
        # The directory may come from a stranger, whose overrides could set any key. So only a layout of this search is taken.
        chosen = next((one for one in candidates(opened, target.num_devices) if one.overrides == known["overrides"]), None)
        if chosen is not None:
            say(f"train.auto: {target.text}: {chosen.text}, chosen at an earlier start ({path})")
            return file.adding(*chosen.overrides).load()
        say(f"train.auto: {path} names no layout of this search, so the search begins again")
    search = LayoutSearch(opened=opened, target=target, plans=Plans(answer, plans_folder()), seconds=SECONDS, top=TOP, say=say)
    search.run()
    if search.best is None:
        raise InputError([f"{where}: no layout fits {target.text}. Search with jgt plan --search to see what is missing"])
    for line in reasons(target, search.ranked(), len(search.tries)):
        say(line)
    best = fastest(search.ranked(), file, say)
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"asked": asked, "layout": best.candidate.text, "overrides": best.candidate.overrides, "seconds": best.plan.seconds}
    write_whole(path, json.dumps(values, indent=1) + "\n")
    return file.adding(*best.candidate.overrides).load()


def _checksum(opened: OpenLayout) -> str:
    """The SHA-256 of what a choice depends on beside the devices: the model, its update, and what the file sets of the layout."""
    run, values = opened.run, opened.run.resolved()
    layout = [opened.mesh, opened.axes, repr(opened.rules), opened.remat, opened.accumulate]
    parts = [values["model"], values["optimizer"], run.config.train.batch, layout, run.code.checksum]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def fastest(ranked: Sequence[PlannedLayout], file: RunFile, say: Say) -> PlannedLayout:
    """The layout with the fastest measured step, among the first few by their plans.

    ranked: the best plan first. file: the run without a layout.
    """
    near = [one for one in ranked[:TOP] if one.plan.seconds <= _NEAR * ranked[0].plan.seconds]
    if len(near) == 1:
        return near[0]
    say(f"train.auto: measuring {len(near)} layouts, because their plans differ by less than {_NEAR - 1:.0%}")
    try:
        measured = in_process(step_seconds, [file.adding(*one.candidate.overrides) for one in near])
    except RuntimeError as error:
        say(f"  the measurement failed: {error}")
        return near[0]
    for one, seconds in zip(near, measured, strict=True):
        text = f"did not run: {seconds}" if isinstance(seconds, str) else f"{seconds:.3g} s a step, {one.plan.seconds:.3g} s by its plan"
        say(f"  {one.candidate.text}: {text}")
    times = [(seconds, rank) for rank, seconds in enumerate(measured) if not isinstance(seconds, str)]
    return near[min(times)[1]] if times else near[0]


def reasons(target: Target, ranked: Sequence[PlannedLayout], planned: int) -> list[str]:
    """Lines of the log: the best layout, and why the next one is slower. ranked: layouts that fit, the best first."""
    best, *others = ranked
    size = f"{best.plan.peak_bytes / 1e9:.1f} of {target.chip.hbm_gb:.0f} GB"
    lines = [f"train.auto: {target.text}: {best.candidate.text}: {best.plan.seconds:.3g} s a step and {size} by its plan"]
    lines += [f"  the best of {planned} plans; next: {one.candidate.text}: {one.why_slower(best)}" for one in others[:1]]
    return lines


def target_at_hand(run: Run, where: str) -> Target:
    """The devices of this machine as a target. Raises InputError for devices without times."""
    count, kind = _devices(run.config, where)
    try:
        # The times of a CPU are rough, and measured steps decide.
        return Target.of_devices(kind, count)
    except InputError as error:
        raise InputError([f"{where}: layouts cannot be compared: {problem}" for problem in error.problems]) from None


def _devices(config: Config, where: str) -> tuple[int, str]:
    """The number of devices that this process will have, and JAX's name of their kind."""
    if config.devices.virtual_cpu is not None:
        return config.devices.virtual_cpu, "cpu"
    try:
        # In this process JAX must not start yet.
        return in_process(devices_at_hand)
    except RuntimeError as error:
        raise InputError([f"{where}: JAX finds no devices: {error}"]) from None


def _read(path: Path) -> dict[str, object] | None:
    """The layout of an earlier start; None if there is none. Raises InputError if the file is damaged."""
    if not path.is_file():
        return None
    values = read_object(read_bytes(path, _MAX_BYTES)) or {}
    if {"asked", "overrides"} <= values.keys():
        return values
    raise InputError([f"{path}: is damaged: it is not a layout. Remove it, and the next start searches again"])
