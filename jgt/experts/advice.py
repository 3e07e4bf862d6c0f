"""The two ways in which rows can travel to their experts, and which of them sends less.

With n devices and k choices of each of T tokens, an all-to-all sends a row for each choice: (n-1)/n · room · k · T · d. A gather sends
every token to every device: (n-1) · T · d. So a gather sends less where n < room · k: with many choices and few devices. Scales, choices
and counts travel too, so it is the bytes that are compared, and not n with room · k.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from jgt.console import size_text
from jgt.rules import Rules, match_experts


@dataclass(frozen=True, kw_only=True)
class ExchangeUse:
    """The exchanges of a signal: bytes that a device sends in a step, and what it would send in the other way.

    method, other: all-to-all and gather, or the reverse. num_devices: along `axis`. num_choices: of a token. source: the call's file:line.
    """

    signal: str
    source: str
    axis: str
    num_devices: int
    num_choices: int
    room: float
    method: str
    other: str
    bytes: Fraction
    other_bytes: Fraction

    @property
    def saved(self) -> Fraction:
        """The bytes that the other way saves."""
        return self.bytes - self.other_bytes

    @property
    def advice(self) -> str:
        """What to change, and why."""
        sizes = size_text(round(self.bytes)), size_text(round(self.other_bytes))
        return (
            f"exchange: {self.method} sends {sizes[0]} over {self.axis} in a step; exchange: {self.other} would send {sizes[1]}. "
            f"{self.axis} has {self.num_devices} devices, and room · choices is {self.room:g} · {self.num_choices} = "
            f"{self.room * self.num_choices:g}. Write exchange: {self.other}"
        )


def sum_of(uses: Iterable[ExchangeUse]) -> Iterator[ExchangeUse]:
    """The uses with the bytes of all that differ in nothing but bytes and source, in their order."""
    found: dict[object, ExchangeUse] = {}
    for use in uses:
        key = (use.signal, use.axis, use.num_choices, use.room, use.method)
        first = found.get(key)
        found[key] = (
            use if first is None else replace(first, bytes=first.bytes + use.bytes, other_bytes=first.other_bytes + use.other_bytes)
        )
    yield from found.values()


def rule_of(use: ExchangeUse, rules: Rules | None) -> str:
    """The file:line of the rule that says how rows travel; empty without rules."""
    rule = None if rules is None else match_experts(rules, use.signal).rule
    return "" if rule is None else rule.where
