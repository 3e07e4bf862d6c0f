"""The request in a command line of `jgt plan`: a target, one or two runs, and a price. Read and checked before JAX is imported.

The two sides of `--diff` are what a person would write anyway: a run's file, a rules file, or overrides in quotes. Its keys show what a
file is, because rules and runs have different keys.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from jgt.document import InputError, path_problem, read
from jgt.planner import Target

from ..config import Config, Run, load
from ..run.directory.folder import CONFIG
from ..settings.command_line import RunParser, seconds, whole_number
from .offers import parse_tokens
from .search.plans import RunFile

_BETWEEN = re.compile(r"\s+(?=[A-Za-z_][\w.]*=)")
"""Between two overrides. A value may contain blanks, but not a name and an equals sign after one."""

_SECONDS, _TOP = 300, 6
"""The defaults of a search."""
_OF_A_SEARCH = "targets", "deadline", "write", "picture"
_OTHERWISE = ". A plan of one layout has the tokens/s, and with --price FILE or --tokens N what a run costs"
_OF_GENERATION = "batch", "length", "prompt_length"
_OF_A_STEP = "sync", "diff", "html", "lock", "check", "tokens"
"""Options that are about a training step."""


def parser() -> RunParser:
    """The command line of a plan."""
    description = "Shows what XLA will do with a run's training step, also for GPUs that you do not have."
    # A run is optional, because --diff may name both.
    parser = RunParser("jgt plan", description, is_required=False)
    parser.add_argument(
        "--target",
        metavar="CHIP:HOSTSxGPUS",
        help="plan for GPUs, such as h100:8x8: 8 hosts with 8 H100s (needs the extra jgt[plan-gpu]); default: CPU devices",
    )
    parser.add_argument(
        "--chip", metavar="FILE", help="a chip file of your own; --target names it by the file's name: mine:8x8 for mine.yaml"
    )
    figure = "change a figure of the chip, such as nic_gbs=25; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=figure)
    parser.add_argument("--price", metavar="FILE", help="a YAML file with dollars for an hour of one GPU, such as h100: 2.5")
    tokens = "the tokens to train on, such as 15T: hours or days, and with --price dollars"
    parser.add_argument("--tokens", metavar="N", help=tokens)
    parser.add_argument("--devices", type=whole_number(), metavar="N", help="plan for N CPU devices; default: the number in the run's file")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object instead of tables")
    parser.add_argument("--html", metavar="FILE", help="write the plan as an HTML page")
    parser.add_argument("--lock", metavar="FILE", help="write a lock: a text file of what the step sends, stores and computes")
    parser.add_argument("--check", metavar="FILE", help="compare the plan with a lock, and exit with code 1 if it differs")
    parser.add_argument("--sync", action="store_true", help="compare what sync.every, late and wire would cost, as a table")
    both = "compare two plans: each of A and B is a run's file, a rules file or overrides such as 'mesh={data: 8}'"
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help=both)
    _add_search_arguments(parser)
    _add_generation_arguments(parser)
    return parser


def _add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a search."""
    group = parser.add_argument_group("search")
    group.add_argument(
        "--search",
        action="store_true",
        help="find the fastest layout for the target: mesh, rules, pipeline, recompute and parts, as far as the file leaves them open",
    )
    group.add_argument("--free", action="store_true", help="search what the file sets, too; values on the command line stay")
    group.add_argument("--time", type=seconds, default=_SECONDS, metavar="S", help=f"seconds that a search may take ({_SECONDS})")
    group.add_argument(
        "--top", type=whole_number(), default=_TOP, metavar="N", help=f"layouts that fit to plan at least, and to show ({_TOP})"
    )
    group.add_argument("--write", metavar="FILE", help="write the best layout as a run's file, which plan, check and train take")
    group.add_argument("--picture", metavar="FILE", help="draw all layouts by time and memory as a PNG; needs matplotlib (extra plot)")
    group.add_argument("--no-cache", action="store_true", help="plan again what earlier searches have planned")
    group.add_argument("--targets", metavar="A,B", help="search on each of these targets, and compare what they cost")
    group.add_argument(
        "--deadline", type=float, metavar="DAYS", help="with --tokens: the number of GPUs that finishes within this many days"
    )


def _add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of generation."""
    group = parser.add_argument_group("generation")
    what = "plan generation instead of training; FILE may also be a run directory, a folder of Hugging Face or its config.json"
    group.add_argument("--generate", action="store_true", help=what)
    group.add_argument("--batch", type=whole_number(), metavar="N", help="texts that run together (generate.batch)")
    group.add_argument("--length", type=whole_number(low=2), metavar="N", help="tokens of a text, prompt and answer (model.seq)")
    group.add_argument("--prompt-length", type=whole_number(), metavar="N", help="tokens of a prompt (half of --length)")


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts to generate together: `rows` of them. Each has `length` tokens, and the first `prompt` of these are given."""

    rows: int
    length: int
    prompt: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """target: None for CPU devices. files, runs: the one to plan, or the two to compare. price: dollars for an hour of one device.

    tokens: those to train on, if they are asked for. texts: what to generate; None for a plan of training.
    """

    target: Target | None
    files: tuple[RunFile, ...]
    runs: tuple[Run, ...]
    price: float | None
    texts: Texts | None = None
    tokens: float | None = None


def read_request(arguments: argparse.Namespace) -> Request:
    """Reads the arguments. Raises InputError with all problems."""
    problems: list[str] = []
    target = None
    # Options of a search that would be without effect.
    problems += [f"command line: {flag} needs --search{_OTHERWISE}" for flag in _given(arguments, _OF_A_SEARCH)]
    problems += [] if arguments.generate else [f"command line: {flag} needs --generate" for flag in _given(arguments, _OF_GENERATION)]
    with InputError.collect(problems):
        target = None if arguments.target is None else Target.parse(arguments.target, arguments.chip, arguments.set)
    price, tokens = _costs(arguments, target, problems)
    if arguments.config is None and arguments.diff is None:
        problems.append("command line: a run's file is missing. Write jgt plan run.yaml")
        raise InputError(problems)
    if arguments.generate:
        return _generating(arguments, target, price, problems)
    files = [RunFile.of(arguments)]
    if arguments.diff is not None:
        alone = [name for name in ("html", "lock", "check", "tokens") if getattr(arguments, name) is not None]
        problems += [f"--{name} is for a single plan and cannot be combined with --diff" for name in alone]
        files = []
        with InputError.collect(problems):
            files = _sides(RunFile.of(arguments), arguments.diff)
    # The number of devices of the target, or of --devices, replaces the file's, so that a mesh size of -1 is resolved.
    count = arguments.devices if target is None else target.num_devices
    if count is not None:
        files = [file.adding(f"devices.virtual_cpu={count}") for file in files]
    runs: list[Run] = []
    for file in files:
        with InputError.collect(problems):
            runs.append(file.load())
    if arguments.sync and arguments.diff is not None:
        problems.append("--sync is for a single run and cannot be combined with --diff")
    if problems:
        # Both sides of a comparison may have the same problem.
        raise InputError(list(dict.fromkeys(problems)))
    return Request(target=target, files=tuple(files), runs=tuple(runs), price=price, tokens=tokens)


def _costs(arguments: argparse.Namespace, target: Target | None, problems: list[str]) -> tuple[float | None, float | None]:
    """The dollars for an hour of one device, and the tokens to train on, if they are asked for. Appends to the problems."""
    price, tokens = None, None
    if arguments.target is None:
        given = {"--chip": arguments.chip, "--set": arguments.set, "--price": arguments.price, "--tokens": arguments.tokens}
        problems += [f"{name} is about the GPUs of a target. Add --target CHIP:HOSTSxGPUS" for name, value in given.items() if value]
    elif arguments.price is not None and target is not None:
        with InputError.collect(problems):
            price = Target.read_prices(arguments.price, [target])[target.chip_name]
    if arguments.tokens is not None:
        with InputError.collect(problems):
            tokens = parse_tokens(arguments.tokens)
    return price, tokens


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """The flags of these names that the command line has."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name, None) not in (None, False)]


def _generating(arguments: argparse.Namespace, target: Target | None, price: float | None, problems: list[str]) -> Request:
    """The request of --generate. Raises InputError with these problems and all others."""
    problems += [
        f"command line: {flag} is about a training step, and cannot be combined with --generate" for flag in _given(arguments, _OF_A_STEP)
    ]
    path, code = Path((arguments.config or "").removeprefix("hf:")), tuple(arguments.code)
    is_published = path.suffix == ".json" or (path / "config.json").is_file()
    source = {"model": {"hf": str(path)}} if is_published else path / CONFIG if (path / CONFIG).is_file() else path
    count = arguments.devices if target is None else target.num_devices
    # A training step is not compiled, but its batch has to be one that the devices can split.
    devices = [] if count is None else [f"devices.virtual_cpu={count}", f"train.batch={count}", "train.accumulate=1"]
    overrides = ["pipeline=null", "sync=null", *arguments.overrides, *devices]
    run = load(source, overrides, code=code, problems=problems, reads_data=False)
    return Request(target=target, files=(), runs=(run,), price=price, texts=_texts(arguments, run))


def _texts(arguments: argparse.Namespace, run: Run) -> Texts:
    """The texts that the command line asks for. Raises InputError."""
    seq = run.config.model.seq
    length = arguments.length or seq
    prompt = arguments.prompt_length or max(length // 2, 1)
    if length > seq:
        why = f"command line: --length {length:,}: a text has at most model.seq {seq:,} tokens"
        raise InputError([f"{why}. Give fewer, or model.seq={length} if the model's positions are rotary"])
    if prompt >= length:
        why = f"command line: --prompt-length {prompt:,}: leaves no room for an answer in --length {length:,}"
        raise InputError([f"{why}. Give at most {length - 1:,}, or a greater --length"])
    return Texts(rows=arguments.batch or run.config.generate.batch, length=length, prompt=prompt)


def _sides(file: RunFile, diff: Sequence[str]) -> list[RunFile]:
    """The two runs to compare. Raises InputError."""
    # A file whose keys say nothing, such as one that only extends another, is a run where no run is named, and rules otherwise.
    runs = [text for text in diff if not _is_override(text) and (_kind(text) == "run" if file.config else _kind(text) != "rules")]
    if not file.config and not runs:
        raise InputError([f"--diff {diff[0]!r} {diff[1]!r}: the run's file is missing. Write jgt plan run.yaml --diff A B"])
    base = file if file.config else replace(file, config=runs[0])
    sides: list[RunFile] = []
    for text in diff:
        if _is_override(text):
            sides.append(base.adding(*_BETWEEN.split(text.strip())))
        elif text in runs:
            sides.append(replace(file, config=text))
        else:
            sides.append(base.adding(f"rules={text if text.startswith('jgt:') else Path(text).resolve()}"))
    return sides


def _is_override(text: str) -> bool:
    """Whether a side of --diff is overrides and not a file."""
    return "=" in text and path_problem(text) is not None


def _kind(path: str) -> Literal["run", "rules", ""]:
    """The kind of a file, by its keys. One that cannot be read is neither, and reading it later says why."""
    keys: set[str] = set()
    with contextlib.suppress(InputError):
        keys = set(read(path).children)
    if keys & (set(Config.__dataclass_fields__) - {"axes"}):
        return "run"
    return "rules" if keys & {"axes", "signals", "default", "params"} else ""
