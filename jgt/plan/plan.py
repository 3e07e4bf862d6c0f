"""A plan: what XLA will do with a function on a mesh, told signal by signal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import jax

from jgt.plan.chip import Target, parse_target
from jgt.plan.collectives import Collective, collectives
from jgt.plan.compiled import Argument, Compiled, compile_function
from jgt.plan.findings import Facts, Finding, findings
from jgt.plan.flops import flops
from jgt.plan.formulas import Expected, expected
from jgt.plan.memory import Memory, host_temp, read_memory
from jgt.plan.network import Network
from jgt.plan.parameters import Parameter, parameters_of
from jgt.plan.rematerialization import Rematerialization, rematerializations
from jgt.plan.signals import SignalRow, signal_rows
from jgt.plan.timeline import Timeline
from jgt.plan.units import axes_text
from jgt.rules import Rules


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one step of a compiled function does on each device. Times are predictions, None without a target.

    flops_per_device: executed matmul FLOPs of the traced program, recompute and pipeline bubbles included; model_flops_per_device:
    without both. links_ms: time of all collectives by mesh axes, hidden ones included; exposed_ms: of waiting for them.
    """

    target: str
    versions: Mapping[str, str]
    devices: int
    mesh: Mapping[str, int]
    memory: Memory
    flops_per_device: float
    model_flops_per_device: float
    step_time_ms: float | None
    collectives: tuple[Collective, ...]
    rematerializations: tuple[Rematerialization, ...]
    findings: tuple[Finding, ...]
    signals: tuple[SignalRow, ...]
    parameters: tuple[Parameter, ...]
    expected: tuple[Expected, ...]
    links_ms: Mapping[str, float]
    exposed_ms: Mapping[str, float]
    assumptions: tuple[str, ...]
    seconds: float

    @property
    def warnings(self) -> list[str]:
        """What was found, a sentence each."""
        return [finding.text for finding in self.findings]

    @property
    def sent_bytes(self) -> int:
        """What one device sends in a step."""
        return sum(c.total_bytes for c in self.collectives)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dumps`."""
        memory = asdict(self.memory) | {"fits": self.memory.fits}
        rows = [asdict(c) | {"axes": list(c.axes), "total_bytes": c.total_bytes} for c in self.collectives]
        return {
            "target": self.target,
            "versions": dict(self.versions),
            "devices": self.devices,
            "mesh": dict(self.mesh),
            "memory": memory,
            "flops_per_device": self.flops_per_device,
            "model_flops_per_device": self.model_flops_per_device,
            "step_time_ms": self.step_time_ms,
            "collectives": rows,
            "rematerializations": [asdict(r) for r in self.rematerializations],
            "warnings": self.warnings,
            "findings": [asdict(f) for f in self.findings],
            "signals": [asdict(s) for s in self.signals],
            "parameters": [asdict(p) for p in self.parameters],
            "expected": [asdict(e) | {"axes": list(e.axes)} for e in self.expected],
            "links_ms": dict(self.links_ms),
            "exposed_ms": dict(self.exposed_ms),
            "assumptions": list(self.assumptions),
        }


def plan(fn: Callable[..., Any], *args: Any, target: str | Target | None = None, rules: Rules | None = None) -> Plan:
    """What XLA will do with `fn(*args)`: its collectives, memory, FLOPs and time, by signal.

    args: arrays or ShapeDtypeStructs, none of which is allocated or moved; the first one holds parameters and optimizer state.
    Shardings are those of jax.jit around `fn`, or the arguments' own. target: `h100:8x8`, 8 hosts of 8 GPUs, which needs the
    extra jgt[plan-gpu]; None: the devices that JAX has. rules: those that `fn` was sharded by, so that costs name their lines.
    Raises InputError.
    """
    where = parse_target(target) if isinstance(target, str) else target
    return read(compile_function(fn, args, where), rules)


def read(compiled: Compiled, rules: Rules | None = None) -> Plan:
    """A plan from a compiled function."""
    module, mesh = compiled.module, dict(compiled.mesh.shape)
    num_devices = compiled.mesh.size
    network = None if compiled.target is None else Network(target=compiled.target, hosts=[d.process_index for d in compiled.mesh.devices.flat])
    found = collectives(module, mesh, num_devices)
    walk = Timeline(module, mesh, num_devices, network).step()
    traced = flops(compiled.program)
    state = [a for a in compiled.arguments if a.position == 0]
    inputs = [a for a in compiled.arguments if a.position != 0]
    params = parameters_of(compiled.program, state, num_devices)
    is_trained = any(row.phase == "backward" for row in traced)
    memory = read_memory(compiled, module, _groups(params, state, inputs), sum(p.gradient_bytes for p in params) if is_trained else 0)
    asked = expected(compiled, params)
    rows = tuple(signal_rows(params, memory, found, walk, traced, num_devices, rules, timed=network is not None))
    remats = rematerializations(compiled.lines, module)
    facts = Facts(
        compiled=compiled, module=module, parameters=params, signals=rows, collectives=found, expected=asked, rematerializations=remats, memory=memory
    )
    return Plan(
        target="cpu" if compiled.target is None else compiled.target.text,
        versions={"jax": jax.__version__, "jaxlib": metadata.version("jaxlib")},
        devices=num_devices,
        mesh=mesh,
        memory=memory,
        flops_per_device=sum(row.executed for row in traced) / num_devices,
        model_flops_per_device=sum(row.useful for row in traced if row.phase != "recompute") / num_devices,
        step_time_ms=None if network is None else walk.seconds * 1e3,
        collectives=found,
        rematerializations=remats,
        findings=tuple(findings(facts)),
        signals=rows,
        parameters=params,
        expected=asked,
        links_ms={axes_text(axes): seconds * 1e3 for axes, seconds in walk.links.items()},
        exposed_ms={axes_text(axes): seconds * 1e3 for axes, seconds in walk.exposed.items()},
        assumptions=tuple(_assumptions(compiled)),
        seconds=compiled.seconds,
    )


def _groups(params: Sequence[Parameter], state: Sequence[Argument], inputs: Sequence[Argument]) -> dict[str, list[Argument]]:
    names = {p.path for p in params}
    found = {
        "parameters": [a for a in state if a.path in names],
        "optimizer state": [a for a in state if a.path not in names],
        "inputs": list(inputs),
    }
    return {name: group for name, group in found.items() if group}


def _assumptions(compiled: Compiled) -> Iterator[str]:
    yield "FLOPs: 2 a multiply-add, of matmuls and convolutions; attention's scores in full, causal or not, but half of a causal one with cuDNN's kernel"
    yield "bytes sent: one device's, of ring algorithms; branches count as taken, a pipeline's as often as its table takes them"
    if compiled.target is None:
        yield "compiled for CPU: bf16 collectives travel as f32 and no reduce-scatter is formed, so bytes are CPU's; kinds and axes are those of any target"
        return
    chip = compiled.target.chip
    yield (
        f"{chip.name}: {chip.tflops['bf16']:g} TFLOP/s bf16, of which matmuls reach {chip.efficiency.matmul:.0%}; HBM {chip.hbm_gb:g} GB at {chip.hbm_gbs:g} GB/s "
        f"({chip.efficiency.hbm:.0%}); NVLink {chip.nvlink_gbs:g} and network {chip.nic_gbs:g} GB/s a GPU and direction ({chip.efficiency.link:.0%})"
    )
    yield "time: each kernel the longer of its FLOPs and its bytes, collectives beside what XLA scheduled meanwhile; a prediction, not a measurement"
    if any(a.is_on_host for a in compiled.arguments) or host_temp(compiled.memory):
        yield "what moves between the host's memory and the device's is counted in bytes and costs no time here"
