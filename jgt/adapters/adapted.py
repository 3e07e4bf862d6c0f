"""A matrix of a model with a low-rank update (LoRA, arXiv 2106.09685), as the equations between an argument and its matmul see it.

    W [*stack, *in, *out]    A [*stack, *in, rank]    B [*stack, rank, *out]        x · W  becomes  x · W + scale · (x · A) · B

Between the argument and the matmul are casts, transposes, reshapes and the slices of a scan over layers. Each of them acts on some dims of
W, and does the same to A and B if they have these dims. So every dim has a label, which is also a label of A, of B or of both: both have
the dims of a stack, A those that the matmul contracts, B its outputs. The methods of `Adapted` are the equations. To JAX it is a tree of
arrays, so a scan over layers slices all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from jgt.adapters.packed import changed, read_by, sliceable
from jgt.program import jaxpr as jx
from jgt.program.dims import reshape_runs
from jgt.program.jaxpr import Equation
from jgt.program.tracing import result_of

Label = tuple[Any, ...]
"""The numbers of the parameter's dims that a dim is made of, and what distinguishes it from other dims made of these."""
RANK: Label = ((), "rank")
KEY: Label = ((), "key")


_DIFFERENT = "is read by matmuls that contract different dims of it"


class UnsupportedError(Exception):
    """An equation that an adapted matrix cannot pass. The text ends a sentence about the matrix."""


@dataclass(eq=False)
class Roles:
    """The dims of a parameter by number: those that its matmul contracts, and its outputs; the others count a stack of matrices.

    problem: why it cannot be adapted; empty if it can.
    """

    inputs: set[int] = field(default_factory=set[int])
    outputs: set[int] = field(default_factory=set[int])
    problem: str = ""

    def learn(self, contracted: set[int], free: set[int]) -> None:
        """Learns from a matmul. A later matmul may use the transpose. Raises UnsupportedError for anything else."""
        ways = (self.inputs, self.outputs), (self.outputs, self.inputs)
        if contracted & free or not (contracted and free) or (self.inputs and (contracted, free) not in ways):
            raise UnsupportedError(_DIFFERENT)
        if not self.inputs:
            self.inputs, self.outputs = contracted, free


@partial(jax.tree_util.register_dataclass, data_fields=("array",), meta_fields=("labels",))
@dataclass(frozen=True)
class Labelled:
    """An array and the labels of its dims. The array of a matrix may be packed."""

    array: Any
    labels: tuple[Label, ...]

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Its shape and type."""
        return jax.ShapeDtypeStruct(self.array.shape, self.array.dtype)

    def at(self, labels: Iterable[Label]) -> tuple[int, ...]:
        """The positions of dims."""
        return tuple(map(self.labels.index, labels))

    def ordered(self, labels: Sequence[Label]) -> Labelled:
        """The dims in the order of these labels, those that it has, and the others behind them."""
        order = [label for label in labels if label in self.labels] + [label for label in self.labels if label not in labels]
        return self if order == list(self.labels) else self.changed(lambda x: jnp.transpose(x, self.at(order)), tuple(order))

    def changed(self, change: Callable[[jax.Array], jax.Array], labels: tuple[Label, ...]) -> Labelled:
        """The array after a change. labels: those of its dims then."""
        return Labelled(changed(self.array, change), labels)

    def merged(self, old: Sequence[Label], new: Sequence[Label], sizes: Sequence[int]) -> Labelled:
        """Neighbours replaced by dims of these sizes. Raises UnsupportedError if only some of them are its own."""
        own = [label for label in old if label in self.labels]
        if not own:
            return self
        if len(own) < len(old):
            raise UnsupportedError("is reshaped so that inputs and outputs of a matmul share a dim")
        start = min(self.at(old))
        part = self.ordered([*self.labels[:start], *old])
        shape = (*part.array.shape[:start], *sizes, *part.array.shape[start + len(old) :])
        return part.changed(lambda x: x.reshape(shape), (*part.labels[:start], *new, *part.labels[start + len(old) :]))


@partial(jax.tree_util.register_dataclass, data_fields=("matrix", "a", "b", "key"), meta_fields=("path", "scale", "dropout", "roles"))
@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A matrix and its update. key: the bits of a random key, by which `dropout` of what A reads is drawn.

    Without a and b, matmuls are those of the matrix, and `roles` learns from them.
    """

    matrix: Labelled
    a: Labelled | None = None
    b: Labelled | None = None
    key: Labelled | None = None
    path: str
    scale: float = 1.0
    dropout: float = 0.0
    roles: Roles | None = None

    @property
    def labels(self) -> tuple[Label, ...]:
        """The labels of the matrix."""
        return self.matrix.labels

    def _mapped(self, change: Callable[[Labelled], Labelled]) -> Adapted:
        parts = {name: change(part) for name in ("matrix", "a", "b", "key") if (part := getattr(self, name)) is not None}
        return replace(self, **cast(Any, parts))

    def scanned(self) -> Adapted:
        """A matrix whose first dim a scan goes over, which is the first dim of all parts then."""
        first = self.labels[0]
        if any(part is not None and first not in part.labels for part in (self.a, self.b)):
            raise UnsupportedError("is the stack of a scan over its rows or columns")

        def stack(part: Labelled) -> Labelled:
            ordered = part.ordered([first])
            return replace(ordered, array=sliceable(ordered.array))

        return self._mapped(stack)

    def in_turn(self) -> Adapted:
        """The matrix in a turn of a scan, which has removed the first dim of all arrays."""
        return self._mapped(lambda part: Labelled(part.array, part.labels[1:]))

    def passed(self, equation: Equation, operands: Sequence[Any]) -> list[Adapted]:
        """The results of an equation of which it is the first operand. operands: the others. Raises UnsupportedError."""
        params, name = equation.params, equation.primitive.name
        if name == "split":
            return self._divided(self.labels[params["axis"]], params["sizes"])
        if name == "unstack":
            label = self.labels[params["axis"]]
            parts = self._divided(label, [1] * len(equation.outvars))
            return [part._mapped(partial(_without, labels=[label])) for part in parts]
        return [self._passed(equation, operands)]

    def _passed(self, equation: Equation, operands: Sequence[Any]) -> Adapted:
        params, name = equation.params, equation.primitive.name
        is_cast = name == "convert_element_type" and jnp.issubdtype(params["new_dtype"], jnp.floating)
        if is_cast or name in ("name", "copy", "sharding_constraint"):
            return replace(self, matrix=self.matrix.changed(partial(result_of, equation), self.labels))
        if name == "transpose":
            labels = tuple(self.labels[n] for n in params["permutation"])
            return replace(self, matrix=self.matrix.changed(partial(result_of, equation), labels))
        if name == "slice":
            strides = params["strides"] or (1,) * len(self.labels)
            ends = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
            return self._cut({label: slice(*cut) for label, cut in zip(self.labels, ends, strict=True)})
        if name == "dynamic_slice":
            starts = dict(zip(self.labels, zip(operands, params["slice_sizes"], strict=True), strict=True))
            return self._mapped(partial(_dynamic_slice, starts=starts))
        size = jx.shape_of(equation.outvars[0])
        # A broadcast of the same number of elements adds dims of size 1.
        if name in ("reshape", "squeeze", "broadcast_in_dim") and math.prod(size) == math.prod(self.matrix.array.shape):
            return self._reshaped(size)
        raise UnsupportedError(f"is read by {name}")

    def _divided(self, label: Label, sizes: Sequence[int]) -> list[Adapted]:
        ends = list(itertools.accumulate(sizes))
        return [self._cut({label: slice(end - size, end)}) for end, size in zip(ends, sizes, strict=True)]

    def _cut(self, cuts: Mapping[Label, slice]) -> Adapted:
        def cut(part: Labelled) -> Labelled:
            return part.changed(lambda x: x[tuple(cuts.get(label, slice(None)) for label in part.labels)], part.labels)

        return self._mapped(cut)

    def _reshaped(self, shape: Sequence[int]) -> Adapted:
        # The matrix is reshaped at once.
        new, labels = replace(self, matrix=Labelled(jnp.zeros(()), ())), list[Label]()
        before = tuple(zip(self.labels, self.matrix.array.shape, strict=True))
        for inner, outer in reshape_runs(self.matrix.array.shape, shape):
            old, sizes = [before[dim] for dim in inner], [shape[dim] for dim in outer]
            real, ones = [size for size in sizes if size != 1], [label for label, size in old if size == 1]
            merged = [label for label, size in old if size != 1]
            roots = tuple(sorted({root for label in merged for root in label[0]}))
            made = merged if len(merged) == len(real) == 1 else [(roots, (*merged, n)) for n in range(len(real))]
            new = new._mapped(lambda part, ones=ones, old=merged, new=made, sizes=real: _without(part, ones).merged(old, new, sizes))
            left = iter(made)
            labels += [next(left) if size != 1 else ((), (self.labels, len(labels) + n)) for n, size in enumerate(sizes)]
        return replace(new, matrix=self.matrix.changed(lambda x: x.reshape(shape), tuple(labels)))

    def multiplied(self, equation: Equation, operands: Sequence[Any]) -> jax.Array:
        """The result of a dot_general of which it is one operand. Raises UnsupportedError."""
        is_left = operands[0] is self
        other = operands[1 if is_left else 0]
        sides = equation.params["dimension_numbers"]
        (own, of_other), (own_batch, batch) = (pair if is_left else pair[::-1] for pair in sides)
        contracted, shared = [self.labels[n] for n in own], [self.labels[n] for n in own_batch]
        free = [label for label in self.labels if label not in contracted and label not in shared]
        product = read_by(self.matrix.array, lambda x: result_of(equation, *((x, other) if is_left else (other, x))))
        first, second = self._factors(contracted, shared, free)
        if first is None or second is None:
            return product
        precision = {name: equation.params[name] for name in ("precision", "preferred_element_type")}
        # Heads of outputs may be shared dims that one factor has, as where queries are multiplied by the matrix that makes keys.
        of_dim = dict(zip(batch, shared, strict=True))
        pairs = [(dim, label) for dim, label in of_dim.items() if label in first.labels]
        numbers = ((of_other, first.at(contracted)), (tuple(dim for dim, _ in pairs), first.at([label for _, label in pairs])))
        inner = jax.lax.dot_general(self._dropped(other), first.array, numbers, **precision) * self.scale  # [*shared, *rest, rank]
        begun = [label for _, label in pairs]
        kept = [*begun, *(of_dim.get(n, n) for n in range(other.ndim) if n not in of_other and of_dim.get(n) not in begun)]
        both = [label for label in shared if label in second.labels]
        second = second.ordered([*both, RANK, *free])
        numbers = (((inner.ndim - 1,), second.at([RANK])), (tuple(map(kept.index, both)), second.at(both)))
        update = jax.lax.dot_general(inner.astype(second.array.dtype), second.array, numbers, **precision)
        made, rest = [*both, *(one for one in kept if one not in both), *free], [one for one in kept if one not in shared]
        update = jnp.transpose(update, [*map(made.index, [*shared, *free, *rest] if is_left else [*shared, *rest, *free])])
        return product + update.reshape(product.shape)

    def multiplied_by_group(self, equation: Equation, operands: Sequence[Any]) -> jax.Array:
        """The result of a ragged_dot of rows [n, k] and this matrix [groups, k, m]. Raises UnsupportedError."""
        rows, _, sizes = operands
        numbers = equation.params["ragged_dot_dimension_numbers"]
        plain = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
        if numbers != plain or len(self.labels) != 3 or self.dropout:
            why = "with dropout" if self.dropout else "whose matrices are not [groups, in, out]"
            raise UnsupportedError(f"is read by a grouped matmul {why}")
        group, contracted, free = self.labels
        product = read_by(self.matrix.array, lambda x: result_of(equation, rows, x, sizes))
        first, second = self._factors([contracted], [group], [free])
        if first is None or second is None:
            return product
        first, second = first.ordered([group, contracted, RANK]), second.ordered([group, RANK, free])
        inner = result_of(equation, rows, first.array, sizes) * self.scale
        return product + result_of(equation, inner.astype(second.array.dtype), second.array, sizes)

    def _factors(
        self, contracted: Sequence[Label], shared: Sequence[Label], free: Sequence[Label]
    ) -> tuple[Labelled | None, Labelled | None]:
        """The parts of the update in the order of a matmul, A and B, or B and A if it reads the matrix the other way round."""
        a, b = self.a, self.b
        if a is None or b is None:
            if self.roles is not None:
                self.roles.learn(_roots(contracted), _roots(free))
            return None, None
        for first, second in ((a, b), (b, a)):
            if {*contracted, RANK} <= {*first.labels} <= {*contracted, *shared, RANK} and {*free, RANK} <= {*second.labels}:
                dtype = self.matrix.array.dtype
                return Labelled(first.array.astype(dtype), first.labels), Labelled(second.array.astype(dtype), second.labels)
        raise UnsupportedError(_DIFFERENT)

    def _dropped(self, x: jax.Array) -> jax.Array:
        if self.key is None or not self.dropout:
            return x
        # A matmul of a whole stack has a key for each of its matrices, and one mask.
        key = cast(jax.Array, jax.random.wrap_key_data(self.key.array)).reshape(-1)[0]
        kept = jax.random.bernoulli(key, 1 - self.dropout, x.shape)
        return jnp.where(kept, x / (1 - self.dropout), 0).astype(x.dtype)


def _roots(labels: Iterable[Label]) -> set[int]:
    return {root for label in labels for root in label[0]}


def _without(part: Labelled, labels: Sequence[Label]) -> Labelled:
    own = [label for label in labels if label in part.labels]
    if not own:
        return part
    return part.changed(lambda x: jnp.squeeze(x, part.at(own)), tuple(label for label in part.labels if label not in own))


def _dynamic_slice(part: Labelled, starts: dict[Label, tuple[Any, int]]) -> Labelled:
    cuts = [starts.get(label, (0, size)) for label, size in zip(part.labels, part.array.shape, strict=True)]
    start, sizes = [cut[0] for cut in cuts], [cut[1] for cut in cuts]
    return part.changed(lambda x: jax.lax.dynamic_slice(x, start, sizes), part.labels)
