"""Findings: what a person should look at in a plan, each with its signal, its line, its numbers, and what to change.

A plan has hundreds of rows, and a mistake in the rules looks like any other row. So each kind of finding compares two independent counts of
one thing, such as the bytes that are sent with the formulas. XLA itself warns, on stderr only, when it can change a layout only by making a
tensor whole on every device (an involuntary full rematerialization).

Invariant: the runs that ship have no findings. A finding that is mostly noise would hide the others.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from jax.sharding import NamedSharding

from jgt.command.console import amount
from jgt.planner.compiled import Compiled
from jgt.planner.flops import RAGGED_DOT, grouped_flops
from jgt.planner.hardware.target import USABLE
from jgt.planner.hlo.collectives import Collective
from jgt.planner.hlo.graph import runs_per_step
from jgt.planner.hlo.instruction import Instruction
from jgt.planner.hlo.kernels import is_kernel, kernel_cost
from jgt.planner.hlo.origin import NONE, signal_of
from jgt.planner.hlo.rematerialization import Rematerialization
from jgt.planner.hlo.text import Module
from jgt.planner.hlo.trips import unknown_loops
from jgt.planner.layouts import Parameter
from jgt.planner.memory import Memory
from jgt.planner.needs.formulas import Expected
from jgt.planner.signals import SignalRow
from jgt.program import jaxpr as jx
from jgt.program.dims import num_parts, sharding_dims, show_dims
from jgt.program.equations import subprograms
from jgt.program.jaxpr import Equation, Program
from jgt.program.places import Place, line_of, place_of

FindingKind = Literal[
    "memory",
    "flag",
    "avoided",
    "rematerialization",
    "indivisible",
    "replicated",
    "computed-alike",
    "dense-experts",
    "unexplained",
    "unknown-loop",
]

_FORGOTTEN = 0.05
"""A replicated parameter is a finding from this share of all parameters on a device: small ones are replicated on purpose."""
REPEATED = 1.2
"""Devices repeat work if one computes this many times its share: XLA may split a small matmul unevenly."""
_NOTABLE = 0.05
"""Work or bytes below this share of the whole are not worth a finding."""
_PADDED = 0.02
"""Padding below this share of a dim is not worth a finding."""
_UNEXPLAINED = 1.25
"""How far a signal may be above the formulas, which leave out what is small."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to look at. rule: file:line of the rule for the signal. bytes: its cost on one device; 0 if bytes are not its cost."""

    kind: FindingKind
    signal: str
    source: str
    rule: str
    bytes: int
    text: str


def findings(
    compiled: Compiled,
    module: Module,
    memory: Memory,
    params: Sequence[Parameter],
    sent: Sequence[Collective],
    formulas: Sequence[Expected],
    rows: Sequence[SignalRow],
    remats: Sequence[Rematerialization],
) -> Iterator[Finding]:
    """All findings of a compiled function, the gravest kind first, each with the line of the rule for its signal."""
    # Each constraint once: it appears in the forward pass, and again in the recompute.
    misfits = [*_rematerialized(remats), *dict.fromkeys(_indivisible(compiled.program))]
    dense = list(_dense_experts(compiled, module))
    rules = {row.signal: row.rule for row in rows}
    for finding in (
        *_too_much_memory(memory),
        *_refused_flags(compiled),
        *_avoided(compiled, sent),
        *misfits,
        *_replicated(params, compiled.mesh.size),
        *dense,
        # Work that a dense ragged_dot does in vain is not repeated by other devices.
        *_without(dense, _repeated(rows, module)),
        # The bytes that a misfit causes are unexplained too, but one finding is enough for one mistake.
        *_without(misfits, _unexplained(sent, formulas)),
        *_unknown_loops(module),
    ):
        rule = rules.get(finding.signal, "")
        # Functions that were not sharded by rules have findings too.
        yield replace(finding, rule=rule, text=f"{finding.text} (rule: {rule})") if rule else finding


def _without(others: Iterable[Finding], some: Iterable[Finding]) -> Iterator[Finding]:
    covered = {finding.signal for finding in others}
    return (finding for finding in some if finding.signal not in covered)


def _finding(kind: FindingKind, signal: str, source: str, num_bytes: int, text: str) -> Finding:
    where = f"{source}: " if source else ""
    return Finding(kind=kind, signal=signal, source=source, rule="", bytes=num_bytes, text=f"{where}{signal}: {text}")


def _too_much_memory(memory: Memory) -> Iterator[Finding]:
    if memory.fits is False and memory.hbm_bytes is not None:
        usable = round(USABLE * memory.hbm_bytes)
        text = (
            f"the step needs {amount(memory.peak_bytes, 'B')} on each device, {amount(memory.args_bytes, 'B')} of it for arguments, but "
            f"only {amount(usable, 'B')} are usable. Shard more, recompute more, or make the batch of one step smaller. "
            "The predicted time has no meaning: XLA schedules a step that does not fit without running collectives beside kernels"
        )
        yield _finding("memory", "memory", "", memory.peak_bytes - usable, text)


def _refused_flags(compiled: Compiled) -> Iterator[Finding]:
    for name, value in compiled.refused.items():
        text = (
            f"the plan is without --{name}={value}: the installed XLA does not take it as an option of one compilation, and may have "
            "retired it. Remove the flag, or set it in the environment variable XLA_FLAGS, which runs and plans share"
        )
        yield _finding("flag", "flags", "", 0, text)


def _avoided(compiled: Compiled, sent: Sequence[Collective]) -> Iterator[Finding]:
    # A layer that occurs several times has each of its matmuls once here. What sends nothing is not worth a finding.
    for avoided in {(a.line, a.before): a for a in compiled.avoided if a.sends}.values():
        signal, kind = signal_of(avoided.name), avoided.name.rpartition("/")[2]
        sends = sum(c.total_bytes for c in sent if c.source and avoided.line.endswith(c.source) and c.signal == signal)
        what = (
            f"wrongly with layouts such as {avoided.before}, so jgt gives it"
            if avoided.is_layout
            else f"wrongly ({avoided.before}), so jgt adds"
        )
        help = f". Specs by which each axis splits only one dim of the {kind} need no such help" if avoided.is_layout else ""
        text = f"XLA computes a {kind} {what} {avoided.after}. This line sends {amount(sends, 'B')} in a step{help}"
        yield _finding("avoided", signal, avoided.line, sends, text)


def _rematerialized(remats: Sequence[Rematerialization]) -> Iterator[Finding]:
    for remat in remats:
        layouts = f" to go from {remat.before} to {remat.after}" if remat.before else ""
        text = f"XLA makes the tensor {remat.shape} whole on every device{layouts}. Use the same order of axes on both sides"
        yield _finding("rematerialization", remat.signal, remat.source, 0, text)


def _indivisible(program: Program, around: Place = Place()) -> Iterator[Finding]:  # noqa: B008 - a Place never changes
    """The constraints of a program that XLA pads or replicates without a warning, because it cannot split their dims evenly."""
    for equation in jx.body(program).eqns:
        place = place_of(equation, around)
        if equation.primitive.name == "sharding_constraint" and isinstance(sharding := equation.params["sharding"], NamedSharding):
            yield from _misfits(equation, sharding, place.path or NONE)
        for inner in subprograms(equation):
            yield from _indivisible(inner, place)


def _misfits(equation: Equation, sharding: NamedSharding, signal: str) -> Iterator[Finding]:
    array, sizes = jx.struct_of(equation.invars[0]), dict(sharding.mesh.shape)
    dims = sharding_dims(sharding, len(array.shape))
    parts = [num_parts(axes, sizes) for axes in dims]
    # XLA pads each part to the same size, so a device stores the quotient, rounded up.
    local_bytes = math.prod(-(-size // n) for size, n in zip(array.shape, parts, strict=True)) * array.dtype.itemsize
    for dim, (axes, n, size) in enumerate(zip(dims, parts, array.shape, strict=True)):
        # A vocabulary that is a few rows short of a multiple is padded by these, which costs nothing that is worth a line.
        if -size % n > _PADDED * size:
            over = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
            text = (
                f"dim {dim} of a tensor {list(array.shape)} has size {size}, which {over} does not divide, so XLA "
                f"pads it or makes it whole ({amount(local_bytes, 'B')}). Change the spec {show_dims(dims)}"
            )
            yield _finding("indivisible", signal, line_of(equation), local_bytes, text)


def _replicated(params: Sequence[Parameter], num_devices: int) -> Iterator[Finding]:
    total = sum(p.local_bytes for p in params)
    # Where every parameter is replicated, in whole or in part, that is the plan: data parallelism.
    if num_devices == 1 or all(p.copies > 1 for p in params):
        return
    for p in params:
        if p.copies == num_devices and p.local_bytes > _FORGOTTEN * total:
            text = (
                f"the parameter {p.path} {list(p.shape)} is whole on all {num_devices} devices: {amount(p.local_bytes, 'B')} each, "
                f"{p.local_bytes / total:.0%} of all parameters there. Give it a spec under params:"
            )
            yield _finding("replicated", p.signals[0] if p.signals else NONE, p.source, p.local_bytes, text)


def _repeated(rows: Sequence[SignalRow], module: Module) -> Iterator[Finding]:
    total = sum(row.flops for row in rows)
    for row in rows:
        if row.repeats > REPEATED and row.flops - row.flops_share > _NOTABLE * total / 2:
            text = (
                f"each device computes {row.repeats:.1f} times its share of the FLOPs ({row.flops / 1e9:.3g} instead of "
                f"{row.flops_share / 1e9:.3g} GFLOP), so several devices repeat the same work. Name a tensor there and shard it over the "
                "axis that is missing"
            )
            # The line of the matmul with the largest results, all its runs together.
            sizes = _sums_by_line(module, row.signal, lambda i: i.num_bytes if i.op == "dot" else 0)
            yield _finding("computed-alike", row.signal, max(sizes, key=lambda line: sizes[line], default=""), 0, text)


def _dense_experts(compiled: Compiled, module: Module) -> Iterator[Finding]:
    # XLA for CPU does the same, but a plan for CPU devices is not about speed.
    meant = grouped_flops(compiled.program) if compiled.is_described else {}

    def grouped(instruction: Instruction) -> int:
        is_grouped = is_kernel(instruction) and instruction.op_name.endswith(RAGGED_DOT)
        return kernel_cost(module, instruction).flops if is_grouped else 0

    for signal, flops in meant.items():
        done, share = _sums_by_line(module, signal, grouped), flops / compiled.mesh.size
        count = float(sum(done.values()))
        if share and count > REPEATED * share:
            text = (
                f"XLA multiplies all rows of jax.lax.ragged_dot by the matrices of all groups, {count / share:.1f} times the FLOPs "
                f"({count / 1e9:.3g} instead of {share / 1e9:.3g} GFLOP on each device). Call it in the function of jgt.signal.experts, "
                "where it runs as a grouped matmul, or use a batched matmul over groups of equal size"
            )
            # The first line belongs to the forward pass, whose line in the model is the useful one.
            yield _finding("dense-experts", signal, next(iter(done)), 0, text)


def _sums_by_line(module: Module, signal: str, measure: Callable[[Instruction], int]) -> dict[str, Fraction]:
    """The sum of a measure over a signal's instructions and their runs in a step, by the line of the program."""
    sums: dict[str, Fraction] = collections.defaultdict(Fraction)
    for name, runs in runs_per_step(module).items():
        # A fused matmul is in its own computation, which its fusion runs once.
        for instruction in module.computations[name].instructions.values():
            if (size := measure(instruction)) and signal_of(instruction.op_name) == signal:
                sums[module.source(instruction.text)] += size * runs
    return sums


def _unexplained(sent: Sequence[Collective], formulas: Sequence[Expected]) -> Iterator[Finding]:
    total = sum(c.total_bytes for c in sent)
    # Collectives are sorted by their bytes, so the signal with the largest one comes first.
    for signal in dict.fromkeys(c.signal for c in sent):
        own = [c for c in sent if c.signal == signal]
        explained: collections.Counter[tuple[str, ...]] = collections.Counter()
        for e in formulas:
            if e.signal == signal:
                explained[e.axes] += e.bytes
        num_bytes = sum(c.total_bytes for c in own)
        rest = num_bytes - explained.total()
        if rest <= _NOTABLE * total or num_bytes <= _UNEXPLAINED * explained.total():
            continue
        worst = _worst(own, explained)
        text = (
            f"sends {amount(num_bytes, 'B')} in a step, but the layout explains only {amount(explained.total(), 'B')}. Most of the rest "
            f"goes over {' + '.join(worst.axes) or 'no axis'}: {worst.kind} {worst.dtype}, {amount(worst.total_bytes, 'B')}, {worst.phase}"
            ". Name the tensor that is gathered or moved there, and give it a spec"
        )
        yield _finding("unexplained", signal, worst.source, rest, text)


def _worst(own: Sequence[Collective], explained: collections.Counter[tuple[str, ...]]) -> Collective:
    """The collective to blame: the largest one over the axes where the most bytes are unexplained."""
    sent: collections.Counter[tuple[str, ...]] = collections.Counter()
    for c in own:
        sent[c.axes] += c.total_bytes
    axes = max(sent, key=lambda a: sent[a] - explained[a])
    there = [c for c in own if c.axes == axes]
    # All-reduces are mostly explained by the layout, so kinds that only move data are blamed if they can make up half of the rest.
    moves = [c for c in there if c.kind in ("all-gather", "all-to-all", "collective-permute")]
    is_moved = 2 * sum(c.total_bytes for c in moves) > sent[axes] - explained[axes]
    return max(moves if is_moved else there, key=lambda c: (c.total_bytes, c.kind != "all-gather"))


def _unknown_loops(module: Module) -> Iterator[Finding]:
    # XLA copies loops, when it unrolls or peels those around them.
    for signal, source in dict.fromkeys((signal_of(loop.op_name), module.source(loop.text)) for loop in unknown_loops(module)):
        text = "the number of trips of this loop is unknown, so its work counts once. Use jax.lax.scan, or fori_loop with constant bounds"
        yield _finding("unknown-loop", signal, source, 0, text)
