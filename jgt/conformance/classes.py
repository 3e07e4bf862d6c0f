"""Classes of wrong programs, and what is drawn rarely because its class is known."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from jgt.conformance.program import DrawnProgram

_RARELY = 0.05
"""The least share of programs of a known class that are drawn all the same."""
_SHRUNK = 3
"""The number of programs of a class that are shrunk. Others that contain its forms are only counted."""


def is_hidden(muted: Mapping[tuple[str, ...], int], forms: Iterable[str], luck: float) -> bool:
    """Whether a program with these forms is not drawn, because it contains a combination that was found to be wrong.

    muted: the combinations, with how often each was found. luck: a number from 0 to 1, drawn for the program.
    """
    times = max((times for known, times in muted.items() if set(known) <= set(forms)), default=0)
    return luck > max(0.5**times, _RARELY)


def form_on_axes(program: DrawnProgram, axes: int) -> str:
    """The form of a single operation, which is muted for each number of axes alone: matmuls are wrong in several ways."""
    return f"{program.forms[0]} on {axes} axes"


@dataclass(kw_only=True)
class WrongClass:
    """Programs that are wrong in the same way, as far as their shrunk forms say. example: the listing of `program`.

    special: whether its arguments have NaN or infinities. layouts: the layouts of shrunk programs. count: the wrong programs, with those
    that contain the forms and were not shrunk. through_jgt: the outcome of `program` through `jgt.shard`.
    """

    program: DrawnProgram
    what: str
    special: bool
    one_device: bool
    example: str = ""
    is_confirmed: bool = False
    count: int = 0
    num_shrunk: int = 0
    error: float = 0.0
    layouts: list[str] = field(default_factory=list[str])
    through_jgt: str = ""

    @property
    def wrong(self) -> tuple[object, ...]:
        """The kind of its fault."""
        return (self.what, self.special, self.one_device)

    @property
    def name(self) -> str:
        """A line about it."""
        axes = len(self.program.mesh)
        where = "compiled for one device" if self.one_device else "1 mesh axis" if axes == 1 else f"{axes} mesh axes"
        return f"{', then '.join(self.program.forms)}: {self.what}{' with NaN or infinity' if self.special else ''}, {where}"

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        known = {"name": self.name, "count": self.count, "error": self.error, "layouts": self.layouts}
        return {**known, "example": self.example, "through_jgt": self.through_jgt}


class Classes:
    """The classes that were found. muted: the combinations of forms that are drawn rarely, with how often they were wrong."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[object, ...], WrongClass] = {}
        self.muted: Counter[tuple[str, ...]] = Counter()
        self._asked: Counter[str] = Counter()

    def __iter__(self) -> Iterator[WrongClass]:
        return iter(sorted(self._by_key.values(), key=lambda each: -each.count))

    def known(self, found: WrongClass) -> WrongClass | None:
        """The class that a program is counted for without being shrunk. Single operations are shrunk for each number of axes."""
        program = found.program
        fitting = [each for each in self._by_key.values() if each.wrong == found.wrong and set(each.program.forms) <= set(program.forms)]
        if program.steps[0].kind == "single":
            self._asked[form_on_axes(program, len(program.mesh))] += 1
            is_known = self._asked[form_on_axes(program, len(program.mesh))] > 2 * _SHRUNK
        else:
            is_known = any(each.num_shrunk >= _SHRUNK for each in fitting)
        return fitting[0] if is_known and fitting else None

    def add(self, found: WrongClass) -> tuple[WrongClass, bool]:
        """Counts a shrunk program. Returns its class, and whether its layout is new."""
        known = self._by_key.setdefault((found.program.forms, len(found.program.mesh), found.wrong), found)
        known.num_shrunk += 1
        layout = found.program.layout()
        is_new = layout not in known.layouts
        if is_new:
            known.layouts.append(layout)
        self.count(known, found.error)
        return known, is_new

    def count(self, known: WrongClass, error: float) -> None:
        """Counts a program of a class."""
        known.count += 1
        known.error = max(known.error, error if math.isfinite(error) else 0.0)
        self.muted[known.program.forms] += 1

    def mute(self, form: str) -> None:
        """Counts a wrong program of a single operation."""
        self.muted[form,] += 1
