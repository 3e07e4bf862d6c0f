"""The schedules that jgt knows by name, each as one row of SCHEDULES.

A schedule could be built by simulating a queue of ready items, as most pipeline libraries do. In lockstep that is not necessary: the tick
of every item has a closed form in its microbatch m and its chunk g (with S stages, M microbatches and v chunks a stage), so a schedule is
two or three one-line functions. Nothing here proves that the functions fit together: a test verifies every schedule for all sizes of a grid
with `verify.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from jgt.document import InputError, nearest, path_problem, shown
from jgt.schedule.custom import SUFFIX, read_table
from jgt.schedule.table import KINDS, Item, Kind, Table, count_noun, table_from_items

TickOf = Callable[[int, int], int]
"""(microbatch, chunk) → the tick of an item."""

DEFAULT_VIRTUAL = 2
"""Chunks of a stage if the schedule takes any number and the user names none."""


@dataclass(frozen=True, kw_only=True)
class Formulas:
    """A schedule in closed form, for given numbers of stages, microbatches and chunks.

    stages: the stage of each chunk, along the model. forward, backward, weight: the tick of each item. weight is None if
    backward items compute the weight gradients too.
    """

    stages: tuple[int, ...]
    forward: TickOf
    backward: TickOf
    weight: TickOf | None = None


class Schedule(NamedTuple):
    """One row of SCHEDULES. build: (stages, microbatches, chunks of a stage) → formulas.

    virtual: the only number of chunks that a stage can have; None: any number. good_for: a sentence for the user who chooses.
    """

    build: Callable[[int, int, int], Formulas]
    virtual: int | None
    good_for: str

    def chunks_per_stage(self, virtual: int | None) -> int:
        """The number of chunks on a stage if the user asks for `virtual`, which a schedule with a fixed number ignores."""
        return self.virtual or virtual or DEFAULT_VIRTUAL


def schedule_table(name: str, num_stages: int, num_microbatches: int, virtual: int | None = None) -> Table:
    """The table of a schedule by name. Raises KeyError if SCHEDULES does not have it."""
    schedule = SCHEDULES[name]
    formulas = schedule.build(num_stages, num_microbatches, schedule.chunks_per_stage(virtual))
    items = [Item(m, g) for m in range(num_microbatches) for g in range(len(formulas.stages))]
    tick_functions = zip(KINDS, (formulas.forward, formulas.backward, formulas.weight), strict=True)
    placed: list[tuple[Kind, int, Item]] = [
        (kind, tick_of(item.microbatch, item.chunk), item) for kind, tick_of in tick_functions if tick_of for item in items
    ]
    return table_from_items(name, formulas.stages, num_stages, 1 + max(tick for _, tick, _ in placed), placed)


# One letter for each size, as in the papers: S stages, M microbatches, v chunks a stage; m is a microbatch, g a chunk.


def _gpipe(S: int, M: int, v: int) -> Formulas:
    """All forward, then all backward (arXiv 1811.06965)."""
    return Formulas(stages=tuple(range(S)), forward=lambda m, g: m + g, backward=lambda m, g: M + S - 1 + m + S - 1 - g)


def _one_f_one_b(S: int, M: int, v: int) -> Formulas:
    """Each backward item follows its forward item as soon as it can (arXiv 2104.04473, section 2.2), in lockstep.

    With v > 1 it is the interleaved schedule of the same paper: chunk g is on stage g % S, and groups of S microbatches go
    through one round of S chunks after another.
    """

    def start(m: int, round_: int) -> int:
        # The tick in which microbatch m enters a round of S chunks on stage 0: a group of S microbatches occupies the stage
        # for v * S ticks, S of them for each round.
        return (m // S) * S * v + round_ * S + m % S

    def backward(m: int, g: int) -> int:
        # Backward goes through the rounds in the opposite order and, within a round, from the last stage to the first. It
        # starts v * S - 1 ticks later: when forward has brought the first microbatch to the last chunk.
        return start(m, v - 1 - g // S) + v * S - 1 + S - 1 - g % S

    return Formulas(stages=tuple(range(S)) * v, forward=lambda m, g: start(m, g // S) + g % S, backward=backward)


def _zero_bubble(S: int, M: int, v: int) -> Formulas:
    """1F1B with weight gradients as items of their own: they fill ticks that would idle (arXiv 2401.10241)."""
    formulas = _one_f_one_b(S, M, v)

    def weight(m: int, g: int) -> int:
        # A slot costs time on all stages, even if one stage alone needs it. So the stages wait until backward has reached stage 0,
        # g % S ticks after chunk g, and all S compute their weight gradients in that tick.
        return formulas.backward(m, g) + g % S

    return replace(formulas, weight=weight)


def _zigzag(S: int, M: int, v: int) -> Formulas:
    """Two chunks a stage, down and back up: every stage keeps at most S activations (arXiv 2405.15362, section 3)."""
    stages = (*range(S), *reversed(range(S)))
    return Formulas(stages=stages, forward=lambda m, g: 2 * m + g, backward=lambda m, g: 2 * m + 4 * S - 2 - g)


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(
        _gpipe, 1, "For comparison: 1f1b takes the same time and keeps fewer activations. Here the peak grows with every microbatch."
    ),
    "1f1b": Schedule(_one_f_one_b, 1, "The plain choice: the least traffic, and a peak that does not grow with the microbatches."),
    "interleaved": Schedule(
        _one_f_one_b, None, "A smaller bubble than 1f1b, paid for with more traffic: as many times as much as a stage has chunks."
    ),
    "zigzag": Schedule(_zigzag, 2, "The smallest peak, the same on all stages; the bubble of 1f1b at twice its traffic."),
    "zb": Schedule(
        _zero_bubble, 1, "A smaller bubble than 1f1b at its traffic, if a separate pass for weight gradients pays; it reruns no forward."
    ),
    "zb_interleaved": Schedule(
        _zero_bubble, None, "The smallest bubble, at the traffic of interleaved, if a separate pass for weight gradients pays, as in zb."
    ),
}
"""Every schedule by its name, in the order in which they are listed."""

TRIED: tuple[tuple[str, int | None], ...] = (("1f1b", None), ("zb", None), ("interleaved", 2), ("interleaved", 3), ("interleaved", 4))
"""The schedules and numbers of chunks that a search tries. gpipe and zigzag have the bubble of 1f1b; zb_interleaved is left to the user."""
CHUNKED: Mapping[str, str] = {"1f1b": "interleaved", "zb": "zb_interleaved"}
"""For schedules with one chunk of layers on a stage: the schedule of the same kind with several."""
FREE_NAMES = tuple(name for name, schedule in SCHEDULES.items() if schedule.virtual is None)
"""The schedules that take any number of chunks a stage."""

MAX_CELLS = 1_000_000
"""The largest table that is built for a name, in stages x ticks: a typo must not use up the memory."""

Numbers = Mapping[str, int | None]
"""stages, microbatches and virtual, as the user gave them."""


def find_table(name: str, stages: int | None, microbatches: int | None, virtual: int | None, where: str) -> Table:
    """The table of one of SCHEDULES, or of a file whose name ends with .csv.

    None leaves a number to the file or, for `virtual`, to the schedule. Raises InputError with every problem: problems with the
    name or a number begin with `where`, problems inside a file with its path and line.
    """
    numbers = {"stages": stages, "microbatches": microbatches, "virtual": virtual}
    problems = [f"{key} must be at least 1, not {number}" for key, number in numbers.items() if number is not None and number < 1]
    file_problems: list[str] = []
    table = None
    if not name.endswith(SUFFIX):
        # The size is computed only from a known name and from numbers that are right.
        problems += _name_problems(name, numbers) or ([] if problems else _size_problems(name, stages or 1, microbatches or 1, virtual))
    elif path_problem(name):
        problems.append(f"there is no file {shown(name)}. Name a {SUFFIX} file or one of {', '.join(SCHEDULES)}")
    else:
        with InputError.collect(file_problems):
            table = read_table(name)
            problems += _conflicts(table, numbers)
    if problems or file_problems:
        raise InputError([*(f"{where}: {problem}" for problem in problems), *file_problems])
    # Every number was given, or there would be a problem: `or 1` only says so to the type checker.
    return table or schedule_table(name, stages or 1, microbatches or 1, virtual)


def _name_problems(name: str, numbers: Numbers) -> list[str]:
    """An unknown name, missing numbers, and a number of chunks that the schedule does not allow."""
    missing = [f"{key} is missing. Only a {SUFFIX} file has its own" for key in ("stages", "microbatches") if numbers[key] is None]
    if name not in SCHEDULES:
        advice = f"{nearest(name, SCHEDULES)} A table of your own is a path that ends with {SUFFIX}"
        return [f"there is no schedule {shown(name)}. {advice}", *missing]
    fixed, virtual = SCHEDULES[name].virtual, numbers["virtual"]
    if virtual is None or virtual < 1 or fixed is None or fixed == virtual:
        return missing
    chunks = f"{count_noun(fixed, 'chunk')} a stage"
    return [*missing, f"virtual is {virtual}, but {name} always has {chunks}. Leave virtual out, or take {' or '.join(FREE_NAMES)}"]


def _size_problems(name: str, stages: int, microbatches: int, virtual: int | None) -> list[str]:
    # Every schedule has about M + 2S ticks for each chunk of a stage.
    chunks = stages * SCHEDULES[name].chunks_per_stage(virtual)
    cells = chunks * (microbatches + 2 * stages)
    if cells <= MAX_CELLS:
        return []
    table = f"{chunks:,} chunks on {stages:,} stages and {microbatches:,} microbatches make about {cells:,} cells"
    return [f"{table}; at most {MAX_CELLS:,} are allowed. Use fewer of them"]


def _conflicts(table: Table, numbers: Numbers) -> list[str]:
    """Numbers that differ from a file's. Numbers below 1 are reported elsewhere."""
    actual = {"stages": table.num_stages, "microbatches": table.num_microbatches, "virtual": table.virtual}
    return [
        f"{key} is {number}, but the table {table.name} has {actual[key]}. Change one of them"
        for key, number in numbers.items()
        if number is not None and number >= 1 and number != actual[key]
    ]
