"""Which arrays of a state are parameters: those that the model uses, and not the optimizer alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jgt.jaxpr import Program
from jgt.plan.compiled import Argument
from jgt.plan.replication import show, spec_dims
from jgt.uses import parameter_uses

OPTIMIZER = "optimizer"
"""The signal under which a training step updates its parameters."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter. spec: as it is stored; copies: devices that hold each part of it; source: file:line of a use."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    signals: tuple[str, ...]
    spec: str
    dims: tuple[tuple[str, ...], ...]
    copies: int
    local_bytes: int
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
    return tuple(
        Parameter(
            path=a.path,
            shape=a.shape,
            dtype=str(a.dtype),
            signals=signals,
            spec="" if a.sharding is None else show(spec_dims(a.sharding, len(a.shape))),
            dims=((),) * len(a.shape) if a.sharding is None else spec_dims(a.sharding, len(a.shape)),
            copies=num_devices * a.local_bytes // max(a.num_bytes, 1),
            local_bytes=a.local_bytes,
            source=use.source,
        )
        for a, use, signals in zip(state, uses, own, strict=True)
        if signals or (untold and a.dtype.kind not in "iub")
    )


def gradient_bytes(params: Sequence[Parameter], state: Sequence[Argument]) -> int:
    """Bytes of all gradients on one device: each is laid out like its optimizer state, or like its parameter where there is none."""
    names = {p.path for p in params}
    moments = [a for a in state if a.path not in names]
    total = 0
    for p in params:
        alike = [a for a in moments if a.shape == p.shape and _common_end(a.path, p.path)]
        best = max(alike, key=lambda a: _common_end(a.path, p.path), default=None)
        width = np.dtype(p.dtype).itemsize
        total += p.local_bytes if best is None else best.local_bytes // best.dtype.itemsize * width
    return total


def _common_end(a: str, b: str) -> int:
    """How many of the last names of two paths are the same."""
    pairs = zip(reversed(a.split("/")), reversed(b.split("/")), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
