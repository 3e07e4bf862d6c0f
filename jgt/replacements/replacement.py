"""What a replacement is: a rule that puts other equations in the place of some equations of a program.

Constraints say where an array is, and XLA's partitioner finds the collectives. Some rules want more: matmuls that run beside the sends that
they wait for, rows that travel to their experts. Each of them is an object with one method, `apply`. The rewriter of `jgt.sharding` gets a
list of such objects and applies each to a program before it adds constraints; it knows none of them. `jgt.door` makes the list.

Invariant: the new equations compute what the old ones compute, and derivatives go through them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax.sharding import AbstractMesh, Mesh

from jgt.program.dims import Dims
from jgt.program.jaxpr import Place, Program, Var
from jgt.rules import AnyMatch

Policy = Callable[..., Any]
"""What jax.checkpoint takes: from a primitive, avals and params to whether the results are saved, or where."""


class PlacedParameter(Protocol):
    """A parameter of the call, with the mesh axes that the rules give its dims."""

    @property
    def path(self) -> str:
        """Its name in the tree of parameters."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dim."""
        ...

    @property
    def signals(self) -> tuple[str, ...]:
        """The signals that use it."""
        ...

    @property
    def dims(self) -> Dims:
        """The mesh axes of each dim."""
        ...

    @property
    def optimizer_dims(self) -> Dims:
        """The mesh axes of each dim of its gradient and of its optimizer state."""
        ...

    @property
    def sliced(self) -> frozenset[int]:
        """The dims that are sliced off before every use, such as the one that counts layers."""
        ...


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
    parameters: Sequence[PlacedParameter] = ()
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
    is wrong with the rules here.
    """

    program: Program
    split: frozenset[Var] = frozenset()
    matches: tuple[AnyMatch, ...] = ()
    problems: tuple[str, ...] = ()


class Replacement(Protocol):
    """A rule that replaces equations of a program by others of the same meaning."""

    def apply(self, program: Program, around: Place, site: Site) -> Replaced:
        """The program with its own equations replaced. Programs inside an equation are passed in calls of their own."""
        ...
