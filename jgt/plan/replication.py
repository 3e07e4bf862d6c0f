"""Copies: arrays that several devices hold, and constraints that cannot split what they say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jgt import jaxpr as jx
from jgt.jaxpr import Equation, Place, Program
from jgt.plan.origin import NONE


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A sharding that the traced program asks for. copies: how many devices hold each part; misfits: (dim, axes) that do not divide."""

    signal: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    copies: int
    local_bytes: int
    misfits: tuple[tuple[int, tuple[str, ...]], ...]


def constraints(program: Program, around: Place = Place()) -> Iterator[Constraint]:  # noqa: B008 - a Place never changes
    """Every sharding constraint of a program, also where it stands several times."""
    for equation in jx.body(program).eqns:
        place = jx.place_of(equation, around)
        sharding = equation.params.get("sharding") if equation.primitive.name == "sharding_constraint" else None
        if isinstance(sharding, NamedSharding):
            yield _constraint(equation, sharding, place)
        for inner in jx.subprograms(equation):
            yield from constraints(inner, place)


def _constraint(equation: Equation, sharding: NamedSharding, place: Place) -> Constraint:
    aval = equation.invars[0].aval
    dims = spec_dims(sharding, len(aval.shape))
    sizes = dict(sharding.mesh.shape)
    parts = [math.prod(sizes[axis] for axis in axes) for axes in dims]
    misfits = tuple((d, axes) for d, (axes, n, size) in enumerate(zip(dims, parts, aval.shape, strict=True)) if size % n)
    local = math.prod(-(-size // n) for size, n in zip(aval.shape, parts, strict=True))
    return Constraint(
        signal=place.path or NONE,
        source=jx.line_of(equation),
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        spec=show(dims),
        copies=free_size(sharding.mesh) // math.prod(parts),
        local_bytes=local * aval.dtype.itemsize,
        misfits=misfits,
    )


def free_size(mesh: Mesh | AbstractMesh) -> int:
    """The devices of a mesh over which the partitioner may split: all but the manual axes."""
    manual = getattr(mesh, "manual_axes", ())
    return math.prod(size for axis, size in mesh.shape.items() if axis not in manual)


def spec_dims(sharding: NamedSharding, rank: int) -> tuple[tuple[str, ...], ...]:
    """The axes of each dim; none where it is not sharded or left open."""
    entries = [*sharding.spec, *[None] * rank][:rank]
    return tuple(() if not isinstance(e, str | tuple) else (e,) if isinstance(e, str) else e for e in entries)


def show(dims: tuple[tuple[str, ...], ...]) -> str:
    """Dims as the YAML writes them; [] for what is whole everywhere."""
    if not any(dims):
        return "[]"
    return "[" + ", ".join("null" if not axes else axes[0] if len(axes) == 1 else f"[{', '.join(axes)}]" for axes in dims) + "]"
