"""The request in a command line of `jgt plan`: a target, one or two runs, and a price. Read and checked before JAX is imported.

The two sides of `--diff` are what a person would write anyway: a run's file, a rules file, or overrides in quotes. Its keys show what a
file is, because rules and runs have different keys.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jgt.document import InputError, collect, is_file, locate, read
from jgt.hardware import Target, parse_target, read_prices
from jgt.rules import SHIPPED_RULES

from ..code.files import read_code
from ..config import Config, Run, load

_BETWEEN = re.compile(r"\s+(?=[A-Za-z_][\w.]*=)")
"""Between two overrides. A value may contain blanks, but not a name and an equals sign after one."""

_OF_A_SEARCH = "targets", "tokens", "deadline", "write", "picture"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """target: None for CPU devices. runs: the one to plan, or the two to compare. price: dollars for an hour of one device.

    devices: the overrides that gave the runs their number of devices.
    """

    target: Target | None
    runs: tuple[Run, ...]
    price: float | None
    devices: tuple[str, ...]


def read_asked(arguments: argparse.Namespace) -> Asked:
    """Reads the arguments. Raises InputError with all problems."""
    problems: list[str] = []
    target, price = None, None
    # Options of a search that would be without effect.
    alone = [f"--{name}" for name in _OF_A_SEARCH if getattr(arguments, name, None) is not None]
    problems += [f"command line: {name} needs --search" for name in alone]
    with collect(problems):
        target = None if arguments.target is None else parse_target(arguments.target, arguments.chip, arguments.set)
    if arguments.target is None:
        given = {"--chip": arguments.chip, "--set": arguments.set, "--price": arguments.price}
        problems += [f"{name} is about the GPUs of a target. Add --target CHIP:HOSTSxGPUS" for name, value in given.items() if value]
    elif arguments.price is not None and target is not None:
        with collect(problems):
            chip = target.text.partition(":")[0]
            price = read_prices(arguments.price, [chip])[chip]
    if arguments.config is None and arguments.diff is None:
        problems.append("command line: a run's file is missing. Write jgt plan run.yaml")
        raise InputError(problems)
    sides: list[tuple[str, list[str]]] = [] if arguments.config is None else [(arguments.config, [])]
    if arguments.diff is not None:
        alone = [name for name in ("html", "lock", "check") if getattr(arguments, name) is not None]
        problems += [f"--{name} is for a single plan and cannot be combined with --diff" for name in alone]
        sides = []
        with collect(problems):
            sides = _sides(arguments.config, arguments.diff)
    # The number of devices of the target, or of --devices, replaces the file's, so that a mesh size of -1 is resolved.
    count = arguments.devices if target is None else target.num_devices
    devices = [] if count is None else [f"devices.virtual_cpu={count}"]
    runs: list[Run] = []
    for config, more in sides:
        with collect(problems):
            runs.append(load(config, [*arguments.overrides, *more, *devices], code=read_code(arguments.code)))
    if arguments.sync and arguments.diff is not None:
        problems.append("--sync is for a single run and cannot be combined with --diff")
    if problems:
        # Both sides of a comparison may have the same problem.
        raise InputError(list(dict.fromkeys(problems)))
    return Asked(target=target, runs=tuple(runs), price=price, devices=tuple(devices))


def _sides(config: str | None, diff: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The run's file and its further overrides, for each of the two plans to compare. Raises InputError."""
    # A file whose keys say nothing, such as one that only extends another, is a run where no run is named, and rules otherwise.
    runs = [text for text in diff if not _is_override(text) and (_is_run(text) if config else not _is_rules(text))]
    base = config or next(iter(runs), None)
    if base is None:
        raise InputError([f"--diff {diff[0]!r} {diff[1]!r}: the run's file is missing. Write jgt plan run.yaml --diff A B"])
    sides: list[tuple[str, list[str]]] = []
    for text in diff:
        if _is_override(text):
            sides.append((base, _BETWEEN.split(text.strip())))
        elif text in runs:
            sides.append((text, []))
        else:
            sides.append((base, [f"rules={locate(text, SHIPPED_RULES).resolve()}"]))
    return sides


def _is_override(text: str) -> bool:
    """Whether a side of --diff is overrides and not a file."""
    return "=" in text and not is_file(Path(text))


def _is_run(path: str) -> bool:
    """Whether a file has keys of a run. One that cannot be read is neither a run nor rules, and reading it later says why."""
    return bool(_keys(path) & set(Config.__dataclass_fields__) - {"axes"})


def _is_rules(path: str) -> bool:
    return not _is_run(path) and bool(_keys(path) & {"axes", "signals", "default", "params"})


def _keys(path: str) -> set[str]:
    try:
        return set(read(locate(path)).children)
    except InputError:
        return set()
