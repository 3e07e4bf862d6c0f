"""Numbers as OpenMetrics text, which Prometheus reads from a port, and its node exporter from a file.

https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class MetricSample(NamedTuple):
    """A value of a family, with its labels. suffix: what follows the family's name, such as `_total` for a counter."""

    value: float
    labels: Mapping[str, str] = {}
    suffix: str = ""


@dataclass(frozen=True, kw_only=True)
class MetricFamily:
    """A metric. kind: `gauge`, `counter` or `histogram`. text: what it is, with its unit."""

    name: str
    text: str
    kind: str = "gauge"
    samples: tuple[MetricSample, ...] = ()


@dataclass(kw_only=True)
class Distribution:
    """A histogram of seconds that grows. bounds: the upper ends of its buckets."""

    bounds: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
    counts: list[int] = field(default_factory=list[int])
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts a value."""
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def samples(self) -> Iterator[MetricSample]:
        """The samples of its family."""
        below = 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=False):
            below += count
            yield MetricSample(below, {"le": _number(bound)}, "_bucket")
        if self.counts:
            yield MetricSample(below, suffix="_count")
            yield MetricSample(self.total, suffix="_sum")


def as_text(families: Iterable[MetricFamily]) -> str:
    """The text of families that have samples."""
    lines = (line for family in families if family.samples for line in _lines(family))
    return "".join(f"{line}\n" for line in (*lines, "# EOF"))


def _lines(family: MetricFamily) -> Iterator[str]:
    yield f"# HELP {family.name} {_escaped(family.text)}"
    yield f"# TYPE {family.name} {family.kind}"
    for sample in family.samples:
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels.items())
        yield f"{family.name}{sample.suffix}{{{labels}}} {_number(sample.value)}".replace("{}", "")


def _number(value: float) -> str:
    return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN" if math.isnan(value) else repr(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
