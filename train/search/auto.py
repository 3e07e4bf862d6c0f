"""`train.auto: true`: a run takes the best layout for the devices at hand.

The layout has to be known before JAX starts, because XLA reads its flags then, and a pipeline has flags of its own. So a process of its own
looks at the devices, and a search plans for what it finds. The run directory keeps the layout. A later start on the same devices takes it
from there, and one on other devices searches again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jgt.document import InputError, read_bytes
from jgt.hardware.chip import Target, chip_names, name_of, parse_target

from ..code.files import read_code
from ..config import Run, load
from ..run.folder import CHOICE, write_whole
from .answer import why_slower
from .layout import layout_text
from .plans import Plans, Question, chips_folder, plans_folder
from .search import LayoutSearch, Try
from .space import Open, candidates
from .step import Shape

SECONDS, TOP = 120, 5
"""For the search at a start: its time, and the layouts that fit among which it chooses at least."""
_NEAR, _TRIED = 1.1, 5
"""At most so many layouts are measured, whose plans take at most this many times as long as the best one."""
_MAX_BYTES = 100_000
_CALIBRATE = "import sys; from jgt.trainer import trainer; sys.exit(trainer('calibrate.__main__').main())"
_TRIAL = "from jgt.trainer import trainer; trainer('calibrate.trial').answer_once()"
_LOOK = "import json, jax; d = jax.local_devices(); print(json.dumps([len(d), d[0].device_kind]))"

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
    target = target_at_hand(run, where, say)
    path, code = run.config.run.path / CHOICE, read_code(arguments.code)
    opened = Open.read(arguments.config, arguments.overrides, code)
    asked = {"target": target.text, "run": _checksum(opened)}
    known = _read(path)
    if known is not None and known["asked"] == asked:
        say(f"train.auto: {target.text}: {known['layout']}, chosen at an earlier start ({path})")
        chosen = known["overrides"]
    else:
        search = LayoutSearch(
            question=Question.on(target, arguments.config, arguments.overrides, arguments.code),
            target=target,
            space=candidates(opened, target.num_devices),
            plans=Plans(plans_folder()),
            seconds=SECONDS,
            top=TOP,
            model=Shape.of(run.config.model),
            say=say,
        )
        chosen = _chosen(search, path, asked, where, arguments, say)
    return load(arguments.config, [*arguments.overrides, *chosen], code=code)


def _checksum(opened: Open) -> str:
    """The SHA-256 of what a choice depends on beside the devices: the model, its update, and what the file sets of the layout."""
    run, values = opened.run, opened.run.resolved()
    layout = [opened.mesh, opened.axes, repr(opened.rules), opened.remat, opened.accumulate]
    parts = [values["model"], values["optimizer"], run.config.train.batch, layout, run.code.checksum]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _chosen(search: LayoutSearch, path: Path, asked: dict[str, Any], where: str, arguments: argparse.Namespace, say: Say) -> list[str]:
    """Searches, says what is best and why, and keeps it in the run directory. Returns overrides."""
    search.run()
    ranked = search.ranked()
    if not ranked:
        raise InputError([f"{where}: no layout fits {search.target.text}. Search with jgt plan --search to see what is missing"])
    for line in reasons(search.target, ranked, len(search.tries)):
        say(line)
    best = fastest(ranked, arguments.config, arguments.overrides, arguments.code, say)
    overrides = best.candidate.overrides
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"asked": asked, "layout": layout_text(best.candidate), "overrides": overrides, "seconds": best.plan.seconds}
    write_whole(path, json.dumps(found, indent=1) + "\n")
    return overrides


def fastest(ranked: list[Try], config: str, overrides: Sequence[str], code: Sequence[str], say: Say) -> Try:
    """The layout with the fastest measured step, among those that are near the best by their plans.

    ranked: the best plan first. config, overrides, code: the run without a layout.
    """
    near = [one for one in ranked if one.plan.seconds <= _NEAR * ranked[0].plan.seconds][:_TRIED]
    if len(near) == 1:
        return near[0]
    say(f"train.auto: measuring {len(near)} layouts, because their plans differ by less than {_NEAR - 1:.0%}")
    question = {"config": config, "overrides": [[*overrides, *one.candidate.overrides] for one in near], "code": list(code)}
    seconds, said = step_seconds(question)
    for line in said:
        say(f"  {line}")
    for one, measured in zip(near, seconds, strict=True):
        found = "did not run" if measured is None else f"{measured:.3g} s a step, {one.plan.seconds:.3g} s by its plan"
        say(f"  {layout_text(one.candidate)}: {found}")
    times = [math.inf if measured is None else measured for measured in seconds]
    return near[times.index(min(times))]


def step_seconds(question: Mapping[str, Any]) -> tuple[list[float | None], list[str]]:
    """Asks a process of its own (`train/calibrate/trial.py`) for the measured seconds of layouts; None for those that do not run.

    The second list has its lines about layouts that do not run.
    """
    done = subprocess.run([sys.executable, "-c", _TRIAL], input=json.dumps(question), capture_output=True, text=True, check=False)
    answers, said = done.stdout.splitlines(), done.stderr.splitlines()
    if done.returncode or not answers:
        return [None] * len(question["overrides"]), [f"the measurement failed: {said[-1] if said else 'its process died'}"]
    return json.loads(answers[-1]), [line for line in said if line.startswith("layout ")]


def reasons(target: Target, ranked: list[Try], planned: int) -> list[str]:
    """What was chosen, and why not the next best: lines of the log. ranked: layouts that fit, the best first."""
    best, *others = ranked
    size = f"{best.plan.peak_bytes / 1e9:.1f} of {target.chip.hbm_gb:.0f} GB"
    lines = [f"train.auto: {target.text}: {layout_text(best.candidate)}: {best.plan.seconds:.3g} s a step and {size} by its plan"]
    lines += [f"  the best of {planned} plans; next: {layout_text(one.candidate)}: {why_slower(one, best)}" for one in others[:1]]
    return lines


def target_at_hand(run: Run, where: str, say: Say) -> Target:
    """The devices of this machine as a target. CPU devices without figures are measured. Raises InputError for devices without times."""
    count, kind = _devices(run, where)
    if kind == "cpu":
        return parse_target(f"cpu:1x{count}", str(_calibrated(count, where, say)))
    chip = name_of(kind)
    if chip is None:
        known = ", ".join(chip_names())
        raise InputError([f"{where}: there are no times for the device {kind}, so layouts cannot be compared. Known chips: {known}"])
    return parse_target(f"{chip}:1x{count}")


def _calibrated(count: int, where: str, say: Say) -> Path:
    """The chip file of this machine's CPU devices. Raises InputError if they cannot be measured."""
    # Another jaxlib compiles other programs.
    path = chips_folder() / f"{count}-{metadata.version('jaxlib')}" / "cpu.yaml"
    if not path.is_file():
        say(f"train.auto: measuring {count} CPU devices once, for about four minutes ({path})")
        command = [sys.executable, "-c", _CALIBRATE, "--devices", str(count), "--write", str(path)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            why = next(iter(reversed(done.stderr.splitlines())), "no reason given")
            raise InputError([f"{where}: the CPU devices cannot be measured: {why}"])
    return path


def _devices(run: Run, where: str) -> tuple[int, str]:
    """How many devices this process will have, and JAX's name of their kind."""
    if run.config.devices.virtual_cpu is not None:
        return run.config.devices.virtual_cpu, "cpu"
    # In this process JAX must not start yet.
    found = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, check=False)
    lines = found.stdout.splitlines()
    if found.returncode or not lines:
        why = next(iter(reversed(found.stderr.splitlines())), "no reason given")
        raise InputError([f"{where}: JAX finds no devices: {why}"])
    count, kind = json.loads(lines[-1])
    return int(count), str(kind)


def _read(path: Path) -> dict[str, Any] | None:
    """The layout of an earlier start; None if there is none. Raises InputError if the file is damaged."""
    if not path.is_file():
        return None
    with contextlib.suppress(ValueError, RecursionError):
        values = json.loads(read_bytes(path, _MAX_BYTES))
        if isinstance(values, dict) and {"asked", "layout", "overrides"} <= values.keys():
            return values
    raise InputError([f"{path}: is damaged: it is not a layout. Remove it, and the next start searches again"])
