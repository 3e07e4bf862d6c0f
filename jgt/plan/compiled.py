"""A function compiled for devices that need not be here, from shapes alone: its trace, its text, its memory."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jgt import jaxpr as jx
from jgt.document import InputError
from jgt.jaxpr import Program
from jgt.mesh.mesh import make_mesh
from jgt.placement import path_text
from jgt.plan.chip import Target, chip_of
from jgt.plan.cudnn import described
from jgt.plan.hlo import Module
from jgt.plan.host import HOST, keep_on_host
from jgt.plan.stderr import captured
from jgt.plan.topology import devices_of


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An array that a function takes: which of its arguments it is in, its path there, what one device has of it, and where.

    is_on_host: it is kept in the host's memory.
    """

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
    """What JAX and XLA made of a function.

    target: what it was compiled for, None for CPU devices and for chips that are not described. memory: JAX's CompiledMemoryStats;
    lines: what XLA said meanwhile.
    """

    target: Target | None
    mesh: Mesh
    program: Program
    arguments: tuple[Argument, ...]
    text: str
    memory: Any
    lines: tuple[str, ...]
    seconds: float

    @property
    def module(self) -> Module:
        """The compiled program, read."""
        return Module.of(self.text)


def compile_function(fn: Callable[..., Any], args: Sequence[Any], target: Target | None) -> Compiled:
    """Traces, lowers and compiles `fn(*args)` for a target, or for the CPU devices at hand.

    args: arrays, ShapeDtypeStructs or numbers; nothing is allocated. Shardings are those of jax.jit around `fn`, or of the arguments. Raises
    InputError where devices and mesh do not fit.
    """
    started = time.perf_counter()
    leaves = jax.tree.leaves_with_path(tuple(args))
    shapes = jax.tree.map(_shape, tuple(args))
    with contextlib.nullcontext() if target is None else described():
        whole = jax.make_jaxpr(fn)(*shapes)
    call = jx.jitted(whole)
    given = [_sharding(x) for _, x in leaves]
    ins = [own or other for own, other in zip(call.in_shardings, given, strict=True)]
    mesh = _mesh([*ins, *call.out_shardings], call.program, target)
    program = jx.onto_mesh(call.program, mesh)
    # A device that is only described knows no kinds of memory, and forgets those of a sharding.
    on_host, back_on_host = ([s is not None and s.memory_kind == HOST for s in found] for found in (ins, call.out_shardings))
    ins, outs = ([None if s is None else NamedSharding(mesh, s.spec, memory_kind=s.memory_kind) for s in found] for found in (ins, call.out_shardings))
    whole_spec = NamedSharding(mesh, jax.P())
    jitted = jax.jit(
        _named(lambda *arrays: jx.evaluate(program, arrays)),
        in_shardings=tuple(whole_spec if s is None else s for s in ins),
        out_shardings=outs,
        donate_argnums=tuple(i for i, d in enumerate(call.donated) if d),
    )
    # Autotuning would need the GPU.
    options: dict[str, str | bool] | None = None if target is None else {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}
    with _uncached(), captured() as lines:
        lowered = jitted.lower(*jax.tree.leaves(shapes))
        if target is not None:
            keep_on_host(lowered, on_host, back_on_host)
        compiled = lowered.compile(compiler_options=options)
    arguments = tuple(
        Argument(position=path[0].idx, path=path_text(path[1:]), shape=x.shape, dtype=_plain_type(x.dtype), sharding=s, is_on_host=h)
        for (path, _), x, s, h in zip(leaves, jax.tree.leaves(shapes), ins, on_host, strict=True)
    )
    return Compiled(
        target=target or _described(mesh),
        mesh=mesh,
        program=call.program,
        arguments=arguments,
        text=compiled.as_text() or "",
        memory=compiled.memory_analysis(),
        lines=tuple(lines),
        seconds=time.perf_counter() - started,
    )


def _named(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function under a name that no other has: XLA would warn of nothing in a program that comes from a cache."""
    fn.__name__ = f"plan_{uuid.uuid4().hex}"
    return fn


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Leaves JAX's persistent cache as it is: nobody would find what a plan puts there."""
    before = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def _described(mesh: Mesh) -> Target | None:
    """The devices of a mesh as a target, where they are of a chip that is described."""
    chip = chip_of(mesh.devices.flat[0].device_kind)
    if chip is None:
        return None
    num_hosts = len({d.process_index for d in mesh.devices.flat})
    return Target(chip=chip, text=chip.name, num_hosts=num_hosts, per_host=mesh.size // num_hosts)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """An argument as a shape; plain numbers too."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else jax.ShapeDtypeStruct((), jnp.result_type(x))


def _plain_type(dtype: Any) -> np.dtype:
    """numpy's type; of a random key that of its bits."""
    return np.dtype(np.uint64) if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)


def _sharding(x: Any) -> NamedSharding | None:
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _mesh(shardings: Sequence[NamedSharding | None], program: Program, target: Target | None) -> Mesh:
    """The mesh that a program names, on the devices that it is planned for."""
    named = [s.mesh for s in shardings if s is not None and s.mesh.axis_names] + list(jx.meshes(program))
    # Inside a shard_map some axes are manual: the same mesh, seen from there.
    sizes = {tuple(mesh.shape.items()) for mesh in named}
    if len(sizes) > 1:
        shown = " and ".join(sorted(str(dict(s)) for s in sizes))
        raise InputError([f"plan: the function names {len(sizes)} meshes: {shown}. A plan is of one mesh"])
    concrete = next((mesh for mesh in named if isinstance(mesh, Mesh)), None)
    axes = dict(sizes.pop()) if sizes else {"device": 1}
    num_devices = int(np.prod(list(axes.values()), dtype=np.int64))
    if target is not None:
        if num_devices != target.num_devices:
            shown = " x ".join(f"{axis}={size}" for axis, size in axes.items()) if named else "of a function without shardings"
            raise InputError([f"--target {target.text} has {target.num_devices} devices, but the mesh {shown} has {num_devices}. Make them equal"])
        if concrete is not None and concrete.devices.flat[0].device_kind == target.chip.name:
            return concrete
        return make_mesh(axes, devices=devices_of(target))
    if concrete is not None:
        return concrete
    devices = jax.devices()
    if len(devices) < num_devices:
        raise InputError(
            [
                f"plan: the mesh has {num_devices} devices, but JAX has {len(devices)}. Give it more before it starts: "
                f'jax.config.update("jax_num_cpu_devices", {num_devices}), or plan for a target'
            ]
        )
    return make_mesh(axes, devices=devices[:num_devices])
