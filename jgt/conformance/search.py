"""The search: draws programs, shrinks those that are wrong, and mutes what it knows, for as long as it may."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jgt.conformance.campaign import Asker, Counts, Crash
from jgt.conformance.classes import Classes, WrongClass, form_on_axes
from jgt.conformance.listing import is_wrong, listing
from jgt.conformance.program import DRAWS, DrawnProgram
from jgt.conformance.shrink import shrunk

_LAYOUTS = 64
"""The layouts of a single operation that are compiled together. Most of the cost of a small program is the same for many."""
_CLEAR = 0.01
"""The least error of a shrunk program, as a share of the largest number."""
_SHRINKING = 25.0
"""The CPU seconds for one program."""


class Search:
    """A search from an empty table. found: is called with each new class or layout of it.

    counts: the outcomes of chains and of single operations. crashes, refusals: XLA's reasons, with how often.
    drawn: the layouts of each chain. unconfirmed: the number of programs that are wrong only among others.
    """

    def __init__(self, seed: int, found: Callable[[WrongClass, float], None] = lambda known, cpu: None):
        self._seeds, self._found = itertools.count(seed * 1_000_000), found
        self._asker = Asker(lambda: {"met": self._met, "muted": list(self.classes.muted.items())})
        self._met: Counter[str] = Counter()
        self._checked = 0.0
        self._cpu_of = {"chain": 0.0, "single": 0.0}
        self._is_over: Callable[[], bool] = lambda: False
        self.classes = Classes()
        self.counts = {"chain": Counts(), "single": Counts()}
        self.crashes: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.drawn: list[list[Mapping[str, object]]] = []
        self.unconfirmed = 0

    @property
    def cpu(self) -> float:
        """The CPU seconds of all processes so far."""
        return self._asker.cpu + self._checked

    def run(self, is_over: Callable[[], bool]) -> None:
        """Searches. Half of the CPU time is for chains, and half for single operations."""
        self._is_over = is_over
        try:
            while not is_over():
                kind = min(self._cpu_of, key=self._cpu_of.__getitem__)
                began = self.cpu
                self._step(kind)
                self._cpu_of[kind] += self.cpu - began
        finally:
            self._asker.close()

    def _step(self, kind: str) -> None:
        answer = self._asker.ask({"do": kind, "seed": next(self._seeds), "steered": True, "layouts": _LAYOUTS})
        self.counts[kind].take(answer)
        if isinstance(answer, Crash):
            self.crashes[_without_numbers(answer.reason)] += 1
            return
        self._met.update(answer["cells"])
        self.refusals.update(map(_without_numbers, answer["refused"]))
        self.drawn += [answer["drawn"]] if answer["drawn"] else []
        if not answer["wrong"]:
            return
        self._count(kind, answer["wrong"], answer["programs"])
        self._asker.tell()

    def _count(self, kind: str, wrong: Sequence[Mapping[str, Any]], programs: int) -> None:
        """Counts the wrong layouts of one program. As a rule they are wrong for one reason, unless few layouts of many are."""
        shown = wrong[:3] if kind == "single" and 8 * len(wrong) < programs else wrong[:1]
        known = [each for each in map(self._explained, shown) if each is not None]
        if known:
            for other in wrong[len(shown) :]:
                self.classes.count(known[0], other["differences"][0]["error"])
        if kind == "single":
            program = DrawnProgram.of_json(wrong[0]["program"])
            self.classes.mute(form_on_axes(program, len(program.mesh)))

    def _explained(self, found: Mapping[str, Any]) -> WrongClass | None:
        """The class of a wrong program, shrunk if it may be a new one."""
        program = DrawnProgram.of_json(found["program"])
        _, draw = min((each["error"] == math.inf, each["draw"]) for each in found["differences"])
        alone = self._verdict(program, draw)
        if alone is None:
            self.unconfirmed += 1
            return None
        if known := self.classes.known(alone):
            self.classes.count(known, alone.error)
            return known
        smallest = self._shrunk(alone, draw)
        known, is_new = self.classes.add(smallest)
        if not known.is_confirmed:
            known.program, known.example = smallest.program, listing(smallest.program, draw, one_device=known.one_device)
            known.is_confirmed = self._is_reproduced(known.example)
        if is_new and known.is_confirmed:
            self._found(replace(known, program=smallest.program), self.cpu)
        return known

    def _shrunk(self, first: WrongClass, draw: int) -> WrongClass:
        """The smallest program that is wrong in the same way."""
        latest = first

        def still_wrong(candidate: DrawnProgram) -> DrawnProgram | None:
            nonlocal latest
            now = self._verdict(candidate, draw)
            if now is None or (now.special, now.one_device) != (first.special, first.one_device):
                return None
            latest = now
            return now.program

        end = self.cpu + _SHRINKING
        shrunk(first.program, still_wrong, lambda: self.cpu > end or self._is_over())
        return latest

    def _verdict(self, program: DrawnProgram, draw: int) -> WrongClass | None:
        """The program with what is wrong in it, or None if it is right, or nothing is known of it."""
        answer = self._asker.ask({"do": "judge", "programs": [program.to_json()], "draws": [draw]})
        if isinstance(answer, Crash) or not answer["wrong"]:
            return None
        (found,) = answer["wrong"]
        worst = max(found["differences"], key=lambda each: each["error"])
        if worst["error"] < _CLEAR:
            return None
        return WrongClass(
            program=DrawnProgram.of_json(found["program"]),
            what=worst["what"].split()[0],
            special=worst["error"] == math.inf,
            one_device=answer["one device"][0],
            error=0.0 if worst["error"] == math.inf else worst["error"],
        )

    def _is_reproduced(self, text: str) -> bool:
        """Whether a fresh process with XLA's own flags computes the listing wrongly."""
        before = os.times()
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", text], capture_output=True, text=True, env=environment, check=False)
        after = os.times()
        self._checked += after.children_user + after.children_system - before.children_user - before.children_system
        return is_wrong(done.stdout)


def run_through_jgt(drawn: Sequence[Sequence[Mapping[str, object]]], is_over: Callable[[], bool]) -> tuple[Counts, list[str]]:
    """The outcomes of programs through `jgt.shard`, and for each that was run, a word about the last of its layouts."""
    asker, counts, outcomes = Asker(through_jgt=True), Counts(), list[str]()
    try:
        for programs in drawn:
            if is_over():
                break
            answer = asker.ask({"do": "judge", "programs": programs, "draws": DRAWS})
            counts.take(answer)
            outcomes.append(_outcome(answer))
    finally:
        asker.close()
    return counts, outcomes


def _outcome(answer: Mapping[str, Any] | Crash) -> str:
    if isinstance(answer, Crash):
        return "crashed"
    return "wrong" if answer["wrong"] else "refused" if answer["refused"] else "right"


def _without_numbers(reason: str) -> str:
    return re.sub(r"\d+", "#", reason.splitlines()[0] if reason else "")[:160]
