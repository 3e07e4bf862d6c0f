"""`rules_of`: the layout that a program has already, as rules of jgt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jgt.document import InputError
from jgt.program.dims import Dims, num_parts, sharding_dims, show_dims
from jgt.program.retarget import jit_call_of, meshes_in
from jgt.program.uses import Use, parameter_uses
from jgt.rules.found import Found, FoundSpec
from jgt.sharding.arguments import Arguments
from jgt.sharding.checks import check_function, own_mesh
from jgt.sharding.inputs import Signature, path_text
from jgt.sharding.own.erase import erase
from jgt.sharding.own.layout import OwnLayout
from jgt.sharding.own.trace import explicit_mesh_of


def rules_of(fn: Callable[..., Any], *args: Any, mesh: Mesh | AbstractMesh | None = None, **kwargs: Any) -> Found:
    """The layout of `fn(*args, **kwargs)` as rules: of its arguments, and of the values for which it asks one.

        found = jgt.rules_of(loss, params, batch, mesh=mesh)
        sharded = jgt.shard(loss, found.rules, mesh)

    `str` of the result is a rules file.

    fn: a function whose first argument contains the parameters.
    args, kwargs: arrays on their mesh, or ShapeDtypeStructs with `sharding`.
    mesh: what `fn` is written for; by default the mesh that `jax.set_mesh` has set, or that the arguments or the program name.

    Raises InputError if the program asks for nothing, or if it names several meshes.
    """
    check_function(fn)
    leaves = jax.tree.leaves((args, kwargs))
    own = own_mesh(None) if mesh is None else mesh.abstract_mesh
    own = own or next(filter(None, map(explicit_mesh_of, leaves)), None)
    arguments = Arguments(fn, args, kwargs, Signature.of(fn), own)
    call = jit_call_of(arguments.as_it_is())
    # Named as `shard` names them. Only on its mesh does a program know the layouts of its values, which it may ask for again.
    program, typed = erase(call.program)
    given = [s or _sharding_of(x) for s, x in zip(call.in_shardings, arguments.arrays, strict=True)]
    sizes = _sizes([own, *(s.mesh for s in given if s is not None), *meshes_in(call.program)])
    layouts, unsaid = _with_dims(arguments.trace().layouts, typed, sizes)
    count = len(arguments.parameters)
    asked = {one.argument: one for one in typed if one.argument is not None}
    uses = parameter_uses(program, count)
    entries = list[FoundSpec]()
    for number, ((path, x), use) in enumerate(zip(arguments.parameters, uses, strict=True)):
        name = path_text(path[2:])
        dims, where = _dims(given[number], asked.get(number), len(x.shape))
        if any(dims[d] for d in use.sliced):
            unsaid.append(f"{name}: dim {min(d for d in use.sliced if dims[d])} is split, over which a scan goes")
        entries.append(FoundSpec(path=name, dims=_of_slice(dims, use), where=where))
    inputs = list[FoundSpec]()
    for number, one in enumerate(arguments.inputs, count):
        dims, where = _dims(given[number], asked.get(number), len(one.x.shape))
        if any(dims):
            inputs.append(FoundSpec(path=one.paths[0], dims=dims, where=where))
    tensors = tuple(FoundSpec(path=one.name, dims=one.dims, where=one.where, signal=one.signal) for one in layouts)
    return Found(mesh=sizes, params=tuple(entries), inputs=tuple(inputs), tensors=tensors, unsaid=tuple(unsaid))


def _sizes(meshes: Sequence[Any]) -> dict[str, int]:
    """The axes of the one mesh among these, and their sizes. Raises InputError."""
    known = list({tuple(mesh.shape.items()): dict(mesh.shape) for mesh in meshes if mesh is not None}.values())
    if len(known) == 1:
        return known[0]
    names = " and ".join(sorted(" x ".join(f"{axis}={size}" for axis, size in one.items()) for one in known))
    several = f"the program names several meshes, {names}. Give all arguments on one"
    raise InputError([f"rules_of: {several if known else 'nothing names a mesh. Give arguments with shardings, or mesh='}"])


def _sharding_of(x: Any) -> NamedSharding | None:
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _dims(sharding: NamedSharding | None, asked: OwnLayout | None, rank: int) -> tuple[Dims, str]:
    dims = ((),) * rank if sharding is None else sharding_dims(sharding, rank)
    return (dims, "") if any(dims) or asked is None else (asked.dims, asked.where)


def _of_slice(dims: Dims, use: Use) -> Dims:
    return tuple(axes for d, axes in enumerate(dims) if d not in use.sliced)


def _with_dims(layouts: Sequence[OwnLayout], typed: Sequence[OwnLayout], sizes: Mapping[str, int]) -> tuple[list[OwnLayout], list[str]]:
    """The layouts with the dims that they have on the program's mesh, one for each name, and what rules cannot say of them."""
    if [(one.signal, one.where, len(one.dims)) for one in layouts] == [(one.signal, one.where, len(one.dims)) for one in typed]:
        layouts = [replace(one, dims=other.dims, problem=other.problem) for one, other in zip(layouts, typed, strict=True)]
    named: dict[tuple[str, str], OwnLayout] = {}
    unsaid: dict[str, None] = {}
    for given in layouts:
        even = tuple(axes if size % num_parts(axes, sizes) == 0 else () for axes, size in zip(given.dims, given.shape, strict=True))
        if even != given.dims:
            unsaid[f"{given.where}: {given.name} {list(given.shape)} has {show_dims(given.dims)}, which does not divide it"] = None
        one = replace(given, dims=even)
        first = named.setdefault((one.signal, one.name), one)
        if one.problem or first.dims != one.dims:
            what = one.problem or f"{one.name} has {show_dims(first.dims)} and {show_dims(one.dims)}"
            unsaid[f"{one.where}: {what}"] = None
    return list(named.values()), list(unsaid)
