"""The steps that `--profile A:B` names, checked against the run before anything is compiled."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jgt.document import InputError

MAX_STEPS = 100
"""JAX's profiler keeps a trace in memory until it ends."""
PROFILE = "profile"
"""The folder, in that of the run, for what `--profile` records."""
_WHERE = "command line: --profile"


@dataclass(frozen=True, kw_only=True)
class StepRange:
    """Steps `first` to `last`, both included, counted from 1."""

    first: int
    last: int

    def check(self, done: int, total: int) -> None:
        """Raises InputError if a run of `total` steps that resumes after `done` of them does not train all of these."""
        where = f"{_WHERE}: {self.first}:{self.last}"
        if self.last > total:
            # Reached with train.epochs alone; a number of steps is checked before the data is open.
            raise InputError([f"{where}: the run has {total} steps. Name earlier ones, or raise train.epochs"])
        if self.first <= done:
            hint = "Name later steps, or start the run from the beginning with --resume never"
            raise InputError([f"{where}: the run resumes after step {done}. {hint}"])


def read_step_range(text: str | None, total: int | None) -> StepRange | None:
    """Reads `A:B` from the command line; None without the option. Raises InputError for other text and other steps than a run has.

    total: the steps of the run; None if they follow from epochs, which are not known before the data is open.
    """
    if text is None:
        return None
    # Ten digits at most, because int() raises ValueError for thousands of them.
    found, where = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", text), f"{_WHERE}: {text}"
    if not found:
        raise InputError([f"{where}: is not a range of steps. Write A:B, the first and the last step, such as 5:14"])
    first, last = int(found[1]), int(found[2])
    if first < 1:
        hint = "Steps are counted from 1. The first two after a start are slower (warm-up), so 3 is a good first step"
        raise InputError([f"{where}: there is no step {first}. {hint}"])
    if last < first:
        raise InputError([f"{where}: step {last} comes before step {first}. Write {last}:{first}"])
    if total is not None and last > total:
        raise InputError([f"{where}: the run has {total} steps (train.steps). Name earlier ones, or set train.steps={last}"])
    if (num := last - first + 1) > MAX_STEPS:
        fewer = f"Name fewer, such as {first}:{first + 9}"
        raise InputError([f"{where}: these are {num} steps, but a trace has at most {MAX_STEPS}. {fewer}"])
    return StepRange(first=first, last=last)
