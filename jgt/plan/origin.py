"""Where a compiled instruction comes from: its signal, and whether it runs forward, backward, or again.

XLA keeps JAX's name stack in `op_name`. A signal is a scope with jgt's prefix, so it survives partitioning and fusion.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

from jgt.scopes import BACKWARD, PIPELINE, RECOMPUTE
from jgt.signal import PREFIX

Phase = Literal["forward", "backward", "recompute"]

NONE = "(none)"
"""The row of what stands under no signal."""

_SIGNAL = re.compile(rf"(?<![\w.-]){re.escape(PREFIX)}([\w.-]+)")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The signal as a path (`layers/attn`), and the phase of a training step."""

    signal: str
    phase: Phase


@functools.lru_cache(maxsize=65536)
def origin_of(op_name: str) -> Origin | None:
    """The origin that an op name tells; None where it holds no signal, or where it is combined of several."""
    # Of instructions made into one, the first name stands for all.
    op_name = op_name.partition(";")[0]
    if names := _combined(op_name):
        found = {origin_of(name) for name in names}
        return found.pop() if len(found) == 1 else None
    signals = _SIGNAL.findall(op_name)
    if signals:
        return Origin(signal="/".join(signals), phase=phase_of(op_name))
    return Origin(signal="pipeline", phase=phase_of(op_name)) if PIPELINE in op_name else None


def phase_of(op_name: str) -> Phase:
    """recompute inside a rematerialized region, backward where differentiation transposed, else forward."""
    if "rematted_computation" in op_name or RECOMPUTE in op_name:
        return "recompute"
    return "backward" if "transpose(" in op_name or BACKWARD in op_name else "forward"


def combined(op_name: str, num_operands: int) -> list[str]:
    """The op name of each operand of a combined collective, which XLA writes as prefix/(a:b:c).

    Where there are not as many names as operands, the whole.
    """
    names = _combined(op_name)
    return names if len(names) == num_operands else [op_name] * num_operands


def _combined(op_name: str) -> list[str]:
    open_at = 0 if op_name.startswith("(") else op_name.find("/(") + 1
    if not op_name.endswith(")") or (open_at == 0 and not op_name.startswith("(")):
        return []
    return [op_name[:open_at] + part for part in _split(op_name[open_at + 1 : -1])]


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == ":" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
