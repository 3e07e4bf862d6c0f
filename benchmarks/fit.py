"""Fits the constants of a search's estimates to plans. The result is text for train/search: forms.py, estimate.py, links.py.

    python benchmarks/fit.py [--rounds 3] [--table traffic ...] [--without maxtext]

The plans are those in benchmarks/layouts of the models that `benchmarks/estimates.py` names as fitted. For each of them the estimates
learn from the plans of its search, as they would at the end of a search. What counts is how far they are from the plans of layouts drawn
at random: the errors in time and memory, and the order. Each constant in turn is moved up and down, and the move is kept if the sum over
all models becomes smaller; then with smaller steps (coordinate descent).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.estimates import FITTED, Sample, read_sample
from benchmarks.harness import make_parser
from benchmarks.search import RUNS
from train.search.estimate import AGAIN
from train.search.forms import MEMORY, TRAFFIC
from train.search.links import HIDDEN

TABLES: dict[str, dict[str, Any]] = {
    "memory": MEMORY,
    "traffic": TRAFFIC,
    "again": AGAIN,
    "hidden": HIDDEN,
}
_FACTORS, _SHIFTS = (1.5, 1.25, 1.1), (0.2, 0.1, 0.05)
"""How far a number and a share are moved in each round."""
_LEAST_GAIN = 3e-4
_ORDER = 0.1
"""What the distance of Kendall's tau to 1 counts, beside a relative error."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant in a table of the estimates. field: of a dataclass in it."""

    table: str
    name: str
    field: str | None = None

    @property
    def value(self) -> float:
        """What it is now."""
        found = TABLES[self.table][self.name]
        return found if self.field is None else getattr(found, self.field)

    def set(self, value: float) -> None:
        """Changes it for all estimators that are made from now on."""
        table = TABLES[self.table]
        table[self.name] = value if self.field is None else replace(table[self.name], **{self.field: value})

    def moved(self, step: int) -> list[float]:
        """Values to try."""
        if self.field is None:
            return [float(f"{self.value * factor:.3g}") for factor in (_FACTORS[step], 1 / _FACTORS[step])]
        return [round(self.value + shift, 3) for shift in (_SHIFTS[step], -_SHIFTS[step])]


def constants(tables: Sequence[str]) -> Iterator[Constant]:
    """All constants of these tables."""
    for table in tables:
        for name, value in TABLES[table].items():
            if is_dataclass(value):
                # Only a pipeline sends rows between stages, so nothing reads the other shares of `stage`.
                names = [field.name for field in fields(value) if name != "stage" or field.name not in ("plain", "looped", "overlap")]
                yield from (Constant(table=table, name=name, field=field) for field in names)
            else:
                yield Constant(table=table, name=name)


def loss(samples: Sequence[Sample]) -> float:
    """How far estimates are from plans, as a mean over models."""
    return statistics.mean(_loss(sample) for sample in samples)


def _loss(sample: Sample) -> float:
    estimator = sample.estimator()
    found = [sample.figures(estimator, near=near) for near in (False, True)]
    return sum(one["time"] + one["memory"] + _ORDER * (1 - one["kendall"]) for one in found)


def fit(samples: Sequence[Sample], tables: Sequence[str], rounds: int) -> None:
    """Moves all constants of these tables to smaller losses, and prints each move."""
    best = loss(samples)
    _say(f"{best:.4f}  at the start")
    for step in range(rounds):
        for constant in constants(tables):
            start = constant.value
            for value in constant.moved(min(step, len(_SHIFTS) - 1)):
                constant.set(value)
                if (found := loss(samples)) < best - _LEAST_GAIN:
                    best, start = found, value
                    _say(f"{best:.4f}  {constant.table}: {constant.name} {constant.field or ''} {value:g}")
                    break
            constant.set(start)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Prints the tables after the fit."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds over all constants, with smaller steps in each (3)")
    parser.add_argument("--table", action="append", choices=list(TABLES), help="constants to fit (default: all)")
    parser.add_argument(
        "--without", metavar="FAMILY", help="leave out rows whose names begin so, and report how well the fit predicts them"
    )
    arguments = parser.parse_args()
    runs = yaml.safe_load(RUNS.read_text())
    samples = [read_sample(row, runs[row]) for row in FITTED]
    held_out = [one for one in samples if arguments.without and one.row.startswith(arguments.without)]
    tables = arguments.table or list(TABLES)
    fit([one for one in samples if one not in held_out], tables, arguments.rounds)
    for sample in held_out:
        for near in (False, True):
            print(sample.row, "near" if near else "all", sample.figures(sample.estimator(), near=near))
    for table in tables:
        print(f"{table}:")
        for name, value in TABLES[table].items():
            print(f"    {name!r}: {value},")


if __name__ == "__main__":
    main()
