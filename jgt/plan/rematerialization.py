"""Involuntary full rematerializations: tensors that XLA makes whole on every device to lay them out anew.

XLA warns of them on stderr, with the name of an instruction, and without the line of the program that it comes from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from jgt.plan.hlo import Module
from jgt.plan.origin import NONE, origin_of

_WARNING = "Involuntary full rematerialization"
_PARTS = re.compile(
    r"cannot go from sharding (?P<before>\{.*?\}) to (?P<after>\{.*?\}) "
    r"efficiently for HLO operation %?[\w.\-]+ = (?P<shape>\S+) .*?metadata=\{(?P<metadata>.*?)\}"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True, kw_only=True)
class Rematerialization:
    """One such tensor. shape: on one device, and shardings as XLA writes them; empty where the warning does not tell."""

    signal: str
    source: str
    shape: str
    before: str
    after: str


def rematerializations(lines: Iterable[str], module: Module) -> tuple[Rematerialization, ...]:
    """What XLA warned of in its lines, tied to signals and to lines of the program; each once."""
    return tuple(dict.fromkeys(_read(line, module) for line in lines if _WARNING in line))


def _read(line: str, module: Module) -> Rematerialization:
    found = _PARTS.search(line)
    parts = found.groupdict() if found else {}
    metadata = parts.get("metadata", "")
    name = _OP_NAME.search(metadata)
    origin = origin_of(name[1]) if name else None
    return Rematerialization(
        signal=origin.signal if origin else NONE,
        source=module.source_in(metadata),
        shape=parts.get("shape", ""),
        before=parts.get("before", ""),
        after=parts.get("after", ""),
    )
