"""Where an instruction comes from: its signal, and whether it runs forward, backward or recomputes.

XLA keeps JAX's name stack of each equation as `op_name`. A signal is a named scope with a prefix, and differentiation and rematerialization
leave words of their own:

    jit(step)/jvp(sig.layers)/while/body/sig.attn/dot_general                                    layers/attn, forward
    jit(step)/transpose(jvp(sig.layers))/while/body/sig.attn/dot_general                         layers/attn, backward
    jit(step)/transpose(jvp(sig.layers))/while/body/rematted_computation/sig.attn/dot_general    layers/attn, recompute

XLA adds instructions without a name, such as the collectives of its partitioner, and JAX slices a loop's stacked parameters outside the
scopes in which the body uses them. Such an instruction serves a neighbour that does have a name: so the search goes first through what it
is computed from, then through what uses it, breadth first, and takes the nearest signal. It stops after a few hops; farther away, a signal
would be a coincidence.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Literal, NamedTuple

from jgt.planner.hlo.graph import consumers, producers
from jgt.planner.hlo.instruction import Instruction
from jgt.planner.hlo.text import Module
from jgt.program.places import listed_once
from jgt.program.scopes import BACKWARD, ON_DEVICES, PIPELINE, PREFIX, RECOMPUTE, REPLICAS

Phase = Literal["forward", "backward", "recompute"]

NONE = "(none)"
"""The signal, in tables, of what is under no signal."""

EXCHANGED = "replicas"
"""The signal, in tables, of what replicas send to each other (`jgt.replacements.replicas`)."""

# A scope of jgt's, wherever it begins: after a slash, or in the bracket of `jvp(`, but not inside a longer word.
_SIGNAL = re.compile(rf"(?<![\w.-]){re.escape(PREFIX)}([\w.-]+)")
# In a backward pass JAX lists the scopes around a recomputed region twice (`listed_once`), and in the body of a loop without `jvp`:
# `transpose(jvp(a))/while/body/b/c/b/c/checkpoint`. The sum of two cotangents there is an `add_any`.
_TWICE_IN_BODY = re.compile(r"(?:(?<=/)|^)((?:[^/]+/)+)\1(?=(?:checkpoint|add_any)(?:/|$))")
_MAX_HOPS = 6
_Step = Callable[[Module, Instruction], Iterator[Instruction]]


class Origin(NamedTuple):
    """A signal as a path (`layers/attn`), and the phase of a training step."""

    signal: str
    phase: Phase


@functools.lru_cache(maxsize=65536)
def origin_of(op_name: str) -> Origin | None:
    """The origin that a name states; None if it contains no signal, or combines names with different origins."""
    # XLA joins the names of instructions that it merged with semicolons; the first decides.
    op_name = op_name.partition(";")[0]
    if names := _combined_names(op_name):
        origins = {origin_of(name) for name in names}
        return origins.pop() if len(origins) == 1 else None
    if REPLICAS in op_name:
        # One collective may add up the gradients of several signals.
        return Origin(EXCHANGED, phase_of(op_name))
    # Scopes are listed from the outermost inwards, as a signal's path is. Words of JAX between them, such as `while`, are left out.
    signals, phase = _signals(_TWICE_IN_BODY.sub(r"\1", op_name)), phase_of(op_name)
    if signals:
        return Origin("/".join(signals), phase)
    # Operations that a pipeline adds to the model, such as sends to the next stage, have a separate signal.
    return Origin("pipeline", phase_of(op_name)) if PIPELINE in op_name else None


def _signals(op_name: str) -> list[str]:
    matches = list(_SIGNAL.finditer(op_name))
    before = [op_name[start : match.start()] for match, start in zip(matches, [0, *(m.end() for m in matches)], strict=False)]
    begins = {n for n, text in enumerate(before) if "jvp(" in text} if phase_of(op_name) != "forward" else set[int]()
    return listed_once([match[1] for match in matches], begins)


def signal_of(op_name: str) -> str:
    """The signal that a name states; NONE if it states none."""
    origin = origin_of(op_name)
    return NONE if origin is None else origin.signal


def phase_of(op_name: str) -> Phase:
    """recompute inside a rematerialized region, backward where differentiation transposed, otherwise forward."""
    # Rematerialization happens inside the transposed part of a program: its mark has to be looked for first.
    if "rematted_computation" in op_name or RECOMPUTE in op_name:
        return "recompute"
    return "backward" if "transpose(" in op_name or BACKWARD in op_name else "forward"


def operand_names(op_name: str, num_operands: int) -> list[str]:
    """The name of each operand of a combined collective, which XLA writes as `prefix/(a:b:c)`.

    If the numbers of names and operands differ, each operand gets the whole name.
    """
    names = _combined_names(op_name)
    return names if len(names) == num_operands else [op_name] * num_operands


def _combined_names(op_name: str) -> list[str]:
    """`prefix/a`, `prefix/b` for `prefix/(a:b)`; empty for a name that is not combined.

    `transpose(jvp(sig.mlp))` ends with a bracket too, but there it follows a word, not a slash.
    """
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


def origin_at(module: Module, instruction: Instruction) -> Origin:
    """The origin of an instruction by its own name or its neighbours'; its signal is NONE if neither has one."""
    origin, _ = find_origin(module, instruction.op_name, [instruction], [instruction])
    return Origin(NONE, phase_of(instruction.op_name)) if origin is None else origin


def find_origin(
    module: Module, op_name: str, inputs: Iterable[Instruction], outputs: Iterable[Instruction]
) -> tuple[Origin | None, Instruction | None]:
    """The origin of a name, or of the nearest neighbour if the name has none; and the nearest neighbour of that signal.

    inputs and outputs are where the search begins: it follows inputs to what they are computed from, then outputs to what uses them.
    """
    inputs, outputs = list(inputs), list(outputs)
    origin = origin_of(op_name)
    neighbour = _nearest(module, inputs, outputs, lambda other: origin is None or other.signal == origin.signal)
    if origin is None:
        if neighbour is None:
            return None, None
        origin = neighbour.origin
    # Slices of stacked parameters in a loop, and stacks of results, are named `layers`. They belong to the `layers/attn` next to them.
    below = op_name.rpartition(PREFIX)[2]
    if ON_DEVICES in below or (origin_of(op_name) == origin and origin.signal.count("/") and "while/body" not in below):
        # Code that is written for a device has its own signal, and so has code directly under a signal inside another one.
        return origin, neighbour.instruction if neighbour else None
    inner = origin.signal + "/"
    deeper = _nearest(module, inputs, outputs, lambda other: other.signal.startswith(inner))
    if deeper is not None:
        origin, neighbour = Origin(deeper.origin.signal, origin.phase), deeper
    return origin, neighbour.instruction if neighbour else None


class _Neighbour(NamedTuple):
    origin: Origin
    instruction: Instruction


def _nearest(
    module: Module, inputs: Iterable[Instruction], outputs: Iterable[Instruction], accepts: Callable[[Origin], bool]
) -> _Neighbour | None:
    return _search(module, inputs, producers, accepts) or _search(module, outputs, consumers, accepts)


def _search(module: Module, ring: Iterable[Instruction], step: _Step, accepts: Callable[[Origin], bool]) -> _Neighbour | None:
    """Breadth first, one ring of neighbours after another."""
    seen: set[Instruction] = set()
    for _ in range(_MAX_HOPS + 1):
        # Not a set: the order decides between neighbours at the same distance, and has to be the same in every run.
        ring = [i for i in dict.fromkeys(ring) if i not in seen]
        seen.update(ring)
        for near in ring:
            origin = origin_of(near.op_name)
            if origin is not None and accepts(origin):
                return _Neighbour(origin, near)
        ring = [further for near in ring for further in _beside(module, near, step)]
    return None


def _beside(module: Module, instruction: Instruction, step: _Step) -> Iterator[Instruction]:
    """The neighbours of an instruction. A bitcast without a name is the same value, and not a hop."""
    for near in step(module, instruction):
        if near.op == "bitcast" and not near.op_name:
            yield from _beside(module, near, step)
        else:
            yield near


def full_signal(name: str, known: Collection[str]) -> str:
    """The one known signal that ends with this name, such as `layers/attn` for `attn`; otherwise the name itself.

    JAX hoists constants out of a loop and forgets the scopes around the loop, so names may lack their beginning.
    """
    ends = [signal for signal in known if signal.endswith(f"/{name}")]
    return ends[0] if name not in known and len(ends) == 1 else name
