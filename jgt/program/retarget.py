"""A traced program moved to another mesh, so that a plan can compile it for devices that are not attached to this machine.

A program names its mesh in many params: in shardings of constraints and jits, in shard_maps, and in the context of the equations inside
those. Inside a shard_map the types of values name it too. All of them have to be replaced together, or JAX refuses to lower the program
because its devices differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
from jax.core import ShapedArray, Tracer
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jgt.program import jaxpr as jx
from jgt.program.equations import is_call, map_params, map_subprograms, param_items, subprograms
from jgt.program.jaxpr import Atom, Equation, Program, Var
from jgt.program.places import context_on

_KERNELS = frozenset({"mpmd_map", "pallas_call"})
"""Their programs are those of one device, and name no mesh."""


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
    if call is not None and is_call(call) and list(call.invars) == list(inner.invars) and list(call.outvars) == list(inner.outvars):
        params = call.params
        return JitCall(params["jaxpr"], _named(params["in_shardings"]), _named(params["out_shardings"]), tuple(params["donated_invars"]))
    num = len(inner.invars)
    return JitCall(program, (None,) * num, (None,) * len(inner.outvars), (False,) * num)


def _named(shardings: Sequence[object]) -> tuple[NamedSharding | None, ...]:
    return tuple(s if isinstance(s, NamedSharding) else None for s in shardings)


def meshes_in(program: Program) -> Iterator[Mesh | AbstractMesh]:
    """Every mesh that a program names."""
    for equation in jx.body(program).eqns:
        for item in param_items(equation):
            mesh = item.mesh if isinstance(item, NamedSharding) else item
            # A jit that was traced outside of any mesh names the empty mesh.
            if isinstance(mesh, Mesh | AbstractMesh) and mesh.axis_names:
                yield mesh
        for inner in subprograms(equation):
            yield from meshes_in(inner)


def replace_mesh(program: Program, mesh: Mesh) -> Program:
    """The same program on other devices; `mesh` must have the axes and sizes of the mesh that the program names."""
    inner = jx.body(program)
    moved = _Values(mesh)
    eqns: list[Equation] = []
    for equation in inner.eqns:
        is_kernel = equation.primitive.name in _KERNELS
        new = equation if is_kernel else map_subprograms(equation, lambda p: replace_mesh(p, mesh))
        invars, outvars = [moved.atom(atom) for atom in equation.invars], moved.vars(equation.outvars)
        new = new.replace(ctx=context_on(equation, mesh), invars=invars, outvars=outvars)
        # `map_params` does not look inside programs, so their equations are replaced before.
        eqns.append(map_params(new, lambda item: _on_mesh(item, mesh)))
    outvars = [moved.atom(atom) for atom in inner.outvars]
    inner = inner.replace(eqns=eqns, outvars=outvars)
    # Only where they change: jax 0.12 stores a program's constants with its arguments.
    if moved.changes(inner.constvars):
        inner = inner.replace(constvars=moved.vars(inner.constvars))
    if moved.changes(inner.invars):
        inner = inner.replace(invars=moved.vars(inner.invars))
    return inner if jx.body(program) is program else program.replace(jaxpr=inner)


class _Values:
    """The values of a program on another mesh. Inside a shard_map the type of each value names the mesh, and so its kind of device."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._moved: dict[Var, Var] = {}

    def vars(self, vars_: Sequence[Var]) -> list[Var]:
        return [self._var(var) for var in vars_]

    def changes(self, vars_: Sequence[Var]) -> bool:
        return any(new is not old for new, old in zip(self.vars(vars_), vars_, strict=True))

    def atom(self, atom: Atom) -> Atom:
        if jx.is_var(atom):
            return self._var(atom)
        return Literal(plain_value(atom.val), atom.aval)

    def _var(self, var: Var) -> Var:
        if var not in self._moved:
            aval: Any = var.aval
            sharding = getattr(aval, "sharding", None)
            # References to memory have no sharding to replace.
            on_mesh = _on_mesh(sharding, self._mesh) if isinstance(aval, ShapedArray) and isinstance(sharding, NamedSharding) else sharding
            self._moved[var] = var if on_mesh == sharding else type(var)(aval.update(sharding=on_mesh))
        return self._moved[var]


def _on_mesh(item: object, mesh: Mesh) -> object:
    """Another item of a param in place of one that names a mesh.

    An abstract mesh names no devices, but their kind: inside a shard_map an equation without operands, such as zeros, has it as a sharding.
    """
    if isinstance(item, Mesh):
        return mesh
    if isinstance(item, AbstractMesh):
        return item.update(abstract_device=mesh.abstract_mesh.abstract_device) if item.axis_names else item
    if isinstance(item, NamedSharding):
        on_mesh = cast("Mesh | AbstractMesh", _on_mesh(item.mesh, mesh))
        return item.update(mesh=on_mesh) if hasattr(item, "update") else NamedSharding(on_mesh, item.spec, memory_kind=item.memory_kind)
    return item


def plain_value(x: Any) -> Any:
    """A value that a program contains, without a type that names a mesh."""
    if isinstance(x, jax.Array):
        is_array = not isinstance(cast("object", x), Tracer) and not jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)
        return jax.device_get(x) if is_array and jax.typeof(x).sharding.mesh.axis_names else x
    # JAX's kind of NumPy array remembers its type. A view of it forgets that, and asks for it again where it is read.
    return x.view() if hasattr(x, "view") else x
