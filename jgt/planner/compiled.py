"""A function compiled from shapes alone: its trace, XLA's text and memory figures, and XLA's warnings.

The mesh may be abstract, or have other devices: the traced program is moved onto the devices of the target, which need not exist
(`described`). XLA's warnings are collected: it writes them straight to file descriptor 2, and no API returns them.

Invariant: planning leaves no traces. File descriptor 2 and JAX's configuration are restored, whatever happens, and nothing is put into
JAX's persistent compilation cache.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jgt.document import InputError
from jgt.mesh.mesh import make_mesh
from jgt.planner.described import HOST, described_device, devices_of, keep_on_host
from jgt.planner.hardware.chip import chip_of
from jgt.planner.hardware.target import MemoryStats, Target
from jgt.planner.hlo.text import Module
from jgt.planner.options import compile_with
from jgt.program.dataflow import live
from jgt.program.jaxpr import Program
from jgt.program.places import no_mesh_set
from jgt.program.retarget import jit_call_of, meshes_in, replace_mesh
from jgt.program.tracing import evaluate, trace
from jgt.sharding.inputs import path_text
from jgt.sharding.partitioner import Avoided, avoided_faults

_WITHOUT_GPU = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": "false"}
"""Autotuning runs candidate kernels on the GPU, and here there may be none. Triton's matmuls need it to choose their tiles."""


@contextlib.contextmanager
def captured_stderr() -> Generator[list[str]]:
    """Collects the lines that anything writes to file descriptor 2. If the block fails, they are written to stderr after all."""
    lines: list[str] = []
    # XLA is C++ in this process and writes to the descriptor itself, so replacing `sys.stderr` would not catch it. Descriptor 2
    # therefore points to a file for the time of the block. This affects all threads of the process.
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        original = os.dup(2)
        os.dup2(file.fileno(), 2)
        failed = True
        try:
            yield lines
            failed = False
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            os.close(original)
            file.seek(0)
            text = file.read().decode("utf-8", "replace")
            lines += text.splitlines()
            if failed:
                sys.stderr.write(text)


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An array that a function takes. position: the number of the argument that contains it; path: the array's path in that argument."""

    position: int
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding | None
    is_on_host: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def local_bytes(self) -> int:
        """Bytes on one device."""
        shape = self.shape if self.sharding is None else self.sharding.shard_shape(self.shape)
        return int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A function as JAX traced it and XLA compiled it.

    target: the hardware that it was compiled for; None for CPUs and for chips without a description. flags: XLA's flags of this
    compilation; refused: those that XLA does not take as options of one. program: the traced program, without what nobody reads; text:
    the compiled one. lines: the lines that XLA wrote to stderr. avoided: operations that XLA would have computed wrongly. seconds: the
    time of all this.
    """

    target: Target | None
    flags: Mapping[str, str]
    refused: Mapping[str, str]
    mesh: Mesh
    program: Program
    arguments: tuple[Argument, ...]
    text: str
    memory: MemoryStats
    lines: tuple[str, ...]
    avoided: tuple[Avoided, ...]
    seconds: float

    @property
    def is_described(self) -> bool:
        """Whether it was compiled for a description of devices, and not for JAX's own."""
        return self.target is not None and self.target.is_described

    @property
    def module(self) -> Module:
        """The compiled program, parsed; each call parses the text."""
        return Module.parse(self.text)


def compile_function(
    fn: Callable[..., object], args: Sequence[object], target: Target | None, flags: Mapping[str, str] | None = None
) -> Compiled:
    """Traces, lowers and compiles `fn(*args)` for a target, or for JAX's own devices.

    args: arrays, ShapeDtypeStructs or numbers; nothing is allocated. flags: XLA's flags by name, in addition to XLA_FLAGS. A sharding that
    jax.jit around `fn` gives to an argument precedes the sharding of the argument itself. Raises InputError if devices and mesh do not
    fit, or if there is more than one mesh.
    """
    started = time.perf_counter()
    is_described = target is not None and target.is_described
    leaves = cast("list[tuple[tuple[Any, ...], object]]", jax.tree.leaves_with_path(tuple(args)))
    shapes = jax.tree.map(_shape, tuple(args))
    with described_device(target) if target is not None and target.is_described else contextlib.nullcontext():
        traced, _ = trace(fn, *shapes)
    # A function under jax.jit is traced as one call, which carries its shardings and donations.
    call = jit_call_of(traced)
    ins = [of_jit or _sharding(x) for of_jit, (_, x) in zip(call.in_shardings, leaves, strict=True)]
    mesh = _mesh([*ins, *call.out_shardings], call.program, target)
    # A described device has no kinds of memory, so a NamedSharding on it forgets its own. Note before which arrays are on the host.
    ins_on_host, outs_on_host = ([s is not None and s.memory_kind == HOST for s in some] for some in (ins, call.out_shardings))
    ins, outs = (
        [None if s is None else NamedSharding(mesh, s.spec, memory_kind=s.memory_kind) for s in some] for some in (ins, call.out_shardings)
    )
    jitted = _under_jit(replace_mesh(call.program, mesh), mesh, ins, outs, call.donated)
    options = {**(flags or {}), **(_WITHOUT_GPU if is_described else {})}
    # The mesh that is set around names other devices than those of a target.
    with no_mesh_set(), _uncached(), avoided_faults() as avoided, captured_stderr() as lines:
        lowered = jitted.lower(*(_typed(x, s) for x, s in zip(jax.tree.leaves(shapes), ins, strict=True)))
        if is_described:
            keep_on_host(lowered, ins_on_host, outs_on_host)
        compiled, refused = compile_with(lowered, options)
    stats = compiled.memory_analysis()
    # Only backends without memory figures return None, and XLA for CPU and for GPU has them.
    assert stats is not None
    arguments = tuple(
        Argument(position=path[0].idx, path=path_text(path[1:]), shape=x.shape, dtype=_plain_type(x.dtype), sharding=s, is_on_host=h)
        for (path, _), x, s, h in zip(leaves, jax.tree.leaves(shapes), ins, ins_on_host, strict=True)
    )
    return Compiled(
        target=target or _target_of(mesh),
        flags={name: value for name, value in (flags or {}).items() if name not in refused},
        refused={name: value for name, value in options.items() if name in refused},
        mesh=mesh,
        program=live(call.program),
        arguments=arguments,
        text=compiled.as_text() or "",
        memory=stats,
        lines=tuple(lines),
        avoided=tuple(dict.fromkeys(avoided)),
        seconds=time.perf_counter() - started,
    )


def _under_jit(
    program: Program, mesh: Mesh, ins: Sequence[NamedSharding | None], outs: Sequence[NamedSharding | None], donated: Sequence[bool]
) -> Any:
    """A program under jax.jit with these shardings of its arguments and results. donated: whether each argument is."""

    def run(*arrays: jax.Array) -> object:
        return evaluate(program, arrays)

    # A name that no other function has: a program from a cache would be compiled without any of XLA's warnings.
    run.__name__ = f"plan_{uuid.uuid4().hex}"
    # An argument without a sharding is whole on every device. The layout of a result without one is left to XLA.
    return jax.jit(
        run,
        in_shardings=tuple(NamedSharding(mesh, jax.P()) if s is None else s for s in ins),
        out_shardings=outs,
        donate_argnums=tuple(i for i, d in enumerate(donated) if d),
    )


@contextlib.contextmanager
def _uncached() -> Generator[None]:
    """Keeps programs out of JAX's persistent cache: under their unique names, they would never be found there again."""
    before = cast("float", jax.config.values["jax_persistent_cache_min_compile_time_secs"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def _target_of(mesh: Mesh) -> Target | None:
    chip = chip_of(mesh.devices.flat[0].device_kind)
    if chip is None:
        return None
    # JAX runs one process on each host.
    num_hosts = len({d.process_index for d in mesh.devices.flat})
    return Target(chip=chip, text=chip.name, num_hosts=num_hosts, per_host=mesh.size // num_hosts)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and type of an argument, which may be a plain number. On Explicit axes its layout is a part of the type."""
    if not hasattr(x, "dtype"):
        return jax.ShapeDtypeStruct((), jnp.result_type(x))
    return _typed(x, _sharding(x))


def _typed(x: Any, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    is_typed = sharding is not None and sharding.mesh.abstract_mesh.explicit_axes
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if is_typed else None)


def _plain_type(dtype: np.dtype) -> np.dtype:
    """numpy's type; for a random key, the type of its bits."""
    return np.dtype(np.uint64) if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)


def _sharding(x: object) -> NamedSharding | None:
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _mesh(shardings: Sequence[NamedSharding | None], program: Program, target: Target | None) -> Mesh:
    """The mesh that a program names, on the devices of the target, or on JAX's own."""
    named = [s.mesh for s in shardings if s is not None and s.mesh.axis_names] + list(meshes_in(program))
    # Inside a shard_map some axes are manual, but it is the same mesh. So sizes are compared, not meshes.
    sizes = {tuple(mesh.shape.items()) for mesh in named}
    if len(sizes) > 1:
        shown = " and ".join(sorted(str(dict(s)) for s in sizes))
        raise InputError([f"plan: the function names {len(sizes)} meshes: {shown}. A plan can have only one"])
    concrete = next((mesh for mesh in named if isinstance(mesh, Mesh)), None)
    # A function that names no mesh runs on one device.
    axes = dict(sizes.pop()) if sizes else {"device": 1}
    count = math.prod(axes.values())
    if target is not None and count != target.num_devices:
        shown = " x ".join(f"{axis}={size}" for axis, size in axes.items()) if named else "of a function without shardings"
        raise InputError([f"target {target.text} has {target.num_devices} devices, but the mesh {shown} has {count}. Make them equal"])
    if target is not None and target.is_described:
        # The function may have been sharded for described devices, or for real ones of the same chip.
        if concrete is not None and concrete.devices.flat[0].device_kind == target.chip.name:
            return concrete
        made = make_mesh(axes, devices=devices_of(target))
        # Types of values name the kinds of the axes.
        return made if concrete is None else Mesh(made.devices, made.axis_names, axis_types=concrete.axis_types)
    return make_mesh(axes, devices=_first_devices(count)) if concrete is None else concrete


def _first_devices(count: int) -> Sequence[Any]:
    devices = cast("Sequence[Any]", jax.devices())
    if len(devices) < count:
        remedy = f'jax.config.update("jax_num_cpu_devices", {count}), or plan for a target'
        raise InputError([f"plan: the mesh has {count} devices, but JAX has {len(devices)}. Give it more before it starts: {remedy}"])
    return devices[:count]
