"""The matrices of a function's parameters that can have low-rank updates, and the function with such updates.

A traced program says which parameters meet a matmul, and which of their dims it contracts. The rest follows from these: the shapes of the
two factors of an update, and their rules. A factor has dims of the matrix and is laid out as these are, unless a rule names it.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp

from jgt.adapters.adapted import KEY, RANK, Adapted, Label, Labelled, Roles
from jgt.adapters.evaluate import run_adapted
from jgt.adapters.packed import Packed, Packing
from jgt.program.tracing import trace
from jgt.program.uses import Use, parameter_uses
from jgt.rules import Rules, SignalRule, SpecRule, match_param
from jgt.sharding.inputs import KeyPath, path_text


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A parameter [...] that a matmul reads. Its dims, by number: those that count a stack of matrices, inputs, and outputs.

    use: the signals that use it. problem: why it cannot have an update; empty if it can.
    """

    path: str
    shape: tuple[int, ...]
    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    use: Use
    problem: str

    def factor_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A, [*stack, *in, rank], and B, [*stack, rank, *out]."""
        stack, inputs, outputs = ([self.shape[n] for n in dims] for dims in (self.stack, self.inputs, self.outputs))
        return (*stack, *inputs, rank), (*stack, rank, *outputs)

    @staticmethod
    def all_of(fn: Callable[..., object], params: object, *args: object) -> list[Matrix]:
        """The parameters of fn(params, *args) with two or more dims, in their order. All arguments are shapes."""
        program, _ = trace(fn, params, *args)
        named = _named(params)
        roles = {path: Roles() for path, x in named if len(x.shape) > 1}

        def learn(*arrays: jax.Array) -> None:
            leaves: list[Any] = list(arrays)
            for n, (path, x) in enumerate(named):
                if path in roles:
                    leaves[n] = Adapted(matrix=Labelled(leaves[n], _labels(x.shape)), path=path, roles=roles[path])
            run_adapted(program, leaves)

        jax.eval_shape(learn, *jax.tree.leaves((params, *args)))
        uses = dict(zip((path for path, _ in named), parameter_uses(program, len(named)), strict=True))
        return [_matrix(path, tuple(x.shape), roles[path], uses[path]) for path, x in named if path in roles]

    @staticmethod
    def with_rules(rules: Rules, matrices: Mapping[tuple[str, str], Matrix]) -> Rules:
        """The rules, and before them those of the factors of these matrices, by the paths of A and B."""
        made = [rule for (a, b), matrix in matrices.items() for rule in matrix.rules(rules, a, b)]
        return replace(rules, params=(*made, *rules.params))

    def update(self, a: jax.Array, b: jax.Array, *, scale: float, dropout: float = 0.0, key: jax.Array | None = None) -> Update:
        """The update scale · A · B of the matrix. key: the bits of random keys for dropout of A's input, [*stack, 2]."""
        return Update(matrix=self, a=a, b=b, scale=scale, dropout=dropout, key=key)

    @staticmethod
    def with_updates(fn: Callable[..., object], updates: Mapping[str, Update], packed: Mapping[str, Packing] = {}) -> Callable[..., Any]:
        """fn(params, ...) whose matmuls read these matrices, by path, with their updates. packed: those that are packed in params."""

        def like(path: KeyPath, x: Any) -> Any:
            packing = packed.get(path_text(path))
            return x if packing is None else jax.ShapeDtypeStruct(packing.unpacked(x.shape), jnp.float32)

        def matrix(path: str, x: Any) -> Any:
            if path in packed:
                x = Packed(x, packed[path], _packed_name(path))
            if path in updates:
                return updates[path].adapted(x)
            return Adapted(matrix=Labelled(x, _labels(x.shape)), path=path) if path in packed else x

        def call(params: object, *args: object) -> Any:
            program, tree = trace(fn, jax.tree.map_with_path(like, params), *args)
            leaves = [matrix(path, x) for path, x in _named(params)]
            return jax.tree.unflatten(tree, run_adapted(program, [*leaves, *jax.tree.leaves(args)]))

        return call

    def gathered(self, rules: Rules, batch: Collection[str]) -> list[SignalRule]:
        """The rules by which the matrix is gathered in its packed form, over the axes of the batch that `rules` split it over; or none."""
        sliced = self.use.sliced
        found = match_param(rules, self.path, self.use.signals, len(self.shape) - len(sliced))
        if found.rule is None:
            return []
        dims = [axes for n, axes in enumerate(found.rule.dims(len(self.shape), sliced)) if n not in sliced]
        spec = tuple(tuple(axis for axis in axes if axis not in batch) for axes in dims)
        if spec == tuple(dims):
            return []
        rule = SpecRule(pattern=_packed_name(self.path), spec=spec, where=found.rule.where)
        return [SignalRule(pattern=signal, tensors=(rule,), where=found.rule.where) for signal in self.use.signals]

    @property
    def fan_in(self) -> int:
        """The number of inputs of each output."""
        return math.prod(self.shape[n] for n in self.inputs)

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """A · B, with the dims of the matrix."""
        letters = dict(zip((*self.stack, *self.inputs, *self.outputs), string.ascii_lowercase, strict=False))
        of = {name: "".join(letters[n] for n in dims) for name, dims in (("s", self.stack), ("i", self.inputs), ("o", self.outputs))}
        whole = "".join(letters[n] for n in range(len(self.shape)))
        return jnp.einsum(f"{of['s']}{of['i']}Z,{of['s']}Z{of['o']}->{whole}", a, b, precision="highest")

    def rules(self, rules: Rules, a: str, b: str) -> list[SpecRule]:
        """The rules of its factors at these paths, as the matrix is laid out by `rules`; none for a factor that a rule of its own names."""
        sliced = self.use.sliced
        found = match_param(rules, self.path, self.use.signals, len(self.shape) - len(sliced))
        if found.rule is None:
            return []
        dims = found.rule.dims(len(self.shape), sliced)
        stack, inputs, outputs = ([dims[n] for n in own if n not in sliced] for own in (self.stack, self.inputs, self.outputs))
        made: list[SpecRule] = []
        for path, spec in ((a, (*stack, *inputs, ())), (b, (*stack, (), *outputs))):
            own = match_param(rules, path, self.use.signals, len(spec))
            # A pattern that matches the matrix as well is about the matrix.
            if own.rule is None or own.decided == found.decided:
                made.append(SpecRule(pattern=path, spec=spec, where=found.rule.where))
        return made


@dataclass(frozen=True, kw_only=True)
class Update:
    """The update scale · A · B of a matrix, as `Matrix.update` makes it."""

    matrix: Matrix
    a: jax.Array
    b: jax.Array
    scale: float
    dropout: float
    key: jax.Array | None

    def adapted(self, x: jax.Array | Packed) -> Adapted:
        """The matrix with this update. x: the parameter, also packed."""
        labels = _labels(self.matrix.shape)
        stack, inputs, outputs = ([labels[n] for n in dims] for dims in (self.matrix.stack, self.matrix.inputs, self.matrix.outputs))
        a, b = Labelled(self.a, (*stack, *inputs, RANK)), Labelled(self.b, (*stack, RANK, *outputs))
        key = None if self.key is None else Labelled(self.key, (*stack, KEY))
        path, scale = self.matrix.path, self.scale
        return Adapted(matrix=Labelled(x, labels), a=a, b=b, key=key, path=path, scale=scale, dropout=self.dropout)


def _packed_name(path: str) -> str:
    """The name of a packed matrix where a matmul reads it."""
    return f"packed.{path.replace('/', '.')}"


def _named(params: object) -> list[tuple[str, Any]]:
    return [(path_text(path), x) for path, x in cast("list[tuple[KeyPath, Any]]", jax.tree.leaves_with_path(params))]


def _labels(shape: Sequence[int]) -> tuple[Label, ...]:
    return tuple(((n,),) for n in range(len(shape)))


def _matrix(path: str, shape: tuple[int, ...], roles: Roles, use: Use) -> Matrix:
    inputs, outputs = sorted(roles.inputs), sorted(roles.outputs)
    problem = roles.problem or ("" if inputs else "is not read by a matmul")
    stack = tuple(n for n in range(len(shape)) if n not in roles.inputs | roles.outputs)
    return Matrix(path=path, shape=shape, stack=stack, inputs=tuple(inputs), outputs=tuple(outputs), use=use, problem=problem)
