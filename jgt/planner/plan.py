"""A plan: what XLA will do with a function on a mesh, signal by signal, before anything runs.

XLA decides which collectives it inserts, how much memory a step needs and in which order it runs. So a plan compiles the function from
shapes, for hardware that need not exist, and reads the compiled text. Every row carries a signal, because a signal is what a rule can
change.

Read `plan` first, then `read_plan`, which calls each part of this package once. Invariant: rows add up. The bytes of all signals are the
bytes of the whole program, and their times are the time of the step.
"""

from __future__ import annotations

import collections
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import cast

import jax

from jgt.command.console import axes_text
from jgt.planner.assumptions import assumptions, time_caveat, time_error
from jgt.planner.compiled import Compiled, compile_function
from jgt.planner.findings import Finding, findings
from jgt.planner.flops import flops
from jgt.planner.hardware.target import Target
from jgt.planner.hlo.collectives import Collective, collectives
from jgt.planner.hlo.origin import full_signal
from jgt.planner.hlo.rematerialization import Rematerialization, rematerializations
from jgt.planner.layouts import Parameter, parameters_of
from jgt.planner.memory import Memory, read_memory
from jgt.planner.needs.formulas import Expected, expected
from jgt.planner.needs.usage import usage_of
from jgt.planner.panels import Panel, panels
from jgt.planner.signals import SignalRow, located, signal_rows
from jgt.planner.speed import PipelineSchedule, Speed, Workload, speed_of
from jgt.planner.timeline import PARTS, Timeline
from jgt.rules import Rules
from jgt.sharding.checks import RulesLike, as_rules

VERSION = 1
"""The version of the JSON: the same number means the same keys with the same meaning. Keys may be added without another number."""
_DIGITS = 6
"""The significant digits of numbers in the JSON. A prediction has far fewer."""


@dataclass(frozen=True)
class Advice:
    """A key of a run that its caller advises to change.

    where: the file:line of the key, or of the section that would have it. saves_ms: time of the step; saves_bytes: bytes of the peak.
    """

    key: str
    where: str
    saves_ms: float
    saves_bytes: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One step of a compiled function on each device. Times are predictions; without a target they are None.

    hosts: the host of each device, in the mesh's order.
    flops_per_device: the matmul FLOPs of the traced program with recompute and pipeline bubbles.
    model_flops_per_device: the same without both.
    step_time_error: the error to expect, relative to the time; None if it is unknown.
    step_time_caveat: why the time means nothing; empty if it means something.
    parts_ms: the time by what it is spent on (`PARTS`); the parts add up to it.
    timeline: the step on the device and its links.
    advice: empty, until a caller that knows the function's settings adds some.
    expected: the bytes that the formulas predict.
    links_ms: the time of all collectives by mesh axes, hidden ones included.
    exposed_ms: the time of waiting for them.
    assumptions: sentences about how the plan counts.
    seconds: the time that planning took.
    """

    target: str
    versions: Mapping[str, str]
    devices: int
    mesh: Mapping[str, int]
    hosts: tuple[int, ...]
    memory: Memory
    flops_per_device: float
    model_flops_per_device: float
    step_time_ms: float | None
    step_time_error: float | None
    step_time_caveat: str
    parts_ms: Mapping[str, float]
    speed: Speed | None
    schedule: PipelineSchedule | None
    timeline: tuple[Panel, ...]
    collectives: tuple[Collective, ...]
    rematerializations: tuple[Rematerialization, ...]
    findings: tuple[Finding, ...]
    advice: tuple[Advice, ...] = ()
    signals: tuple[SignalRow, ...]
    parameters: tuple[Parameter, ...]
    expected: tuple[Expected, ...]
    links_ms: Mapping[str, float]
    exposed_ms: Mapping[str, float]
    assumptions: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        """The tables that `jgt plan` shows."""
        # By the name that the package gives it: a report is about plans.
        return getattr(importlib.import_module(__name__.rpartition(".")[0]), "Report")(self).text  # noqa: B009 - a module has no types of its names

    @property
    def warnings(self) -> list[str]:
        """The findings, a sentence each."""
        return [finding.text for finding in self.findings]

    @property
    def sent_bytes(self) -> int:
        """The bytes on the wire in a step, from one device."""
        return sum(c.total_bytes for c in self.collectives)

    def waiting_ms(self, some: Iterable[Collective]) -> float:
        """The milliseconds of waiting for some of the collectives: their share of the bytes over their axes."""
        total: collections.Counter[tuple[str, ...]] = collections.Counter()
        for c in self.collectives:
            total[c.axes] += c.total_bytes
        return sum(self.exposed_ms.get(axes_text(c.axes), 0.0) * c.total_bytes / (total[c.axes] or 1) for c in some)

    def advised(self, advice: Iterable[tuple[str, str, float, int, str]]) -> Plan:
        """The plan with advice, each piece by the fields of an `Advice`."""
        return replace(self, advice=tuple(Advice(*fields) for fields in advice))

    def to_json(self) -> dict[str, object]:
        """Plain values, for `json.dumps`: the fields, and the properties of the plan, its memory and its collectives."""
        memory = asdict(self.memory) | {"fits": self.memory.fits}
        rules = {row.signal: row.rule for row in self.signals}
        sent = [asdict(c) | {"total_bytes": c.total_bytes, "rule": rules.get(c.signal, "")} for c in self.collectives]
        values: dict[str, object] = {"version": VERSION, **asdict(self), "memory": memory, "collectives": sent, "warnings": self.warnings}
        # Two plans of the same program have the same JSON.
        del values["seconds"]
        return cast("dict[str, object]", _rounded(values))


def _rounded(value: object) -> object:
    if isinstance(value, float):
        # A whole number keeps its digits: FLOPs are compared exactly.
        return value if value.is_integer() else float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(child) for name, child in cast("Mapping[str, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_rounded(child) for child in cast("Sequence[object]", value)]
    return value


def plan(
    fn: Callable[..., object],
    *args: object,
    target: str | Target | None = None,
    rules: RulesLike | None = None,
    flags: Mapping[str, str] | None = None,
    workload: Workload | None = None,
) -> Plan:
    """Plans `fn(*args)`: its collectives, memory, FLOPs and time, by signal.

        print(jgt.plan(jax.value_and_grad(jgt.shard(loss, rules, mesh)), params, batch))

    args: arrays or ShapeDtypeStructs, none of which is allocated or moved; the first contains parameters and optimizer state. Shardings are
    read from jax.jit around `fn`, or else from the arguments.
    target: `h100:8x8` is 8 hosts of 8 GPUs, and needs the extra jgt[plan-gpu]; None plans for JAX's own devices.
    rules: the rules that `fn` was sharded by, to name their lines beside the costs.
    flags: XLA's flags by name, such as those that the run will have.
    workload: what the program does not contain, such as the tokens of a step.

    Raises InputError if the target is unknown, or if its devices and the mesh do not fit.
    """
    known = None if rules is None else as_rules(rules)
    return read_plan(compile_function(fn, args, Target.parse(target) if isinstance(target, str) else target, flags), known, workload)


def read_plan(compiled: Compiled, rules: Rules | None = None, workload: Workload | None = None) -> Plan:
    """Reads the plan of a compiled function."""
    work = workload or Workload()
    module, mesh, num_devices, target = compiled.module, dict(compiled.mesh.shape), compiled.mesh.size, compiled.target
    hosts = tuple(device.process_index for device in compiled.mesh.devices.flat)
    # Without a target nothing is known of the links between the devices.
    timeline = Timeline(module, mesh, num_devices, None if target is None else target.network(hosts))
    walk = timeline.step(compiled.memory.temp_size_in_bytes)
    traced = flops(compiled.program)
    params = parameters_of(compiled, num_devices)
    # A forward pass alone has no gradients, although its parameters have a layout for them.
    is_trained = any(row.phase == "backward" for row in traced)
    memory = read_memory(compiled, module, params, has_gradients=is_trained)
    schedule = work.schedule(mesh)
    where = None if schedule is None else schedule.where
    usage = usage_of(compiled, params)
    formulas = expected(params, usage)
    sent = located(collectives(module, mesh, num_devices), params, where or "", usage.summed)
    rows = tuple(signal_rows(params, memory, sent, walk, traced, num_devices, rules, where, timed=target is not None))
    remats = rematerializations(compiled.lines, module)
    names = {row.signal for row in rows}
    # The counts are of all devices together, and each device has its share.
    executed = sum(row.executed for row in traced) / num_devices
    useful = sum(row.useful for row in traced if row.phase != "recompute") / num_devices
    return Plan(
        target="cpu" if target is None else target.text,
        versions={"jax": jax.__version__, "jaxlib": metadata.version("jaxlib")},
        devices=num_devices,
        mesh=mesh,
        hosts=hosts,
        memory=memory,
        flops_per_device=executed,
        model_flops_per_device=useful,
        step_time_ms=None if target is None else walk.seconds * 1e3,
        step_time_error=time_error(target, module, memory),
        step_time_caveat=time_caveat(memory),
        parts_ms={part: walk.parts[part] * 1e3 for part in PARTS if walk.parts[part]},
        speed=None if target is None or not walk.seconds else speed_of(work, target, useful, walk.seconds),
        schedule=schedule,
        timeline=tuple(panels(module.entry, timeline.tracks, lambda signal: full_signal(signal, names))),
        collectives=sent,
        rematerializations=remats,
        findings=tuple(findings(compiled, module, memory, params, sent, formulas, rows, remats)),
        signals=rows,
        parameters=params,
        expected=formulas,
        links_ms={axes_text(axes): seconds * 1e3 for axes, seconds in walk.links.items()},
        exposed_ms={axes_text(axes): seconds * 1e3 for axes, seconds in walk.exposed.items()},
        assumptions=tuple(assumptions(compiled, module, mesh, sent)),
        seconds=compiled.seconds,
    )
