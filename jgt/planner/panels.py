"""The timeline of a step: when the device computes or waits, and when its links are busy.

A step runs thousands of kernels in loops in loops. So the first panel is the whole step, in which a loop is one block. The next is one trip
of the loop that takes longest, and so on, until a trip contains no loop. The last panel is usually one layer, and shows which collectives
hide behind which kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Lane = Literal["device", "links"]

_MAX_PANELS = 4
_NARROWEST = 1 / 400
"""The share of a panel below which a span is merged with its neighbour: it would be narrower than two pixels."""
_FILLS = 0.9
"""A loop that takes this share of its panel is that panel, and is not shown as a block of its own."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """One block of a panel.

    start, end: milliseconds. kind: kernels, waiting, or loop; on the links, the mesh axes. trips: the trips of a loop.
    """

    lane: Lane
    start: float
    end: float
    kind: str
    signal: str
    phase: str
    trips: int = 1


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A stretch of time. title: what runs. trips: how often it runs in a run of the panel before it. ms: its length."""

    title: str
    trips: int
    ms: float
    spans: tuple[Span, ...]


@dataclass
class Track:
    """The spans of one run of a computation, in seconds, and the computations that its loops run."""

    spans: list[Span] = field(default_factory=list[Span])
    loops: dict[str, Span] = field(default_factory=dict[str, Span])

    def add(self, span: Span, loop: str = "") -> None:
        """Adds a span. loop: the computation that it repeats. Spans on the links may come in any order."""
        if span.end <= span.start:
            return
        self.spans.append(span)
        # XLA peels trips off a loop; the longest one is the loop itself.
        if loop and (loop not in self.loops or span.end - span.start > self.loops[loop].end - self.loops[loop].start):
            self.loops[loop] = span


def panels(entry: str, tracks: Mapping[str, Track], name: Callable[[str], str]) -> Iterator[Panel]:
    """Yields the panels of a program, whose main computation is `entry`. name(signal) is the signal's name in the tables."""
    title, trips, computation, seen = "the step", 1, entry, 0
    while seen < _MAX_PANELS and (track := tracks.get(computation)) is not None and track.spans:
        seconds = max(span.end for span in track.spans)
        lengths = {loop: span.end - span.start for loop, span in track.loops.items()}
        inner = max(lengths, key=lengths.__getitem__, default="")
        # A loop around a single loop would be drawn as one block.
        only = inner and lengths[inner] > _FILLS * seconds and seen > 0
        if not only:
            yield Panel(title=title, trips=trips, ms=_ms(seconds), spans=tuple(_drawn(track.spans, seconds, name)))
            seen, trips = seen + 1, 1
        if not inner:
            return
        loop = track.loops[inner]
        title = f"one trip of {name(loop.signal)}, {loop.phase}"
        trips, computation = trips * loop.trips, inner


def _drawn(spans: Sequence[Span], seconds: float, name: Callable[[str], str]) -> Iterator[Span]:
    """Neighbours of one kind as one span, in milliseconds; those that are too narrow to see join their neighbour."""
    narrow = _NARROWEST * seconds
    for lane in ("device", "links"):
        joined: list[Span] = []
        for one in sorted((s for s in spans if s.lane == lane), key=lambda s: s.start):
            span = replace(one, signal=name(one.signal))
            last = joined[-1] if joined else None
            is_alike = (
                last is not None and span.kind != "loop" and (last.kind, last.signal, last.phase) == (span.kind, span.signal, span.phase)
            )
            if last is None or span.start - last.end >= narrow:
                joined.append(span)
            elif is_alike or span.end - span.start < narrow:
                joined[-1] = replace(last, end=span.end)
            elif last.end - last.start < narrow:
                joined[-1] = replace(span, start=last.start)
            else:
                joined.append(span)
        yield from (replace(s, start=_ms(s.start), end=_ms(s.end)) for s in joined if s.end - s.start >= narrow)


def _ms(seconds: float) -> float:
    return float(f"{seconds * 1e3:.6g}")
