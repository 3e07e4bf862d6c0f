"""The scan over the layers: found by its signal, in a program without calls and checkpoints around it."""

from __future__ import annotations

from typing import Any

from jgt import jaxpr as jx
from jgt.jaxpr import Equation, Place, Program
from jgt.parts import Flat


class SplitError(Exception):
    """The program has no place for a pipeline; the message says why, without file and line."""


def dissolves(signal: str) -> Any:
    """Which equations `flatten` takes apart, so that the scan stands among the others."""

    def dissolve(equation: Equation) -> bool:
        # A checkpoint around the layers would recompute the whole pipeline: the pipeline has its own.
        return jx.is_call(equation) or (jx.is_remat(equation) and any(_scans(p, signal, equation) for p in jx.subprograms(equation)))

    return dissolve


def _scans(program: Program, signal: str, within: Equation) -> bool:
    around = jx.place_of(within, Place())
    for equation in jx.body(program).eqns:
        if jx.is_scan(equation) and jx.place_of(equation, around).path == signal:
            return True
        if any(_scans(p, signal, equation) for p in jx.subprograms(equation) if jx.is_call(equation)):
            return True
    return False


def layer_scan(flat: Flat, signal: str) -> int:
    """The index of the scan under a signal."""
    scans = [(i, jx.place_of(e, Place()).path) for i, e in enumerate(flat.eqns) if jx.is_scan(e)]
    found = [i for i, path in scans if path == signal]
    if len(found) == 1:
        if flat.eqns[found[0]].params["reverse"]:
            raise SplitError(f"the layer scan under {signal!r} goes in reverse. Scan the layers forward")
        return found[0]
    if len(found) > 1:
        raise SplitError(f"the signal {signal!r} holds {len(found)} scans, but a pipeline runs one. Give each scan a signal of its own")
    seen = sorted({jx.place_of(e, Place()).path for e in flat.eqns} - {""})
    if any(path == signal or path.startswith(f"{signal}/") for path in seen):
        raise SplitError(
            f"the signal {signal!r} holds no layer scan. Stack the layers' parameters and run them with jax.lax.scan, nnx.scan or nn.scan "
            "directly under this signal"
        )
    others = ", ".join(repr(path) for _, path in scans) or "none"
    raise SplitError(f"no signal of the program is {signal!r}. Layer scans stand under: {others}")
