"""Findings: what a person should look at in a plan, each with its signal, its line, its numbers, and what to change.

A plan has hundreds of rows, and a mistake in the rules looks like any other row: bytes that are sent, FLOPs that are computed. So each kind
of finding compares two independent counts of one thing, or reads a warning that is easily lost. Memory is compared with the target's. The
FLOPs of the compiled program are compared with a device's share of the traced program's: more means that devices repeat work. The bytes
that are sent are compared with the formulas: more means that XLA moves a tensor between two layouts. Constraints are compared with shapes.
And XLA itself warns, on stderr only and without a line of the program, when it can change a layout only by making a tensor whole on every
device (an involuntary full rematerialization).

Invariant: the runs that ship have no findings. The margins below are chosen so; a finding that is mostly noise would hide the others.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from jgt.console import size_text
from jgt.hardware.chip import is_described
from jgt.hlo.collectives import Collective
from jgt.hlo.graph import runs_per_step
from jgt.hlo.kernels import is_kernel, kernel_cost
from jgt.hlo.origin import NONE, origin_of
from jgt.hlo.text import Module
from jgt.hlo.trips import unknown_loops
from jgt.planner.compiled import Compiled
from jgt.planner.flops import RAGGED_DOT, grouped_flops
from jgt.planner.formulas import Expected
from jgt.planner.layouts import Parameter, constraints
from jgt.planner.memory import USABLE, Memory
from jgt.planner.signals import SignalRow

FindingKind = Literal[
    "memory",
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

_WARNING = "Involuntary full rematerialization"
_PARTS = re.compile(
    r"cannot go from sharding (\{.*?\}) to (\{.*?\}) efficiently for HLO operation %?[\w.\-]+ = (\S+) .*?metadata=\{(.*?)\}"
)
"""The warning's text, from xla/service/spmd/spmd_partitioner.cc."""
_OP_NAME = re.compile(r'op_name="([^"]*)"')


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
    name = _OP_NAME.search(metadata)
    origin = origin_of(name[1]) if name else None
    signal = origin.signal if origin else NONE
    return Rematerialization(signal=signal, source=module.source(metadata), shape=shape, before=before, after=after)


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
    misfits = [*_rematerialized(remats), *_indivisible(compiled)]
    # The bytes that a misfit causes are unexplained too, but one finding is enough for one mistake.
    covered = {finding.signal for finding in misfits}
    unexplained = [finding for finding in _unexplained(sent, formulas) if finding.signal not in covered]
    dense = list(_dense_experts(compiled, module))
    # Work that a dense ragged_dot does in vain is not repeated by other devices.
    repeated = [finding for finding in _repeated(rows, module) if finding.signal not in {other.signal for other in dense}]
    shards = [*_replicated(params, compiled.mesh.size), *dense, *repeated]
    rules = {row.signal: row.rule for row in rows}
    for finding in (
        *_too_much_memory(memory),
        *_avoided(compiled, sent),
        *misfits,
        *shards,
        *unexplained,
        *_unknown_loops(module),
    ):
        rule = finding.rule or rules.get(finding.signal, "")
        # Functions that were not sharded by rules have findings too.
        yield replace(finding, rule=rule, text=f"{finding.text} (rule: {rule})") if rule else finding


def _finding(kind: FindingKind, signal: str, source: str, num_bytes: int, text: str) -> Finding:
    where = f"{source}: " if source else ""
    return Finding(kind=kind, signal=signal, source=source, rule="", bytes=num_bytes, text=f"{where}{signal}: {text}")


def _too_much_memory(memory: Memory) -> Iterator[Finding]:
    if memory.fits is False and memory.hbm_bytes is not None:
        usable = round(USABLE * memory.hbm_bytes)
        text = (
            f"the step needs {size_text(memory.peak_bytes)} on each device, {size_text(memory.args_bytes)} of it for arguments, but only "
            f"{size_text(usable)} are usable. Shard more, recompute more (train.remat), or make the batch of one step smaller. "
            "The predicted time has no meaning: XLA schedules a step that does not fit without running collectives beside kernels"
        )
        yield _finding("memory", "memory", "", memory.peak_bytes - usable, text)


def _avoided(compiled: Compiled, sent: Sequence[Collective]) -> Iterator[Finding]:
    # A layer that occurs several times has each of its matmuls once here.
    for avoided in {(a.line, a.before): a for a in compiled.avoided}.values():
        signal, kind = _signal_of(avoided.name), avoided.name.rpartition("/")[2]
        sends = sum(c.total_bytes for c in sent if c.source and avoided.line.endswith(c.source) and c.signal == signal)
        text = (
            f"XLA computes a {kind} wrongly with layouts such as {avoided.before}, so jgt gives it {avoided.after}. This line sends "
            f"{size_text(sends)} in a step. Specs by which each axis splits only one dim of the {kind} need no such help"
        )
        yield _finding("avoided", signal, avoided.line, sends, text)


def _rematerialized(found: Sequence[Rematerialization]) -> Iterator[Finding]:
    for remat in found:
        layouts = f" to go from {remat.before} to {remat.after}" if remat.before else ""
        text = f"XLA makes the tensor {remat.shape} whole on every device{layouts}. Use the same order of axes on both sides"
        yield _finding("rematerialization", remat.signal, remat.source, 0, text)


def _indivisible(compiled: Compiled) -> Iterator[Finding]:
    sizes = dict(compiled.mesh.shape)
    # Each constraint once: it appears in the forward pass, and again in the recompute.
    for constraint in dict.fromkeys(constraints(compiled.program)):
        for dim, axes in constraint.misfits:
            size = constraint.shape[dim]
            # A vocabulary that is a few rows short of a multiple is padded by these, which costs nothing that is worth a line.
            if -size % math.prod(sizes[axis] for axis in axes) <= _PADDED * size:
                continue
            over = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
            text = (
                f"dim {dim} of a tensor {list(constraint.shape)} has size {size}, which {over} does not divide, so XLA "
                f"pads it or makes it whole ({size_text(constraint.local_bytes)}). Change the spec {constraint.spec}"
            )
            yield _finding("indivisible", constraint.signal, constraint.source, constraint.local_bytes, text)


def _replicated(params: Sequence[Parameter], num_devices: int) -> Iterator[Finding]:
    total = sum(p.local_bytes for p in params)
    # Where every parameter is replicated, in whole or in part, that is the plan: data parallelism.
    if num_devices == 1 or sum(p.copies > 1 for p in params) == len(params):
        return
    for p in params:
        if p.copies == num_devices and p.local_bytes > _FORGOTTEN * total:
            text = (
                f"the parameter {p.path} {list(p.shape)} is whole on all {num_devices} devices: {size_text(p.local_bytes)} each, "
                f"{p.local_bytes / total:.0%} of all parameters there. Give it a spec under params:"
            )
            yield _finding("replicated", p.signals[0] if p.signals else NONE, p.source, p.local_bytes, text)


def _repeated(rows: Sequence[SignalRow], module: Module) -> Iterator[Finding]:
    total = sum(row.flops for row in rows)
    for row in rows:
        if row.flops_share and row.flops > REPEATED * row.flops_share and row.flops - row.flops_share > _NOTABLE * total / 2:
            text = (
                f"each device computes {row.flops / row.flops_share:.1f} times its share of the FLOPs ({row.flops / 1e9:.3g} instead of "
                f"{row.flops_share / 1e9:.3g} GFLOP), so several devices repeat the same work. Name a tensor there and shard it over the "
                "axis that is missing"
            )
            yield _finding("computed-alike", row.signal, _largest_dot(module, row.signal), 0, text)


def _dense_experts(compiled: Compiled, module: Module) -> Iterator[Finding]:
    # XLA for CPU does the same, but a plan for CPU devices is not about speed.
    meant = grouped_flops(compiled.program) if is_described(compiled.target) else {}
    sources: dict[str, str] = {}
    done: dict[str, Fraction] = collections.defaultdict(Fraction)
    for name, runs in runs_per_step(module).items() if meant else ():
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            if is_kernel(instruction) and instruction.op_name.endswith(RAGGED_DOT):
                count = runs * kernel_cost(module, computation, instruction).flops
                origin = origin_of(instruction.op_name)
                signal = origin.signal if origin else NONE
                done[signal] += count
                # The first one belongs to the forward pass, whose line in the model is the useful one.
                sources.setdefault(signal, module.source(instruction.text))
    for signal, count in done.items():
        share = meant.get(signal, 0.0) / compiled.mesh.size
        if share and count > REPEATED * share:
            text = (
                f"XLA multiplies all rows of jax.lax.ragged_dot by the matrices of all groups, {float(count) / share:.1f} times the FLOPs "
                f"({float(count) / 1e9:.3g} instead of {share / 1e9:.3g} GFLOP on each device). Call it in the function of "
                "jgt.signal.experts, where it runs as a grouped matmul, or use a batched matmul over groups of equal size"
            )
            yield _finding("dense-experts", signal, sources[signal], 0, text)


def _largest_dot(module: Module, signal: str) -> str:
    """The line of a signal's matmul with the largest results, all its runs together."""
    sizes: dict[str, Fraction] = collections.defaultdict(Fraction)
    for name, count in runs_per_step(module).items():
        # A fused matmul is in a computation of its own, which its fusion runs once.
        for instruction in module.computations[name].instructions.values():
            origin = origin_of(instruction.op_name) if instruction.op == "dot" else None
            if origin and origin.signal == signal:
                sizes[module.source(instruction.text)] += instruction.num_bytes * count
    return max(sizes, key=lambda line: sizes[line], default="")


def _unexplained(sent: Sequence[Collective], formulas: Sequence[Expected]) -> Iterator[Finding]:
    """Signals that send notably more than the formulas say."""
    total = sum(c.total_bytes for c in sent)
    # Collectives are sorted by their bytes, so the signal with the largest one comes first.
    for signal in dict.fromkeys(c.signal for c in sent):
        found = [c for c in sent if c.signal == signal]
        explained: collections.Counter[tuple[str, ...]] = collections.Counter()
        for e in formulas:
            if e.signal == signal:
                explained[e.axes] += e.bytes
        num_bytes = sum(c.total_bytes for c in found)
        rest = num_bytes - explained.total()
        if rest <= _NOTABLE * total or num_bytes <= _UNEXPLAINED * explained.total():
            continue
        worst = _worst(found, explained)
        text = (
            f"sends {size_text(num_bytes)} in a step, but the layout explains only {size_text(explained.total())}. Most of the rest goes "
            f"over {' + '.join(worst.axes) or 'no axis'}: {worst.kind} {worst.dtype}, {size_text(worst.total_bytes)}, {worst.phase}. Name "
            "the tensor that is gathered or moved there, and give it a spec"
        )
        yield _finding("unexplained", signal, worst.source, rest, text)


def _worst(found: Sequence[Collective], explained: collections.Counter[tuple[str, ...]]) -> Collective:
    """The collective to blame: the largest one over the axes where the most bytes are unexplained."""
    sent: collections.Counter[tuple[str, ...]] = collections.Counter()
    for c in found:
        sent[c.axes] += c.total_bytes
    axes = max(sent, key=lambda a: sent[a] - explained[a])
    there = [c for c in found if c.axes == axes]
    # All-reduces are mostly explained by the layout, so kinds that only move data are blamed if they can make up half of the rest.
    moves = [c for c in there if c.kind in ("all-gather", "all-to-all", "collective-permute")]
    is_moved = 2 * sum(c.total_bytes for c in moves) > sent[axes] - explained[axes]
    return max(moves if is_moved else there, key=lambda c: (c.total_bytes, c.kind != "all-gather"))


def _unknown_loops(module: Module) -> Iterator[Finding]:
    # XLA copies loops, when it unrolls or peels those around them.
    for signal, source in dict.fromkeys((_signal_of(loop.op_name), module.source(loop.text)) for loop in unknown_loops(module)):
        text = "the number of trips of this loop is unknown, so its work counts once. Use jax.lax.scan, or fori_loop with constant bounds"
        yield _finding("unknown-loop", signal, source, 0, text)


def _signal_of(op_name: str) -> str:
    origin = origin_of(op_name)
    return origin.signal if origin else NONE
