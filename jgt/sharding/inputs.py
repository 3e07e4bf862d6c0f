"""The arguments of a function besides its parameters: how rules name them, which of them are state, and where they go.

Suppose f(params, state, batch) is called with dicts. A rule may name the array `batch["x"]` by the end of its path (`x`), by
the argument (`batch/x`), or by its position (`2/x`). `inputs: [batch, ...]` is meant for the batch, so it must not split `state`, which
has no rows: the caller says which arguments are state, and state is replicated unless a rule names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jgt.document import nearest
from jgt.program.dims import Dims
from jgt.rules import Match, Rules, SpecRule

KeyPath = tuple[Any, ...]
"""The keys that lead to a leaf, as jax.tree_util has them."""


Named = tuple[KeyPath, jax.Array | jax.ShapeDtypeStruct]
"""An array of a call, a tracer or a shape in its place, with its key path, which begins with its place among the arguments."""


def named_leaves(tree: object) -> tuple[list[tuple[KeyPath, Any]], Any]:
    """The leaves of a tree with their key paths, and the structure of the tree."""
    return cast("tuple[list[tuple[KeyPath, Any]], Any]", jax.tree.flatten_with_path(tree))


def path_text(path: KeyPath) -> str:
    """A key path of jax.tree_util as names joined by slashes, without the `value` that ends the path of a Flax variable."""
    # A key of a dict has `key`, one of an attribute has `name`, and one of a list has `idx`.
    names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    if len(names) > 1 and names[-1] in ("value", "raw_value"):
        names.pop()
    return "/".join(names)


StateArguments = str | int | Iterable[str | int] | None
"""The names or positions of the arguments that are state."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """An array among the arguments besides the parameters. name: as messages have it. paths: the paths by which a rule may name it.

    x: the array, a tracer or a shape in its place.
    """

    name: str
    paths: tuple[str, ...]
    x: jax.Array | jax.ShapeDtypeStruct
    is_state: bool = False

    @property
    def is_key(self) -> bool:
        """Whether it is a random key, of JAX's own type or as bits (uint32[2])."""
        return jnp.issubdtype(self.x.dtype, jax.dtypes.prng_key) or (self.x.dtype == np.uint32 and self.x.shape == (2,))

    def match(self, rules: Rules) -> tuple[Match[SpecRule], Dims]:
        """The rule and the dims of this input. Random keys are never sharded, and state only by a rule that names it."""
        # A spec such as [batch, ...] would otherwise split the two words of a key.
        first, *others = self.paths
        rank = len(self.x.shape)
        match = Match[SpecRule]() if self.is_key else rules.match_input(first, rank, *others, is_state=self.is_state)
        return match, () if match.rule is None else match.rule.dims(rank)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The names of a function's positional arguments, and the names and positions of those that are state."""

    names: tuple[str, ...] = ()
    state: frozenset[str | int] = frozenset()

    @classmethod
    def of(cls, fn: Callable[..., Any], state: StateArguments = None) -> Signature:
        """The signature of a function. Raises ValueError for state that is not one of its arguments, and TypeError for other values."""
        names, others, is_open = _parameters(fn)
        given: list[Any] = [state] if isinstance(state, str | int) else [] if state is None else list(state)
        names_and_positions: set[str | int] = set()
        for one in given:
            if isinstance(one, bool) or not isinstance(one, str | int):
                raise TypeError(f"state must be the name or the position of an argument, or several of them, not {one!r}")
            if isinstance(one, str) and one not in (*names, *others) and not is_open:
                raise ValueError(f"state: the function has no argument {one!r}. {nearest(one, [*names[1:], *others])}")
            position = names.index(one) if one in names else one
            if position == 0 or (isinstance(position, int) and position < 0):
                raise ValueError(f"state={one!r}: the first argument contains the parameters. State is an argument of its own, from 1 on")
            names_and_positions |= {one, position}
            names_and_positions |= {names[position]} if isinstance(position, int) and position < len(names) else set()
        return cls(names=names, state=frozenset(names_and_positions))

    def input(self, path: KeyPath, x: jax.Array | jax.ShapeDtypeStruct, *, is_state: bool = False) -> Input:
        """The input at this path, whose first two keys are 0 or 1 (positional or by keyword) and the position or the keyword."""
        below = path_text(path[2:])
        roots = self._roots(path_text(path[1:2]))
        # An input that is an array itself has no path below its argument.
        name = below or path_text(path[1:2])
        paths = tuple(f"{root}/{below}" if below else root for root in roots)
        return Input(name=name, paths=paths, x=x, is_state=is_state or self.is_state(path))

    def is_state(self, path: KeyPath) -> bool:
        """Whether the argument at this path is state."""
        key = getattr(path[1], "idx", getattr(path[1], "key", None))
        return key in self.state

    def path_to(self, argument: str | int | None) -> KeyPath:
        """The path of an argument, by name or position; without one, of the first that contains neither parameters nor state."""
        if argument is None:
            argument = next(n for n in range(1, len(self.names) + len(self.state) + 2) if n not in self.state)
        position = self.names.index(argument) if argument in self.names else argument
        if isinstance(position, int):
            return jax.tree_util.SequenceKey(0), jax.tree_util.SequenceKey(position)
        return jax.tree_util.SequenceKey(1), jax.tree_util.DictKey(position)

    def _roots(self, key: str) -> tuple[str, ...]:
        position = int(key) if key.isdecimal() else None
        # By name first: that is how a reader of the rules knows it.
        return (self.names[position], key) if position is not None and position < len(self.names) else (key,)


def _parameters(fn: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """The names of a function's positional arguments and of its others, and whether it takes any others."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    # Functions of C and some callables have no signature.
    except (TypeError, ValueError):
        return (), (), True
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    return tuple(positional), tuple(keywords), any(p.kind is p.VAR_KEYWORD for p in parameters)
