# pyright: basic
"""Which keys a query sees, by the model's own equations, for any queries and keys.

A model says it with an array bool[..., s, s] that it makes of positions (`arange`), of documents and of windows. No device of a long
sequence could hold that array. But each of its entries follows from one query and one key, so the same equations also compute the entries
of some queries and some keys: where an equation makes `arange(s)` along the dim of the queries, the positions of these queries take its
place. `SeenPairs.seen` runs the equations in this way, from the last one back to their operands.

What an equation of another kind makes (the documents of a row, say, by a sum along it) is an operand: the program computes it outside, and
each device gets its part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jgt.program import jaxpr as jx
from jgt.program.dataflow import ELEMENTWISE
from jgt.program.jaxpr import Atom, Equation, Var
from jgt.program.parts import Flat
from jgt.program.tracing import result_of

DimLabel = Literal["batch", "queries", "keys"] | None
Labels = tuple[DimLabel, ...]
"""The labels say what the dims of an array count; None stands for anything else."""

_LEAST = -1e4
"""Models add a number below this one to the scores of keys that a query does not see."""


def lets_meet(x: jax.Array) -> jax.Array:
    """Which pairs a condition lets meet: a mask says it, and so do the numbers that are added to scores."""
    return x if x.dtype == bool else x > _LEAST


def labels_of(atom: Atom, labels: Sequence[DimLabel]) -> Labels:
    """The labels of an operand of an elementwise equation, from those of the result."""
    return tuple(label if size > 1 else None for label, size in zip(labels, jx.shape_of(atom), strict=False))


@dataclass(frozen=True)
class Operand:
    """A value that the equations read, as they read it: an array whose dims have these labels."""

    var: Var
    labels: Labels

    @property
    def dims(self) -> list[tuple[int, DimLabel]]:
        """The size of each dim in the traced program, and what it counts."""
        return list(zip(jx.shape_of(self.var), self.labels, strict=True))

    @property
    def is_of_keys(self) -> bool:
        """Whether its rows travel with the keys. An array with dims of queries and of keys stays with the queries."""
        return "keys" in self.labels and "queries" not in self.labels

    @property
    def rows(self) -> int | None:
        """The dim that is split as the sequence is."""
        label = "keys" if self.is_of_keys else "queries"
        return self.labels.index(label) if label in self.labels else None


@dataclass(frozen=True)
class Condition:
    """A mask over (query, key) pairs, with the labels of its dims: a bool, or a float added to scores, where very negative values mask.

    is_not: whether true masks a pair.
    """

    atom: Atom
    labels: Labels
    is_not: bool = False

    def holds(self, x: jax.Array) -> jax.Array:
        """bool[b or 1, queries or 1, keys or 1], from the value of the variable."""
        x = ~lets_meet(x) if self.is_not else lets_meet(x)
        order = [self.labels.index(label) if label in self.labels else None for label in ("batch", "queries", "keys")]
        known = [dim for dim in order if dim is not None]
        others = [dim for dim in range(x.ndim) if dim not in known]
        if any(x.shape[dim] != 1 for dim in others):
            raise UnreadableError("some heads see other keys than others")
        x = jnp.transpose(x, [*known, *others]).reshape([x.shape[dim] for dim in known])
        return jnp.expand_dims(x, [n for n, dim in enumerate(order) if dim is None])


@dataclass(frozen=True, eq=False)
class SeenPairs:
    """The conditions that all have to hold for a query to see a key.

    source: where their values come from. is_causal, window: conditions that a kernel brings along, without equations.
    """

    source: Source
    conditions: tuple[Condition, ...]
    is_causal: bool = False
    window: int | None = None
    operands: tuple[Operand, ...] = field(init=False)

    def __post_init__(self) -> None:
        found: dict[Operand, None] = {}
        here = jax.ShapeDtypeStruct((1,), jnp.int32)

        def run(queries: jax.Array, keys: jax.Array) -> None:
            def read(operand: Operand) -> jax.Array:
                found[operand] = None
                return jnp.zeros([1 if label else size for size, label in operand.dims])

            for one in self.conditions:
                Reader(self.source, queries, keys, lambda one: read(one).astype(jx.dtype_of(one.var))).value(one.atom, one.labels)

        jax.eval_shape(run, here, here)
        object.__setattr__(self, "operands", tuple(found))

    def seen(self, queries: jax.Array, keys: jax.Array, operands: Sequence[jax.Array]) -> jax.Array | None:
        """bool[b or 1, queries, keys] for these positions int[queries] and int[keys]; None if each query sees each key.

        operands: the values of `operands` for these queries and keys. Of an array with dims of both, all keys.
        """
        values = dict(zip(self.operands, operands, strict=True))

        def read(operand: Operand) -> jax.Array:
            is_of_both = {"queries", "keys"} <= set(operand.labels)
            return jnp.take(values[operand], keys, operand.labels.index("keys")) if is_of_both else values[operand]

        reader = Reader(self.source, queries, keys, read)
        return self.all_of([one.holds(reader.value(one.atom, one.labels)) for one in self.conditions], queries, keys)

    def all_of(self, held: Sequence[jax.Array], queries: jax.Array, keys: jax.Array) -> jax.Array | None:
        """The pairs for which all conditions hold, from those for which each does, and what a kernel brings along. None: all pairs."""
        found = [*held]
        if self.is_causal:
            found.append((queries[:, None] >= keys[None])[None])
        if self.window is not None:
            found.append((queries[:, None] - keys[None] < self.window)[None])
        if not found:
            return None
        total = functools.reduce(jnp.logical_and, found)
        return jnp.broadcast_to(total, (total.shape[0], queries.shape[0], keys.shape[0]))


class UnreadableError(Exception):
    """An equation cannot be computed for some of its rows. The text says why."""


@dataclass(frozen=True, eq=False)
class Source:
    """The equation that makes each variable, and the values of those that are constants."""

    made: Mapping[Var, Equation]
    consts: Mapping[Var, ArrayLike]

    @classmethod
    def of(cls, flat: Flat) -> Source:
        """The source of everything in a flat program."""
        return cls({var: equation for equation in flat.eqns for var in equation.outvars}, flat.consts)


@dataclass
class Reader:
    """Values of equations at some queries and keys. A dim along which a value does not vary has size 1."""

    source: Source
    queries: jax.Array
    keys: jax.Array
    read: Callable[[Operand], jax.Array]
    known: dict[tuple[Var, Labels], jax.Array] = field(default_factory=dict)

    def value(self, atom: Atom, labels: Labels) -> jax.Array:
        """The value of a variable whose dims have these labels."""
        if not jx.is_var(atom):
            return jnp.asarray(atom.val, jx.dtype_of(atom))
        if (atom, labels) not in self.known:
            self.known[atom, labels] = self._computed(atom, labels)
        return self.known[atom, labels]

    def _computed(self, var: Var, labels: Labels) -> jax.Array:
        equation = self.source.made.get(var)
        if equation is None:
            return self._constant(var, labels) if var in self.source.consts else self.read(Operand(var, labels))
        run = _KINDS.get(equation.primitive.name) or (Reader._elementwise if equation.primitive.name in ELEMENTWISE else None)
        made = None if run is None else run(self, equation, labels)
        return self.read(Operand(var, labels)) if made is None else made

    def _positions(self, label: DimLabel) -> jax.Array | None:
        return self.queries if label == "queries" else self.keys if label == "keys" else None

    def _constant(self, var: Var, labels: Labels) -> jax.Array:
        x = jnp.asarray(self.source.consts[var])
        for dim, label in enumerate(labels):
            positions = self._positions(label)
            x = x if positions is None else jnp.take(x, positions, dim)
        return x

    # Each of these returns None where the equation does not say what some queries and keys have.

    def _iota(self, equation: Equation, labels: Labels) -> jax.Array | None:
        dim, shape = equation.params["dimension"], jx.shape_of(equation.outvars[0])
        if labels[dim] == "batch":
            return None
        positions = self._positions(labels[dim])
        along = jnp.arange(shape[dim]) if positions is None else positions
        return along.astype(jx.dtype_of(equation.outvars[0])).reshape([-1 if n == dim else 1 for n in range(len(shape))])

    def _broadcast(self, equation: Equation, labels: Labels) -> jax.Array:
        (operand,), dims = equation.invars, equation.params["broadcast_dimensions"]
        x = self.value(operand, labels_of(operand, [labels[dim] for dim in dims]))
        return x.reshape([x.shape[dims.index(n)] if n in dims else 1 for n in range(len(labels))])

    def _reshape(self, equation: Equation, labels: Labels) -> jax.Array | None:
        operand, shape = equation.invars[0], jx.shape_of(equation.outvars[0])
        inner = jx.shape_of(operand)
        kept, places = ([n for n, size in enumerate(sizes) if size > 1] for sizes in (shape, inner))
        if [inner[n] for n in places] != [shape[n] for n in kept]:
            return None
        # Only dims of size 1 come and go.
        of = dict(zip(places, kept, strict=True))
        x = self.value(operand, tuple(labels[of[n]] if n in of else None for n in range(len(inner))))
        return x.reshape([x.shape[places[kept.index(n)]] if n in kept else 1 for n in range(len(shape))])

    def _transpose(self, equation: Equation, labels: Labels) -> jax.Array:
        order = equation.params["permutation"]
        return jnp.transpose(self.value(equation.invars[0], tuple(labels[order.index(n)] for n in range(len(order)))), order)

    def _elementwise(self, equation: Equation, labels: Labels) -> jax.Array:
        return elementwise(equation, [self.value(a, labels_of(a, labels)) for a in equation.invars])


def elementwise(equation: Equation, operands: Sequence[jax.Array]) -> jax.Array:
    """The result of an elementwise equation, of operands whose dims have their sizes or 1."""
    full = jnp.broadcast_shapes(*(x.shape for x in operands))
    # The predicate of a select may be one for all.
    is_one = [equation.primitive.name == "select_n" and x.ndim == 0 for x in operands]
    return result_of(equation, *(x if one else jnp.broadcast_to(x, full) for x, one in zip(operands, is_one, strict=True)))


SHAPED = {
    "broadcast_in_dim": Reader._broadcast,
    "reshape": Reader._reshape,
    "squeeze": Reader._reshape,
    "transpose": Reader._transpose,
}
"""The equations that give values another shape."""
_KINDS = {"iota": Reader._iota, **SHAPED}
