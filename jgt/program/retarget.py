"""A traced program moved to another mesh, so that a plan can compile it for devices that are not attached to this machine.

A program names its mesh in many params: in shardings of constraints and jits, in shard_maps, and in the context of the equations inside
those. All of them have to be replaced together, or JAX refuses to lower the program because its devices differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Equation, Program


@dataclass(frozen=True)
class JitCall:
    """A program that consists of one call of jax.jit, and that call's shardings; None for a sharding that was not given."""

    program: Program
    in_shardings: tuple[NamedSharding | None, ...]
    out_shardings: tuple[NamedSharding | None, ...]
    donated: tuple[bool, ...]


def jit_call_of(program: Program) -> JitCall:
    """The jit call that a program consists of; if it is not one, a call of the whole program without shardings."""
    inner = jx.body(program)
    # A jit with other arguments in other order would need its shardings permuted; jax.make_jaxpr of a jitted function has none.
    call = inner.eqns[0] if len(inner.eqns) == 1 else None
    if call is not None and jx.is_call(call) and list(call.invars) == list(inner.invars) and list(call.outvars) == list(inner.outvars):
        params = call.params
        return JitCall(params["jaxpr"], _named(params["in_shardings"]), _named(params["out_shardings"]), tuple(params["donated_invars"]))
    num = len(inner.invars)
    return JitCall(program, (None,) * num, (None,) * len(inner.outvars), (False,) * num)


def _named(shardings: Sequence[object]) -> tuple[NamedSharding | None, ...]:
    return tuple(s if isinstance(s, NamedSharding) else None for s in shardings)


def meshes_in(program: Program) -> Iterator[Mesh | AbstractMesh]:
    """Every mesh that a program names."""
    for equation in jx.body(program).eqns:
        for item in jx.param_items(equation):
            mesh = item.mesh if isinstance(item, NamedSharding) else item
            # A jit that was traced outside of any mesh names the empty mesh.
            if isinstance(mesh, Mesh | AbstractMesh) and mesh.axis_names:
                yield mesh
        for inner in jx.subprograms(equation):
            yield from meshes_in(inner)


def replace_mesh(program: Program, mesh: Mesh) -> Program:
    """The same program on other devices; `mesh` must have the axes and sizes of the mesh that the program names."""
    eqns: list[Equation] = []
    for equation in jx.body(program).eqns:
        params = jx.map_subprograms(equation, lambda p: replace_mesh(p, mesh))
        new = equation if params is None else equation.replace(params=params)
        # `map_params` does not look inside programs, so their equations are replaced before.
        eqns.append(new.replace(params=jx.map_params(new, lambda item: _on_mesh(item, mesh)), ctx=jx.context_on(equation, mesh)))
    return jx.with_body(program, eqns=eqns, outvars=jx.body(program).outvars)


def _on_mesh(item: object, mesh: Mesh) -> object:
    """Another item of a param in place of one that has a concrete mesh. An AbstractMesh names no devices, so it can stay."""
    if isinstance(item, NamedSharding) and isinstance(item.mesh, Mesh):
        return item.update(mesh=mesh) if hasattr(item, "update") else NamedSharding(mesh, item.spec, memory_kind=item.memory_kind)
    return mesh if isinstance(item, Mesh) else item
