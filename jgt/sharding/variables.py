"""Variables of Flax nnx among the arguments of a call: which arrays belong to them, which are state, and how they change.

An nnx module is a tree of `Variable`s, objects that the module's own methods change in place: BatchNorm its statistics, Dropout the count
of its random streams. A traced function sees copies, so a change has to leave the trace as a result and be stored in the caller's
variables afterwards, as `nnx.jit` does. What is not an `nnx.Param` is state: neither a parameter nor a part of the batch.

jgt does not import Flax. An argument can only contain variables if the caller has imported `flax.nnx`, and then Python's modules have it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax


def is_variable(x: object) -> bool:
    """Whether an object is a variable of nnx."""
    return _is_instance(x, "Variable")


def is_parameter(x: object) -> bool:
    """Whether an object is a variable of nnx that is trained."""
    return _is_instance(x, "Param")


def _is_instance(x: object, name: str) -> bool:
    kind = getattr(sys.modules.get("flax.nnx"), name, None)
    return kind is not None and isinstance(x, kind)


class Variables:
    """The variables in a tree of arguments, by the numbers of the leaves that they contain."""

    def __init__(self, tree: object):
        nodes: list[Any] = jax.tree.leaves(tree, is_leaf=is_variable)
        self._tree: Any = jax.tree.structure(tree, is_leaf=is_variable)
        # Each node with the number of its first leaf, and the number after its last one.
        self._spans: list[tuple[Any, int, int]] = []
        self._owners: list[Any] = []
        for node in nodes:
            size = len(jax.tree.leaves(node)) if is_variable(node) else 1
            self._spans.append((node, len(self._owners), len(self._owners) + size))
            self._owners += [node if is_variable(node) else None] * size
        first: dict[int, int] = {}
        # State that occurs twice is one variable to the function: a change through one path shows through the other. Parameters are not
        # changed in place, and each path of a shared one has a layout to be checked.
        self._same = [
            first.setdefault(id(node), start) if is_variable(node) and not is_parameter(node) else start for node, start, _ in self._spans
        ]

    def owner(self, leaf: int) -> Any:
        """The variable that a leaf belongs to; None if there is none."""
        return self._owners[leaf]

    def sharing(self) -> tuple[int, ...]:
        """Which leaves are one variable: equal for trees whose variables are shared in the same way."""
        return tuple(self._same)

    def is_repeated(self, leaf: int) -> bool:
        """Whether a leaf is part of a state variable that occurred before."""
        return any(start <= leaf < end and same != start for (_, start, end), same in zip(self._spans, self._same, strict=True))

    def rebuilt(self, tree: Any, leaves: Sequence[Any]) -> Any:
        """The tree with these leaves; state that occurred twice is one variable again."""
        if all(same == start for (_, start, _), same in zip(self._spans, self._same, strict=True)):
            return jax.tree.unflatten(tree, leaves)
        made: dict[int, Any] = {}
        for (node, start, end), same in zip(self._spans, self._same, strict=True):
            made.setdefault(same, _with_leaves(node, leaves[start:end]) if is_variable(node) else leaves[start])
        return jax.tree.unflatten(self._tree, [made[same] for same in self._same])

    def store(self, values: Mapping[int, Any]) -> None:
        """Stores new values, by leaf, in the caller's variables."""
        for node, start, end in self._spans:
            if any(leaf in values for leaf in range(start, end)):
                leaves = [values.get(start + n, old) for n, old in enumerate(jax.tree.leaves(node))]
                # The raw value: the hooks of the variable ran inside the function.
                node.set_raw_value(_with_leaves(node, leaves).get_raw_value())


def _with_leaves(variable: Any, leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(cast(Any, jax.tree.structure(variable)), leaves)
