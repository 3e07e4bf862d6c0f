"""Which arrays of a state are parameters: those that the model uses, and not the optimizer alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jgt.jaxpr import Program
from jgt.plan.compiled import Argument
from jgt.plan.replication import show, spec_dims
from jgt.uses import Use, parameter_uses

OPTIMIZER = "optimizer"
"""The signal under which a training step updates its parameters."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter. spec: as it is stored; copies: devices that hold each part of it; source: file:line of a use.

    state_dims: the axes of the dims of its optimizer state, which are those of its gradient; gradient_bytes: of that on one device.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    signals: tuple[str, ...]
    spec: str
    dims: tuple[tuple[str, ...], ...]
    state_dims: tuple[tuple[str, ...], ...]
    copies: int
    local_bytes: int
    gradient_bytes: int
    source: str

    @property
    def name(self) -> str:
        """The end of the path."""
        return "/".join(self.path.split("/")[-2:])


def parameters_of(program: Program, state: Sequence[Argument], num_devices: int) -> tuple[Parameter, ...]:
    """The parameters among the program's first arguments; all of these where no signal tells them apart."""
    uses = parameter_uses(program, len(state))
    own = [tuple(s for s in use.signals if s != OPTIMIZER) for use in uses]
    untold = not any(own)
    chosen = [signals or (() if untold and a.dtype.kind not in "iub" else None) for a, signals in zip(state, own, strict=True)]
    moments = [a for a, signals in zip(state, chosen, strict=True) if signals is None]
    return tuple(
        _parameter(a, signals, use, moments, num_devices) for a, signals, use in zip(state, chosen, uses, strict=True) if signals is not None
    )


def _parameter(a: Argument, signals: tuple[str, ...], use: Use, moments: Sequence[Argument], num_devices: int) -> Parameter:
    alike = [m for m in moments if m.shape == a.shape and _common_end(m.path, a.path)]
    moment = max(alike, key=lambda m: _common_end(m.path, a.path), default=a)
    return Parameter(
        path=a.path,
        shape=a.shape,
        dtype=str(a.dtype),
        signals=signals,
        spec="" if a.sharding is None else show(_dims(a)),
        dims=_dims(a),
        state_dims=_dims(moment),
        copies=num_devices * a.local_bytes // max(a.num_bytes, 1),
        local_bytes=a.local_bytes,
        gradient_bytes=moment.local_bytes // moment.dtype.itemsize * a.dtype.itemsize,
        source=next((line for signal, line in zip(use.signals, use.sources, strict=True) if line and signal != OPTIMIZER), ""),
    )


def _dims(a: Argument) -> tuple[tuple[str, ...], ...]:
    return ((),) * len(a.shape) if a.sharding is None else spec_dims(a.sharding, len(a.shape))


def _common_end(a: str, b: str) -> int:
    """How many of the last names of two paths are the same."""
    pairs = zip(reversed(a.split("/")), reversed(b.split("/")), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
