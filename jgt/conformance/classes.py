"""Classes of wrong programs, and what is drawn rarely because its class is known."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jgt.conformance.program import DrawnProgram

_RARELY = 0.05
"""The least share of programs of a known class that are drawn all the same."""


@dataclass(frozen=True, kw_only=True)
class Muted:
    """Combinations of forms that were found to be wrong, with how often. A single operation counts for each number of mesh axes."""

    found: Mapping[tuple[str, ...], int] = field(default_factory=dict[tuple[str, ...], int])

    def hides(self, program: DrawnProgram, rng: random.Random, axes: int = 0) -> bool:
        """Whether a program that contains such a combination is not drawn this time."""
        forms = {*program.forms, f"{axes} axes"}
        times = max((times for known, times in self.found.items() if forms.issuperset(known)), default=0)
        return times > 0 and rng.random() > max(0.5**times, _RARELY)

    def to_json(self) -> list[Any]:
        """A JSON list."""
        return [[list(forms), times] for forms, times in self.found.items()]

    @classmethod
    def of_json(cls, read: Sequence[Any]) -> Muted:
        """The combinations of a JSON list."""
        return cls(found={tuple(forms): times for forms, times in read})
