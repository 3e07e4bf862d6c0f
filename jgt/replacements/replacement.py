"""The interface of replacements: rules that put other equations in the place of some equations of a program.

Constraints say where an array is, and XLA's partitioner finds the collectives. Some rules want more: matmuls that run beside the sends that
they wait for, rows that travel to their experts. Each of them is an object with one method, `apply`. The rewriter of `jgt.sharding` gets a
list of such objects and applies each to a program before it adds constraints; it knows none of them. `jgt.api.shard` makes the list.

Invariant: the new equations compute what the old ones compute, and derivatives go through them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jgt.program.dims import Dims, num_parts, show_dims
from jgt.program.jaxpr import Equation, Program, Var
from jgt.program.places import Place
from jgt.program.reads import Read
from jgt.rules import AnyMatch

Policy = Callable[..., Any]
"""A policy of jax.checkpoint says from a primitive, avals and params whether the results are saved, or where."""

Inserted = tuple[str, str, str, Equation | int, Var, NamedSharding | None, NamedSharding]
"""A constraint: the file:line of its rule, what it is on, the signal, the operation or the number of the argument, the value, its sharding
(None: left to the partitioner), and that of its cotangent."""


@dataclass(frozen=True, kw_only=True)
class ParameterPlace:
    """One parameter: its path and shape, the signals that use it, and the axes of its dims and of its optimizer state's dims.

    Both may differ only in which axes shard a dim; the optimizer state has the parameter's shape. sliced: the dims that are sliced off
    before every use, such as the one that counts layers. read: the narrower type in which the program reads it; None: its own.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    signals: tuple[str, ...]
    dims: Dims
    optimizer_dims: Dims
    sliced: frozenset[int] = frozenset()
    read: Read | None = None

    @property
    def spec(self) -> str:
        """The axes of each dim, as the YAML writes them."""
        return show_dims(self.dims)

    def bytes_per_device(self, mesh: Mesh | AbstractMesh) -> int:
        """Bytes of this parameter on one device."""
        local = [-(-size // num_parts(axes, mesh.shape)) for size, axes in zip(self.shape, self.dims, strict=True)]
        return math.prod(local) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a program runs.

    free(dims, manual): the dims without the axes that a vmap or a shard_map around the program has taken. policies: the policies of the
    jax.checkpoints around the program, outermost first. parameters: all parameters of the call; none in a part of a pipeline. is_whole:
    whether this is the program of the call itself, whose first arguments are the parameters. is_part: whether the program is in a part of a
    pipeline; the rules were checked in the whole program before.
    """

    mesh: Mesh | AbstractMesh
    free: Callable[[Dims, Sequence[str]], Dims]
    policies: tuple[Policy | None, ...] = ()
    parameters: Sequence[ParameterPlace] = ()
    is_whole: bool = False
    is_part: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """The mesh axes and their sizes."""
        return dict(self.mesh.shape)


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A program after `apply`.

    split: the values that stay split, although a rule makes them whole. matches: the answers of the rules that were asked. problems: what
    is wrong with the rules here. inserted: the constraints in the program that are new.
    """

    program: Program
    split: frozenset[Var] = frozenset()
    matches: tuple[AnyMatch, ...] = ()
    problems: tuple[str, ...] = ()
    inserted: Sequence[Inserted] = ()


class Replacement(Protocol):
    """A rule that replaces equations of a program by others of the same meaning."""

    def apply(self, program: Program, around: Place, site: Site) -> Replaced:
        """The program with its own equations replaced. Programs inside an equation are passed in calls of their own."""
        ...
