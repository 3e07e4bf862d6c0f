# pyright: basic
"""The equations between q, k, v and the heads, run for a few dozen positions of the sequence.

Each value on the way has labels that say which of its dims count rows of the batch, queries or keys (`pairs`). Such a dim has as many
entries as there are positions, and every other dim its own size. Numbers narrower than f32 are f32. What an operation does with the
positions that are not there must not matter, so `AttentionWalk` knows the operations of attention and refuses all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jgt.program import jaxpr as jx
from jgt.program.dataflow import ELEMENTWISE
from jgt.program.jaxpr import Atom, Equation, Var
from jgt.program.parts import Flat
from jgt.program.places import line_of
from jgt.program.tracing import result_of
from jgt.replacements.context import cudnn
from jgt.replacements.context.blocks import XLA_BLOCKS
from jgt.replacements.context.pairs import Condition, DimLabel, Labels, Operand, Reader, Source, UnreadableError, labels_of

_Labelled = tuple[jax.Array, Labels]


@dataclass
class AttentionWalk:
    """The equations that depend on q, k or v, run for some positions. What else they read, `Reader` computes.

    conditions: which keys a query sees, in the order in which the walk meets them. operands: everything that is read. sink: a number for
    each head, which is one more score of all queries. fused_mask: whether a kernel's attention is causal, and its window.
    """

    flat: Flat
    conditions: dict[Condition, None] = field(default_factory=dict)
    operands: dict[Operand, None] = field(default_factory=dict)
    sink: Operand | None = None
    fused_mask: tuple[bool, int | None] = (False, None)
    is_fused: bool = False

    @cached_property
    def source(self) -> Source:
        """Where values come from."""
        return Source.of(self.flat)

    def run(self, q: jax.Array, k: jax.Array, v: jax.Array, positions: Any, read: Callable[[Operand], jax.Array]) -> jax.Array:
        """The heads [b, positions, n, h] of q, k and v [b, positions, heads, h]."""
        reader = Reader(self.source, positions, positions, read)
        rows: list[Labels] = [("batch", "queries", None, None), ("batch", "keys", None, None), ("batch", "keys", None, None)]
        self._known: dict[Var, _Labelled] = dict(zip(self.flat.invars[:3], zip((q, k, v), rows, strict=True), strict=True))
        for equation in self.flat.eqns:
            if any(jx.is_var(a) and a in self._known for a in equation.invars):
                self._run(equation, reader)
        result = self._known.get(cast(Var, self.flat.outvars[0]))
        if result is None or result[1] != rows[0]:
            raise UnreadableError("its result is not [b, s, heads, size], one row for each query")
        return result[0]

    def _run(self, equation: Equation, reader: Reader) -> None:
        name = equation.primitive.name
        known = [self._known.get(a) if jx.is_var(a) else None for a in equation.invars]
        if cudnn.is_attention(equation):
            result = self._fused(equation, reader)
        elif name in ELEMENTWISE:
            result = self._elementwise(equation, known, reader)
        elif name == "dot_general":
            operands = [self._with(one, a, reader) for one, a in zip(known, equation.invars, strict=True)]
            result = self._dot(equation, *operands)
        elif name == "concatenate" and _adds_one_score(equation, known):
            x, labels = cast("_Labelled", known[0])
            result = self._with_sink(equation, x, labels, reader)
        elif name == "slice" and self.sink is not None and known[0] is not None and "keys" in known[0][1]:
            result = self._without_sink(equation, *known[0])
        else:
            if name not in _RULES or known[0] is None:
                raise UnreadableError(f"{name} ({line_of(equation) or 'in a library'}) is not an operation of attention that jgt knows")
            result = _RULES[name](equation, *known[0])
        self._known[equation.outvars[0]] = result

    def _with(self, one: _Labelled | None, atom: Atom, reader: Reader) -> _Labelled:
        labels: Labels = (None,) * len(jx.shape_of(atom))
        return one or (_wide(reader.value(atom, labels)), labels)

    def _elementwise(self, equation: Equation, known: Sequence[_Labelled | None], reader: Reader) -> _Labelled:
        shape = jx.shape_of(equation.outvars[0])
        rows = [one for one in known if one is not None and jx.shape_of(equation.outvars[0]) and len(one[1]) == len(shape)]
        labels: Labels = tuple(next((label for label in dim if label), None) for dim in zip(*(one[1] for one in rows), strict=True))
        full = np.broadcast_shapes(*(one[0].shape for one in rows))
        operands: list[jax.Array] = []
        for number, (one, atom) in enumerate(zip(known, equation.invars, strict=True)):
            is_scalar = not jx.shape_of(atom)
            own = labels_of(atom, labels)
            # The largest score of a query may be compared with that of a sink.
            is_sink = equation.primitive.name == "max" and not is_scalar and "keys" not in labels
            x = one[0] if one is not None else self._sink(atom, own, reader) if is_sink else _wide(reader.value(atom, own))
            if one is None and not is_scalar:
                self._note(equation, number, Condition(atom, own), x, known)
            operands.append(x if is_scalar else jnp.broadcast_to(x, full))
        if equation.primitive.name == "convert_element_type" and jnp.issubdtype(equation.params["new_dtype"], jnp.floating):
            return _wide(operands[0].astype(jnp.float32)), labels
        return result_of(equation, *operands), labels

    def _note(self, equation: Equation, number: int, condition: Condition, x: jax.Array, known: Sequence[_Labelled | None]) -> None:
        """Adds a condition, if an operand that q, k and v have no part in is one."""
        if equation.primitive.name == "select_n" and number == 0 and x.dtype == bool:
            self.conditions[Condition(condition.atom, condition.labels, is_not=known[1] is not None)] = None
        elif equation.primitive.name in ("add", "add_any") and any(
            x.shape[dim] > 1 for dim, label in enumerate(condition.labels) if label == "keys"
        ):
            self.conditions[condition] = None

    def _dot(self, equation: Equation, left: _Labelled, right: _Labelled) -> _Labelled:
        (of_left, of_right), (batch_left, batch_right) = equation.params["dimension_numbers"]
        pairs = [*zip(of_left, of_right, strict=True), *zip(batch_left, batch_right, strict=True)]
        if any(left[1][a] != right[1][b] for a, b in pairs) or any(left[1][a] == "queries" for a in of_left):
            raise UnreadableError(f"the matmul at {line_of(equation) or 'a line of a library'} sums over the sequence")
        labels = [left[1][dim] for dim in batch_left]
        labels += [label for dim, label in enumerate(left[1]) if dim not in (*of_left, *batch_left)]
        labels += [label for dim, label in enumerate(right[1]) if dim not in (*of_right, *batch_right)]
        result = result_of(equation, left[0], right[0], preferred_element_type=jnp.dtype(jnp.float32))
        return result, tuple(labels)

    def _with_sink(self, equation: Equation, x: jax.Array, labels: Labels, reader: Reader) -> _Labelled:
        """Scores with those of the sink behind them."""
        dim = equation.params["dimension"]
        own: Labels = tuple(None if n == dim else label for n, label in enumerate(labels))
        column = self._sink(equation.invars[1], own, reader)
        return jnp.concatenate([x, jnp.broadcast_to(column, [*x.shape[:dim], 1, *x.shape[dim + 1 :]])], dim), labels

    def _sink(self, atom: Atom, labels: Labels, reader: Reader) -> jax.Array:
        """The scores of the sink, which a variable has that does not follow from q, k or v."""

        def read(operand: Operand) -> jax.Array:
            self.sink = operand
            return reader.read(operand)

        x = _wide(Reader(reader.source, reader.queries, reader.keys, read).value(atom, labels))
        if self.sink is None or any(self.sink.labels):
            raise UnreadableError("its sink is not one number for each head")
        return x

    def _without_sink(self, equation: Equation, x: jax.Array, labels: Labels) -> _Labelled:
        dim, (old, new) = labels.index("keys"), map(jx.shape_of, (equation.invars[0], equation.outvars[0]))
        expected = [*old[:dim], jx.shape_of(self.flat.invars[1])[1], *old[dim + 1 :]]
        if [*new] != expected or any(equation.params["start_indices"]):
            raise UnreadableError(f"the slice at {line_of(equation) or 'a line of a library'} is not that of a sink")
        return jax.lax.slice_in_dim(x, 0, x.shape[dim] - 1, axis=dim), labels

    def _fused(self, equation: Equation, reader: Reader) -> _Labelled:
        scale, is_causal, window = cudnn.options(equation)
        q, k, v = (self._known[cast(Var, a)] for a in equation.invars[:3])
        self.is_fused, self.fused_mask, seen = True, (is_causal, window), None
        if equation.params["variadic_args"][0]:
            shape = jx.shape_of(equation.invars[3])
            every: Labels = ("batch", None, "queries", "keys")
            labels: Labels = tuple(label if size > 1 else None for label, size in zip(every, shape, strict=True))
            condition = Condition(equation.invars[3], labels)
            self.conditions[condition] = None
            seen = condition.holds(_wide(reader.value(equation.invars[3], labels)))
        at = reader.queries
        distance = at[:, None] - at[None]
        within = (distance < (window or jnp.iinfo(jnp.int32).max)) & ((distance >= 0) | (not is_causal))
        seen = within[None] if seen is None else within[None] & seen
        seen = jnp.broadcast_to(seen, (seen.shape[0], len(at), len(at)))
        return XLA_BLOCKS.forward(q[0], k[0], v[0], seen, False, scale).out, q[1]


def _adds_one_score(equation: Equation, known: Sequence[_Labelled | None]) -> bool:
    """Whether a concatenation adds to the scores of the keys one that does not follow from q, k or v."""
    dim, first = equation.params["dimension"], known[0]
    return (
        len(known) == 2 and first is not None and known[1] is None and first[1][dim] == "keys" and jx.shape_of(equation.invars[1])[dim] == 1
    )


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _broadcast(equation: Equation, x: jax.Array, labels: Labels) -> _Labelled:
    dims, sizes = equation.params["broadcast_dimensions"], equation.params["shape"]
    new: Labels = tuple(labels[dims.index(n)] if n in dims else None for n in range(len(sizes)))
    shape = [x.shape[dims.index(n)] if new[n] else size for n, size in enumerate(sizes)]
    return jax.lax.broadcast_in_dim(x, shape, dims), new


def _reshape(equation: Equation, x: jax.Array, labels: Labels) -> _Labelled:
    inner, outer = jx.shape_of(equation.invars[0]), jx.shape_of(equation.outvars[0])
    new: list[DimLabel] = [None] * len(outer)
    for dim, label in enumerate(labels):
        before = math.prod(inner[:dim])
        at = [n for n, size in enumerate(outer) if size == inner[dim] and math.prod(outer[:n]) == before]
        if label and not at:
            raise UnreadableError(f"the reshape at {line_of(equation) or 'a line of a library'} divides the sequence")
        if label:
            new[at[-1]] = label
    return x.reshape([x.shape[labels.index(label)] if label else size for size, label in zip(outer, new, strict=True)]), tuple(new)


def _transposed(equation: Equation, x: jax.Array, labels: Labels) -> _Labelled:
    order = equation.params["permutation"]
    return jnp.transpose(x, order), tuple(labels[n] for n in order)


def _reduced(equation: Equation, x: jax.Array, labels: Labels) -> _Labelled:
    return result_of(equation, x), tuple(label for n, label in enumerate(labels) if n not in equation.params["axes"])


def _squeezed(equation: Equation, x: jax.Array, labels: Labels) -> _Labelled:
    return result_of(equation, x), tuple(label for n, label in enumerate(labels) if n not in equation.params["dimensions"])


_RULES: dict[str, Callable[..., _Labelled]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transposed,
    "squeeze": _squeezed,
    "reduce_max": _reduced,
    "reduce_sum": _reduced,
}
