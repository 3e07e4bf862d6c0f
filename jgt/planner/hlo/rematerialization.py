"""XLA's warnings of changed layouts, which it writes to stderr while it compiles."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from jgt.planner.hlo.instruction import OP_NAME
from jgt.planner.hlo.origin import NONE, signal_of
from jgt.planner.hlo.text import Module

_WARNING = "Involuntary full rematerialization"
_PARTS = re.compile(
    r"cannot go from sharding (\{.*?\}) to (\{.*?\}) efficiently for HLO operation %?[\w.\-]+ = (\S+) .*?metadata=\{(.*?)\}"
)
"""The warning's text, from xla/service/spmd/spmd_partitioner.cc."""


@dataclass(frozen=True, kw_only=True)
class Rematerialization:
    """A tensor that XLA makes whole on every device to change its layout.

    shape: its part on one device. before, after: its shardings as XLA writes them. All three are empty if the warning leaves them out.
    """

    signal: str
    source: str
    shape: str
    before: str
    after: str


def rematerializations(lines: Iterable[str], module: Module) -> tuple[Rematerialization, ...]:
    """XLA's warnings among these lines of stderr, with their signals and lines of the program; each once."""
    return tuple(dict.fromkeys(_read_warning(line, module) for line in lines if _WARNING in line))


def _read_warning(line: str, module: Module) -> Rematerialization:
    found = _PARTS.search(line)
    # Should another version of XLA word its warning differently, the finding is still made, without the details.
    before, after, shape, metadata = found.groups() if found else ("", "", "", "")
    name = OP_NAME.search(metadata)
    signal = signal_of(name[1]) if name else NONE
    return Rematerialization(signal=signal, source=module.source(metadata), shape=shape, before=before, after=after)
