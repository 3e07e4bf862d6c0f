"""Which steps of a run a profile is of."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jgt.document import InputError
from train.config import Run

MAX_STEPS = 100
"""A trace is held in memory until it ends."""
_WHERE = "command line: --profile"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The first and the last one."""

    first: int
    last: int

    @property
    def num(self) -> int:
        """How many they are."""
        return self.last - self.first + 1

    def check(self, done: int) -> None:
        """Raises InputError where a start that goes on after `done` steps does not train the first of these."""
        if self.first <= done:
            raise InputError([f"{_WHERE}: {self.first}:{self.last}: the run goes on after step {done}. Name later steps, or start it anew: --resume never"])


def read_steps(text: str | None, run: Run) -> Steps | None:
    """From the command line: A:B. Raises InputError for what the run does not train."""
    if text is None:
        return None
    found, total, where = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", text), run.config.train.steps, f"{_WHERE}: {text}"
    if not found:
        raise InputError([f"{where}: is no pair of steps. Write A:B, the first and the last one, such as 5:14"])
    steps = Steps(first=int(found[1]), last=int(found[2]))
    if steps.first < 1:
        raise InputError([f"{where}: there is no step {steps.first}; the first one is step 1. The first two of a start warm up: 3 is a good begin"])
    if steps.last < steps.first:
        raise InputError([f"{where}: step {steps.last} comes before step {steps.first}. Write the first one first: {steps.last}:{steps.first}"])
    if steps.last > total:
        raise InputError([f"{where}: the run has {total} steps (train.steps). Name some of them, or raise it: train.steps={steps.last}"])
    if steps.num > MAX_STEPS:
        raise InputError([f"{where}: has {steps.num} steps, and a trace at most {MAX_STEPS}. Name fewer, such as {steps.first}:{steps.first + 9}"])
    return steps
