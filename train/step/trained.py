"""The parameters that a run trains, and those that it freezes (`optimizer.train`).

A state has them as two trees, nested dicts of which each has only its own entries. Everything that a step makes of the trained ones has
their tree: gradients, moments, averages, what replicas exchange. So a frozen parameter costs its own bytes and nothing else. The model
reads both trees, merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jgt import matches_end, path_text
from jgt.document import InputError, nearest

from ..models.model import Model
from .state import Tree


@dataclass(frozen=True)
class Trained:
    """Which parameters are trained: those whose path ends as one of the patterns says, or with None all."""

    patterns: tuple[str, ...] | None = None

    def has(self, path: str) -> bool:
        """Whether the parameter at a path is trained."""
        return self.patterns is None or any(matches_end(pattern, path) for pattern in self.patterns)

    def split(self, tree: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """The entries of the trained parameters and those of the frozen ones, in a tree by parameter."""
        return divided(tree, self.has)

    def of(self, tree: Any) -> dict[Any, Any]:
        """The entries of the trained parameters in a tree by parameter."""
        return self.split(tree)[0]

    def problems(self, paths: Sequence[str]) -> Iterator[str]:
        """Patterns that match none of the paths of a model's parameters, or no patterns."""
        if self.patterns == ():
            yield "[] freezes all parameters, so there is nothing to train. Name patterns, or null for all parameters"
        for pattern in self.patterns or ():
            if not any(matches_end(pattern, path) for path in paths):
                yield f"no parameter matches {pattern!r}. {nearest(pattern, _possible(paths))}"

    def frozen_in(self, model: Model, dtype: jax.typing.DTypeLike) -> Model:
        """The model with its frozen parameters in another type, if they are floats."""

        def cast(path: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array:
            is_cast = jnp.issubdtype(x.dtype, jnp.floating) and not self.has(path_text(path))
            return x.astype(dtype) if is_cast else x

        def init(key: jax.Array) -> tuple[Tree, Tree]:
            params, variables = model.init(key)
            return jax.tree.map_with_path(cast, params), variables

        return replace(model, init=init)


def with_frozen(model: Model, trained: Trained, dtype: str, where: Callable[[str], str]) -> Model:
    """The model with its frozen parameters in `dtype`, that is `model.base_dtype`. Raises InputError if they are none or all."""
    params, _ = jax.eval_shape(model.init, jax.eval_shape(jax.random.key, 0))
    paths = [path_text(path) for path, _ in jax.tree.leaves_with_path(params)]
    problems = [f"{where('optimizer.train')}: optimizer.train: {problem}" for problem in trained.problems(paths)]
    if dtype != "f32" and all(map(trained.has, paths)):
        remedy = "Name those to train in optimizer.train, or remove the key"
        why = "is the type of frozen parameters, and all parameters are trained"
        problems.append(f"{where('model.base_dtype')}: model.base_dtype: {dtype} {why}. {remedy}")
    if problems:
        raise InputError(problems)
    return model if dtype == "f32" else trained.frozen_in(model, jnp.bfloat16)


def divided(tree: Mapping[Any, Tree], is_first: Callable[[str], bool], path: str = "") -> tuple[dict[Any, Tree], dict[Any, Tree]]:
    """Nested dicts as two, by the paths of their leaves. A dict without leaves is in the first."""
    first: dict[object, Tree] = {}
    second: dict[object, Tree] = {}
    for name, x in tree.items():
        below = f"{path}/{name}" if path else str(name)
        if not isinstance(x, Mapping):
            (first if is_first(below) else second)[name] = x
            continue
        of_first, of_second = divided(x, is_first, below)
        first |= {name: of_first} if of_first or not of_second else {}
        second |= {name: of_second} if of_second else {}
    return first, second


def merged(tree: Tree, other: Tree) -> Tree:
    """Nested dicts with the leaves of both; where both have one, the other's."""
    if not isinstance(tree, Mapping) or not isinstance(other, Mapping):
        return other
    return {**tree, **other, **{name: merged(tree[name], other[name]) for name in tree.keys() & other.keys()}}


def _possible(paths: Sequence[str]) -> Iterator[str]:
    """Patterns that match some of the paths: a path, its end, or what is below a part of it."""
    for path in paths:
        names = path.split("/")
        yield from ("/".join(names[n:]) for n in range(len(names)))
        yield from ("/".join([*names[:n], "**"]) for n in range(1, len(names)))
