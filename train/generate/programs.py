"""The compiled programs of generation: texts are read into a cache, and then each step writes one token of every row.

    read    texts [r, s] → logits and their part of a cache; for each number of rows and length, rounded up to powers of two
    enter   puts rows of such a part into the cache of the batch, and draws their first tokens
    write   one more token of every row, which is drawn on the devices

The parameters are laid out once by the rules of generation, and in the type in which the model reads them. Whatever the host gets or gives
is small and replicated, so all processes of a run can call these functions together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import jgt
from jgt import Rules

from ..models.model import Model
from ..step.state import Tree
from .caching import Caching, Result
from .draw import DrawSettings, draw

Drawn = tuple[jax.Array, jax.Array]
"""The token of each row, int32[b], and the logarithm of its probability, f32[b]."""


class TextState(NamedTuple):
    """The state of a batch between steps: the cache, its tokens and the ones drawn last, int32[b], and those of each text, bool[b, v]."""

    cache: Any
    lengths: Any
    tokens: Any
    used: Any


@dataclass(frozen=True, kw_only=True, eq=False)
class TextPrograms:
    """The programs of a model on a mesh. batch: the axes of rows. known: the number of the tokenizer's ids. pads: as in `jgt.shard`.

    gathers: the rules split parameters as in training, and each step gathers them, which needs no memory for a second layout.
    """

    model: Model
    caching: Caching
    rules: Rules
    mesh: Mesh | AbstractMesh
    batch: tuple[str, ...]
    vocab: int
    known: int
    pads: bool = False
    gathers: bool = False

    @property
    def shards(self) -> int:
        """The number of devices that rows are split over."""
        return math.prod(self.mesh.shape.get(axis, 1) for axis in self.batch)

    def rows(self, count: int) -> int:
        """The number of rows for this many texts, so that the mesh splits equal parts."""
        return -(-count // self.shards) * self.shards

    def layout(self, params: Tree, variables: Tree) -> tuple[Tree, Tree]:
        """The model's arrays as the programs take them: shapes, types and shardings. params, variables: arrays or shapes."""
        rows = jax.ShapeDtypeStruct((self.shards,), jnp.int32)
        cache = self._cache_shapes(params, variables, self.shards, self.caching.longest)
        placement = self._written.placement(params, variables, cache, rows, rows)
        reads = {} if self.gathers else {p.path: p.read.dtype for p in placement.parameters if p.read is not None}

        def placed(path: jax.tree_util.KeyPath, x: jax.Array | jax.ShapeDtypeStruct, to: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, reads.get(jgt.path_text(path), x.dtype), sharding=to)

        shapes = jax.tree.map_with_path(placed, params, placement.params)
        return shapes, jax.tree.map(_shaped, variables, placement.inputs(variables, "variables"))

    def placed(self, params: Tree, variables: Tree) -> tuple[Tree, Tree]:
        """The model's arrays as the programs take them."""
        shapes, others = self.layout(params, variables)
        shardings, variables = (
            jax.tree.map(lambda x: x.sharding, shapes),
            jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), variables, others),
        )
        if self.gathers:
            return jax.device_put(params, shardings), variables

        def cast(params: Tree) -> Tree:
            return jax.tree.map(lambda x, to: x.astype(to.dtype), params, shapes)

        return jax.jit(cast, out_shardings=shardings)(params), variables

    def state(self, params: Tree, variables: Tree, rows: int, slots: int) -> TextState:
        """The shapes and shardings of the state of a batch. params, variables: arrays or shapes."""
        cache, ints = self._cache_shapes(params, variables, rows, slots), jax.ShapeDtypeStruct((rows,), jnp.int32)
        shapes = TextState(cache, ints, ints, jax.ShapeDtypeStruct((rows, self.vocab), jnp.bool))
        return jax.tree.map(_shaped, shapes, self._shardings(shapes))

    def empty(self, params: Tree, variables: Tree, rows: int, slots: int) -> TextState:
        """The state of a batch without texts."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self.state(params, variables, rows, slots))

    @functools.cached_property
    def grow(self) -> Callable[[TextState, int], TextState]:
        """(state, slots) → the same state with more slots."""

        def grow(state: TextState, slots: int) -> TextState:
            assert self.caching.grown is not None
            cache = self.caching.grown(state.cache, slots)
            return state._replace(cache=jax.lax.with_sharding_constraint(cache, self._shardings(cache)))

        return jax.jit(grow, static_argnums=1)

    @functools.cached_property
    def move(self) -> Callable[[TextState, np.ndarray], TextState]:
        """(state, index [b]) → a state of b rows, of which row i is row index[i] of the old one."""

        def moved(dim: int, x: jax.Array, index: jax.Array) -> jax.Array:
            return jnp.take(x, index, axis=dim) if x.ndim else x

        def move(state: TextState, index: jax.Array) -> TextState:
            cache = jax.tree.map(lambda x: moved(self.caching.rows_dim, x, index), state.cache)
            after = TextState(cache, *(moved(0, x, index) for x in state[1:]))
            return jax.lax.with_sharding_constraint(after, self._shardings(after))

        return jax.jit(move)

    @functools.cached_property
    def read(self) -> Callable[..., Result]:
        """(params, variables, tokens [r, s], lengths [r], step, slots) → logits [r, v] and a cache of these rows."""
        return jax.jit(self._read, static_argnums=5)

    @functools.cached_property
    def enter(self) -> Callable[..., tuple[TextState, Drawn]]:
        """(state, cache, logits, tokens [r, s], lengths [r], index [b], settings) → the state with these rows, and their first tokens.

        index: for each row of the state, the new row that takes its place; -1 for a row that remains.
        """
        return jax.jit(self._enter, donate_argnums=0)

    @functools.cached_property
    def write(self) -> Callable[..., tuple[TextState, Drawn]]:
        """(params, variables, state, settings) → the state after one more token of every row, and the tokens drawn next."""

        def write(params: Tree, variables: Tree, state: TextState, settings: DrawSettings) -> tuple[TextState, Drawn]:
            logits, cache = self._written(params, variables, state.cache, state.tokens, state.lengths)
            lengths = jnp.where(settings.is_live, state.lengths + 1, 0)
            return self._drawn(logits, TextState(cache, lengths, state.tokens, state.used), settings)

        return jax.jit(write, donate_argnums=2)

    def _read(self, params: Tree, variables: Tree, tokens: jax.Array, lengths: jax.Array, step: jax.Array, slots: int) -> Result:
        sharded = jgt.shard(self._reader(slots), self.rules, self.mesh, state=["variables", "step"], partial=True, pad=self.pads)
        logits, cache = sharded(params, variables, tokens, lengths, step)
        return logits, jax.lax.with_sharding_constraint(cache, self._shardings(cache))

    def _enter(
        self,
        state: TextState,
        cache: Tree,
        logits: jax.Array,
        tokens: jax.Array,
        lengths: jax.Array,
        index: jax.Array,
        settings: DrawSettings,
    ) -> tuple[TextState, Drawn]:
        is_new, chosen = index >= 0, jnp.maximum(index, 0)

        def entered(dim: int, old: jax.Array, new: jax.Array) -> jax.Array:
            if not old.ndim:
                return old
            shape = [-1 if n == dim else 1 for n in range(old.ndim)]
            return jnp.where(is_new.reshape(shape), jnp.take(new, chosen, axis=dim), old)

        rows = functools.partial(entered, 0)
        words = jnp.where(jnp.arange(tokens.shape[1])[None, :] < lengths[:, None], tokens, self.vocab)
        used = jnp.zeros((len(tokens), self.vocab), bool).at[jnp.arange(len(tokens))[:, None], words].set(True, mode="drop")
        state = state._replace(
            cache=jax.tree.map(functools.partial(entered, self.caching.rows_dim), state.cache, cache),
            lengths=rows(state.lengths, lengths),
            used=rows(state.used, used),
        )
        return self._drawn(jnp.take(logits, chosen, axis=0), state, settings, is_new)

    def _drawn(
        self, logits: jax.Array, state: TextState, settings: DrawSettings, draws: jax.Array | bool = True
    ) -> tuple[TextState, Drawn]:
        """The state after a token of each row that draws, and tokens and logarithms of all rows."""
        # A sort over a dim that is split would be one over all devices.
        logits = jax.lax.with_sharding_constraint(logits, self._sharding(self.batch))
        tokens, logs = draw(logits, state.used, state.lengths, settings, self.known)
        tokens = jnp.where(draws, tokens, state.tokens)
        used = state.used | (jnp.arange(self.vocab)[None, :] == tokens[:, None])
        after = TextState(state.cache, state.lengths, tokens, used)
        after = jax.lax.with_sharding_constraint(after, self._shardings(after))
        return after, jax.lax.with_sharding_constraint((tokens, logs), self._sharding())

    def _sharding(self, *axes: tuple[str, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*(of_dim or None for of_dim in axes)))

    def _shardings(self, tree: Any) -> Any:
        """The shardings of a state, or of a cache alone."""
        if isinstance(tree, TextState):
            rows = self._sharding(self.batch)
            return TextState(self._shardings(tree.cache), rows, rows, rows)

        def of_cache(path: jax.tree_util.KeyPath, x: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
            rule = self.rules.match_input(f"cache/{jgt.path_text(path)}", x.ndim, is_state=True).rule
            return self._sharding(*(() if rule is None else rule.dims(x.ndim)))

        return jax.tree.map_with_path(of_cache, tree)

    @functools.cached_property
    def _written(self) -> jgt.Sharded[..., Result]:
        def write(params: Tree, variables: Tree, cache: Tree, tokens: jax.Array, lengths: jax.Array) -> Result:
            return self.model.run(lambda m: self.caching.write(m, tokens, lengths, cache), params, variables, False)[0]

        return jgt.shard(write, self.rules, self.mesh, state=["variables", "cache"], partial=True, pad=self.pads)

    def _reader(self, slots: int) -> Callable[[Tree, Tree, jax.Array, jax.Array, jax.Array], Result]:
        def read(params: Tree, variables: Tree, tokens: jax.Array, lengths: jax.Array, step: jax.Array) -> Result:
            return self.model.run(lambda m: self.caching.read(m, tokens, lengths, step, slots), params, variables, False)[0]

        return read

    def _cache_shapes(self, params: Tree, variables: Tree, rows: int, slots: int) -> Tree:
        tokens, ints, step = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, slots), (rows,), ()))
        return jax.eval_shape(self._reader(slots), params, variables, tokens, ints, step)[1]


def _shaped(x: jax.Array | jax.ShapeDtypeStruct, to: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to)
