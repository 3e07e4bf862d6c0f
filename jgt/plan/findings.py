"""What a person should look at: each finding names the signal, the line, the numbers, and what to change."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from jgt.plan.collectives import Collective
from jgt.plan.compiled import Compiled
from jgt.plan.counts import times
from jgt.plan.formulas import Expected
from jgt.plan.hlo import Module
from jgt.plan.memory import USABLE, Memory
from jgt.plan.origin import NONE, origin_of
from jgt.plan.parameters import Parameter
from jgt.plan.rematerialization import Rematerialization
from jgt.plan.replication import Constraint, constraints
from jgt.plan.signals import SignalRow
from jgt.plan.units import size_text

Kind = Literal["memory", "rematerialization", "indivisible", "replicated", "computed-alike", "unexplained", "unknown-loop"]
_FORGOTTEN = 0.05
"""A whole parameter counts as forgotten from this share of all that a device holds."""
_ALIKE = 1.2
_NOTABLE = 0.05
_OVER = 1.25
"""How far above the formulas a signal may be: they leave out what is small."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that costs. rule: file:line of the rule for the signal; bytes: of one device, where bytes are what it costs."""

    kind: Kind
    signal: str
    source: str
    rule: str
    bytes: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that is known of a compiled function when it is judged."""

    compiled: Compiled
    module: Module
    parameters: Sequence[Parameter]
    signals: Sequence[SignalRow]
    collectives: Sequence[Collective]
    expected: Sequence[Expected]
    rematerializations: Sequence[Rematerialization]
    memory: Memory


def findings(facts: Facts) -> Iterator[Finding]:
    """All findings, the gravest kind first, each with the line of the rule for its signal."""
    lines = {row.signal: row.rule for row in facts.signals}
    for one in _all(facts):
        rule = lines.get(one.signal, "")
        yield replace(one, rule=rule, text=f"{one.text} (the rule: {rule})") if rule else one


def _all(facts: Facts) -> Iterator[Finding]:
    yield from _memory(facts.memory)
    layouts = [*_rematerialized(facts.rematerializations), *_indivisible(facts.compiled)]
    yield from layouts
    yield from _replicated(facts.parameters, facts.compiled.mesh.size)
    yield from _alike(facts.signals, facts.module)
    # What a layout that does not fit sends is its own finding's.
    told = {finding.signal for finding in layouts}
    yield from (finding for finding in _unexplained(facts.collectives, facts.expected) if finding.signal not in told)
    yield from _unknown_loops(facts.module)


def _finding(kind: Kind, signal: str, source: str, num_bytes: int, text: str) -> Finding:
    where = f"{source}: " if source else ""
    return Finding(kind=kind, signal=signal, source=source, rule="", bytes=num_bytes, text=f"{where}{signal}: {text}")


def _memory(memory: Memory) -> Iterator[Finding]:
    if memory.fits is False and memory.hbm_bytes is not None:
        usable = round(USABLE * memory.hbm_bytes)
        text = (
            f"the step needs {size_text(memory.peak_bytes)} on each device, of which {size_text(memory.args_bytes)} are arguments, but {size_text(usable)} are usable. "
            "Shard more, recompute more (train.remat), or make the batch of one step smaller"
        )
        yield _finding("memory", "memory", "", memory.peak_bytes - usable, text)


def _rematerialized(found: Sequence[Rematerialization]) -> Iterator[Finding]:
    for one in found:
        layouts = f" to go from {one.before} to {one.after}" if one.before else ""
        text = f"XLA makes the tensor {one.shape} whole on every device{layouts}. Give both sides the same order of axes"
        yield _finding("rematerialization", one.signal, one.source, 0, text)


def _indivisible(compiled: Compiled) -> Iterator[Finding]:
    sizes = dict(compiled.mesh.shape)
    seen: set[Constraint] = set()
    for one in constraints(compiled.program):
        if one in seen:
            continue
        seen.add(one)
        for dim, axes in one.misfits:
            over = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
            text = (
                f"dim {dim} of a tensor {list(one.shape)} has size {one.shape[dim]}, which {over} does not divide, so XLA pads it or makes it whole "
                f"({size_text(one.local_bytes)}). Change the spec {one.spec}"
            )
            yield _finding("indivisible", one.signal, one.source, one.local_bytes, text)


def _replicated(params: Sequence[Parameter], num_devices: int) -> Iterator[Finding]:
    total = sum(p.local_bytes for p in params)
    if num_devices == 1 or sum(p.copies > 1 for p in params) == len(params):
        return
    for p in params:
        if p.copies == num_devices and p.local_bytes > _FORGOTTEN * total:
            text = (
                f"the parameter {p.path} {list(p.shape)} is whole on all {num_devices} devices: {size_text(p.local_bytes)} each, "
                f"{p.local_bytes / total:.0%} of all parameters there. Give it a spec under params:"
            )
            yield _finding("replicated", p.signals[0] if p.signals else NONE, p.source, p.local_bytes, text)


def _alike(rows: Sequence[SignalRow], module: Module) -> Iterator[Finding]:
    total = sum(row.flops for row in rows)
    for row in rows:
        if row.flops_share and row.flops > _ALIKE * row.flops_share and row.flops - row.flops_share > _NOTABLE * total / 2:
            source = _largest_dot(module, row.signal)
            text = (
                f"each device computes {row.flops / row.flops_share:.1f} times its part of the FLOPs ({row.flops / 1e9:.3g} instead of {row.flops_share / 1e9:.3g} "
                "GFLOP): several compute the same. Name a tensor there and shard it over the axis that is left out"
            )
            yield _finding("computed-alike", row.signal, source, 0, text)


def _largest_dot(module: Module, signal: str) -> str:
    """The line of the matmul of a signal whose results are the largest, all its runs together."""
    sizes: dict[str, Fraction] = collections.defaultdict(Fraction)
    for name, count in times(module).items():
        # What is fused stands in a computation of its own, which a fusion runs once.
        for instruction in module.computations[name].instructions.values():
            origin = origin_of(instruction.op_name) if instruction.op == "dot" else None
            if origin and origin.signal == signal:
                sizes[module.source(instruction)] += instruction.num_bytes * count
    return max(sizes, key=lambda line: sizes[line], default="")


def _unexplained(sent: Sequence[Collective], asked: Sequence[Expected]) -> Iterator[Finding]:
    """Signals that send notably more than the formulas say."""
    total = sum(c.total_bytes for c in sent)
    by_signal: dict[str, list[Collective]] = collections.defaultdict(list)
    for one in sent:
        by_signal[one.signal].append(one)
    for signal, own in by_signal.items():
        found, said = sum(c.total_bytes for c in own), sum(e.bytes for e in asked if e.signal == signal)
        if found - said <= _NOTABLE * total or found <= _OVER * said:
            continue
        known: collections.Counter[tuple[str, ...]] = collections.Counter()
        for e in asked:
            if e.signal == signal:
                known[e.axes] += e.bytes
        over: collections.Counter[tuple[str, ...]] = collections.Counter()
        for c in own:
            over[c.axes] += c.total_bytes
        axes = max(over, key=lambda a: over[a] - known[a])
        there = [c for c in own if c.axes == axes]
        # What the layout explains is mostly all-reduces: the others come first if they make up most of what it does not explain.
        moved = [c for c in there if c.kind in ("all-gather", "all-to-all", "collective-permute")]
        moves = 2 * sum(c.total_bytes for c in moved) > over[axes] - known[axes]
        worst = max(moved if moves else there, key=lambda c: (c.total_bytes, c.kind != "all-gather"))
        text = (
            f"{size_text(found)} sent in a step, of which the layout explains {size_text(said)}. Most of the rest goes over {' + '.join(axes) or 'no axis'}: "
            f"{worst.kind} {worst.dtype}, {size_text(worst.total_bytes)}, {worst.phase}. Name the tensor that is brought together there and give it a spec"
        )
        yield _finding("unexplained", signal, worst.source, found - said, text)


def _unknown_loops(module: Module) -> Iterator[Finding]:
    for loop in module.unknown_loops:
        origin = origin_of(loop.op_name)
        text = "nobody knows how often this loop runs; what is in it counts once. Use jax.lax.scan, or fori_loop with constant bounds"
        yield _finding("unknown-loop", origin.signal if origin else NONE, module.source(loop), 0, text)
