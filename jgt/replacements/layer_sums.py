"""Sums over replicas that are taken inside the scan over layers, so that XLA runs them beside the layers' own work.

XLA starts and ends a collective in the same loop body, or outside of all loops. So the devices wait for a sum over replicas that precedes
or follows a scan over layers. Here each turn of the scan adds up one part of the arrays, which needs nothing that the turn computes. Of
the scans in a program, the one over the most bytes is taken as the layers'.

A part is a run of entries along a dim that no mesh axis splits. The parts of many arrays are added up as one, since the sum of each would
be several kernels in each turn. Arrays without a dim that the number of turns divides are added up outside of the scan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jgt.program import jaxpr as jx
from jgt.program.dims import num_parts, sharding_dims
from jgt.program.jaxpr import Equation, Var
from jgt.program.parts import Flat, flatten
from jgt.replacements.replicas import Replicas

_R = TypeVar("_R")
_Arrays = list[jax.Array]
_Parts = list[_Arrays]
"""The arrays of each group, cut into a part for each turn."""


@dataclass(frozen=True, kw_only=True)
class LayerSums:
    """The sums of arrays of replicas, [R, ...] each, of which each turn of a scan takes a part.

    turns: the length of the scan; 0 without one. places: the shardings of the arrays, without R. groups: for the axes that split some
    arrays, the number of each array and the dim along which it is cut. The arrays of a group travel as one.
    """

    replicas: Replicas
    turns: int
    places: tuple[NamedSharding, ...]
    groups: tuple[tuple[tuple[str, ...], tuple[tuple[int, int], ...]], ...]

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], places: Sequence[NamedSharding], replicas: Replicas, turns: int) -> LayerSums:
        """The sums of arrays of these shapes, without R."""
        groups: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for n, (shape, place) in enumerate(zip(shapes, places, strict=True)):
            dims = sharding_dims(place, len(shape))
            sizes = place.mesh.shape
            free = (d for d, (size, axes) in enumerate(zip(shape, dims, strict=True)) if size % turns == 0 and num_parts(axes, sizes) == 1)
            dim = next(free, None) if turns > 1 else None
            if dim is not None:
                named = {axis for axes in dims for axis in axes if sizes[axis] > 1}
                groups.setdefault(tuple(axis for axis in place.mesh.axis_names if axis in named), []).append((n, dim))
        return cls(replicas=replicas, turns=turns, places=tuple(places), groups=tuple((axes, tuple(cuts)) for axes, cuts in groups.items()))

    @property
    def uncut(self) -> list[int]:
        """The numbers of the arrays that cannot be cut."""
        cut = {n for _, cuts in self.groups for n, _ in cuts}
        return [n for n in range(len(self.places)) if n not in cut]

    def cut(self, arrays: Sequence[jax.Array]) -> _Parts:
        """The parts of each group's arrays on each device: [R, turns, devices, numbers]. Nothing moves to another device."""

        def on_device(*local: jax.Array) -> _Parts:
            return [[_cut(local[n][0], dim, self.turns)[None, :, None] for n, dim in cuts] for _, cuts in self.groups]

        lifted = tuple(self.replicas.lift(place).spec for place in self.places)
        made = [[PartitionSpec(self.replicas.axes, None, axes or None)] * len(cuts) for axes, cuts in self.groups]
        return jax.shard_map(on_device, mesh=self.replicas.mesh, in_specs=lifted, out_specs=made, check_vma=False)(*arrays)

    def of_turn(self, parts: _Parts) -> _Arrays:
        """The sum of each group, [devices, numbers], from the parts of one turn. To be called inside of `Replicas.map`."""
        sizes = self.replicas.mesh.shape
        devices = [math.prod(sizes[axis] for axis in axes) for axes, _ in self.groups]
        return [self.replicas.sum(jnp.concatenate(arrays, axis=-1), count) for arrays, count in zip(parts, devices, strict=True)]

    def join(self, sums: Sequence[jax.Array], shapes: Sequence[tuple[int, ...]]) -> dict[int, jax.Array]:
        """The arrays [...] by number, from the sums of all turns, [turns, devices, numbers]. shapes: all arrays', without R."""

        def on_device(*local: jax.Array) -> _Arrays:
            arrays: _Arrays = []
            for whole, (_, cuts) in zip(local, self.groups, strict=True):
                own = [self.places[n].shard_shape(shapes[n]) for n, _ in cuts]
                ends = [0, *itertools.accumulate(math.prod(shape) // self.turns for shape in own)]
                for (_, dim), shape, (start, end) in zip(cuts, own, itertools.pairwise(ends), strict=True):
                    arrays.append(_joined(whole[:, 0, start:end], dim, shape, self.turns))
            return arrays

        numbers = [n for _, cuts in self.groups for n, _ in cuts]
        made = tuple(PartitionSpec(None, axes or None) for axes, _ in self.groups)
        specs = [self.places[n].spec for n in numbers]
        arrays = jax.shard_map(on_device, mesh=self.replicas.mesh, in_specs=made, out_specs=specs, check_vma=False)(*sums)
        return dict(zip(numbers, arrays, strict=True))


def num_turns(fn: Callable[..., Any], *args: Any) -> int:
    """The length of the scan over layers in a function; 0 without one."""
    leaves, tree = cast("tuple[list[Any], Any]", jax.tree.flatten(args))
    flat = flatten(jx.trace(lambda *leaves: fn(*jax.tree.unflatten(tree, leaves)), *leaves)[0])
    number = _layers(flat)
    return 0 if number is None else flat.eqns[number].params["length"]


def with_layer_sums(fn: Callable[..., _R], args: Sequence[Any], parts: _Parts, of_turn: Callable[[_Parts], _Arrays]) -> tuple[_R, _Arrays]:
    """fn(*args), and the results of `of_turn`, which each turn of the scan over layers calls with its own of the parts [turns, ...]."""
    if not parts:
        return fn(*args), []
    leaves, tree = cast("tuple[list[Any], Any]", jax.tree.flatten(tuple(args)))
    program, out_tree = jx.trace(lambda *leaves: fn(*jax.tree.unflatten(tree, leaves)), *leaves)
    flat = flatten(program)
    number = _layers(flat)
    assert number is not None, "only a scan has turns"
    results, own = _run(flat, number, leaves, parts, of_turn), len(flat.outvars)
    return jax.tree.unflatten(out_tree, results[:own]), results[own:]


def _layers(flat: Flat) -> int | None:
    """The number of the equation that is the scan over layers."""

    def scanned(equation: Equation) -> int:
        fixed = sum(jx.scan_sizes(equation))
        return sum(math.prod(jx.shape_of(a)) for a in equation.invars[fixed:])

    scans = [n for n, equation in enumerate(flat.eqns) if jx.is_scan(equation)]
    return max(scans, key=lambda n: scanned(flat.eqns[n]), default=None)


def _run(flat: Flat, number: int, leaves: Sequence[Any], parts: _Parts, of_turn: Callable[[_Parts], _Arrays]) -> _Arrays:
    """The results of a program whose scan gets the parts too, and then the results of `of_turn`."""
    scan, (flat_parts, tree) = flat.eqns[number], cast("tuple[_Arrays, Any]", jax.tree.flatten(parts))
    (body,) = jx.subprograms(scan)
    num_consts, num_carry = jx.scan_sizes(scan)
    first, count = num_consts + num_carry, len(scan.invars)

    def loop(*operands: jax.Array) -> _Arrays:
        constants, carry = operands[:num_consts], list(operands[num_consts:first])

        def turn(carry: _Arrays, both: tuple[_Arrays, _Arrays]) -> tuple[_Arrays, tuple[_Arrays, _Arrays]]:
            xs, own = both
            after = jx.evaluate(body, [*constants, *carry, *xs])
            return after[:num_carry], (after[num_carry:], of_turn(jax.tree.unflatten(tree, own)))

        params = {name: scan.params[name] for name in ("length", "reverse", "unroll")}
        carry, (ys, sums) = jax.lax.scan(turn, carry, (list(operands[first:count]), list(operands[count:])), **params)
        return [*carry, *ys, *sums]

    program, _ = jx.trace(loop, *[a.aval for a in scan.invars], *[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat_parts])
    inner = jx.body(program)
    inputs = [jx.new_var_like(v) for v in inner.invars[count:]]
    made = [jx.new_var_like(cast(Var, v)) for v in inner.outvars[len(scan.outvars) :]]
    eqns = jx.inlined(program, scan, [*scan.invars, *inputs], [*scan.outvars, *made])
    whole = replace(flat, eqns=(*flat.eqns[:number], *eqns, *flat.eqns[number + 1 :]), outvars=(*flat.outvars, *made))
    new = jx.program_of(whole.program, [*whole.invars, *whole.consts, *inputs], whole.eqns, whole.outvars)
    return jx.evaluate(new, [*leaves, *whole.consts.values(), *flat_parts])


def _cut(x: jax.Array, dim: int, turns: int) -> jax.Array:
    """[turns, numbers]: each turn has a run of entries along a dim."""
    return jnp.moveaxis(x.reshape(*x.shape[:dim], turns, -1, *x.shape[dim + 1 :]), dim, 0).reshape(turns, -1)


def _joined(x: jax.Array, dim: int, shape: tuple[int, ...], turns: int) -> jax.Array:
    """The inverse of `_cut`."""
    parts = x.reshape(turns, *shape[:dim], shape[dim] // turns, *shape[dim + 1 :])
    return jnp.moveaxis(parts, 0, dim).reshape(shape)
