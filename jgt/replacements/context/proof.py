# pyright: basic
"""Proves that equations between q, k, v and the heads are attention, and finds its scale and which keys a query sees.

A model may call a library's function or have attention written out; nothing asks how. The equations are run on random numbers, and so is
the definition, softmax(scale · q kᵀ where seen) v. Where both agree to the last digits of f32, the equations are attention. To run them at
the traced sizes would take an array of all scores, so they run for a few dozen positions of the sequence (`walk`), and in f32, which makes
the comparison sharp.

The scale is measured: where one key has another score than all others, its share of the output gives the ratio of their weights. It is
then one of the numbers in the equations, or a product or ratio of two, or the root of the head size, and that number is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from jgt.program import jaxpr as jx
from jgt.program.equations import has_custom_derivative, is_call, is_remat
from jgt.program.jaxpr import Equation, Program, Var
from jgt.program.parts import Flat, flatten
from jgt.replacements.context import cudnn
from jgt.replacements.context.blocks import XLA_BLOCKS
from jgt.replacements.context.bounds import possible_pairs
from jgt.replacements.context.pairs import Operand, SeenPairs, UnreadableError
from jgt.replacements.context.walk import AttentionWalk

_MOST = 48
"""The positions of the comparison."""
_SAMPLE = 512
"""The positions at which it is asked what queries see."""
_TOLERANCE = 2e-5
_known: dict[str, tuple[float, bool, bool, int | None]] = {}
"""The scale, is_causal, is_plain and window of what was proven in this process, by the text of the equations."""


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention as its equations have it.

    is_causal: whether no query sees a later key. is_plain: whether a query sees all keys, or with is_causal all up to its own. window: the
    number of positions that a query sees, its own included, if it is the same for all; None: any number. sink: the variable with the n
    scores of a sink (`Block.with_sink`). is_fused: whether the model calls cuDNN's kernel.
    """

    scale: float
    pairs: SeenPairs
    is_causal: bool
    is_plain: bool
    window: int | None
    sink: Var | None
    is_fused: bool

    @property
    def operands(self) -> list[Var]:
        """The variables that attention reads beside q, k and v."""
        return [*(one.var for one in self.pairs.operands), *([] if self.sink is None else [self.sink])]

    def seen(self, queries: jax.Array, keys: jax.Array, operands: Sequence[jax.Array]) -> jax.Array | None:
        """bool[b or 1, queries, keys] for positions; None where `is_plain` says it."""
        return None if self.is_plain else self.pairs.seen(queries, keys, operands)


def attention_in(program: Program) -> Attention:
    """The attention that a program of q, k and v [b, s, heads, h], and of other values that it reads, is.

    Raises UnreadableError for anything else.
    """
    region = _Region(flatten(program, _is_dissolved))
    # A new thread has no trace around it, so operations there run.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(region.attention).result()


def _is_dissolved(equation: Equation) -> bool:
    return is_call(equation) or has_custom_derivative(equation) or is_remat(equation)


@dataclass
class _Region:
    """The equations of a program, flat."""

    flat: Flat

    def attention(self) -> Attention:
        """See `attention_in`."""
        with jax.default_device(jax.local_devices(backend="cpu")[0]), jax.default_matmul_precision("highest"):
            walk, text = AttentionWalk(self.flat), str(self.flat.program)
            self._discover(walk)
            pairs = SeenPairs(walk.source, tuple(walk.conditions), *walk.fused_mask)
            # The text has no numbers of arrays.
            found = None if self.flat.consts else _known.get(text)
            scale, is_causal, is_plain, window = found = found or (self._scale(walk, pairs), *self._sight(pairs))
            if not self.flat.consts:
                _known[text] = found
            sink = None if walk.sink is None else walk.sink.var
            return Attention(scale, pairs, is_causal, is_plain, window, sink, walk.is_fused)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of q, k and v."""
        return [jx.shape_of(var) for var in self.flat.invars[:3]]

    @cached_property
    def sizes(self) -> dict[str | None, int]:
        """The sizes of dims in the comparison, by their labels."""
        b, s = self.shapes[0][:2]
        return {"batch": min(b, 2), "queries": min(s, _MOST), "keys": min(s, _MOST)}

    def _positions(self, most: int) -> np.ndarray:
        """Positions in order: the first ones, the last ones, and neighbours anywhere."""
        s = self.shapes[0][1]
        if s <= most:
            return np.arange(s, dtype=np.int32)
        near = np.random.default_rng(s).choice(s - 1, most // 4, replace=False)
        some = np.unique(np.concatenate([np.arange(most // 4), np.arange(s - most // 4, s), near, near + 1]))
        # A fixed number of them, and always the last one.
        return np.concatenate([some, np.setdiff1d(np.arange(2 * most), some)[: most - len(some)]]).astype(np.int32)

    def _draw(self, operand: Operand, positions: np.ndarray, seed: int) -> np.ndarray:
        """Random numbers for an operand. Documents begin where integers change, and each token sees itself."""
        rng, labels = np.random.default_rng([seed, len(positions)]), operand.labels
        sizes = {**self.sizes, "queries": len(positions), "keys": len(positions)}
        shape = [sizes[label] if label else size for size, label in operand.dims]
        dtype = jx.dtype_of(operand.var)
        if dtype is np.dtype(bool):
            some = rng.random(shape) < 0.7
            if {"queries", "keys"} <= set(labels):
                eye = np.eye(len(positions), dtype=bool)
                some |= np.expand_dims(eye, [n for n, label in enumerate(labels) if label not in ("queries", "keys")])
            return some
        if jnp.issubdtype(dtype, jnp.integer):
            return (
                np.sort(rng.integers(0, 4, shape), axis=operand.rows if operand.rows is not None else -1).astype(dtype)
                if shape
                else (np.asarray(rng.integers(1, 2 + seed * 8), dtype))
            )
        return rng.standard_normal(shape).astype(np.float32)

    def _noise(self, seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        shapes = [(self.sizes["batch"], self.sizes["keys"], *shape[2:]) for shape in self.shapes]
        return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

    def _discover(self, walk: AttentionWalk) -> None:
        """Lets the walk find the conditions and everything that it reads."""
        positions = self._positions(_MOST)

        def read(operand: Operand) -> jax.Array:
            walk.operands[operand] = None
            return jnp.asarray(self._draw(operand, positions, 0))

        jax.eval_shape(lambda q, k, v, at: walk.run(q, k, v, at, read), *self._noise(0), positions)
        if walk.sink is not None and math.prod(jx.shape_of(walk.sink.var)) != self.shapes[0][2]:
            raise UnreadableError(f"its sink has the shape {list(jx.shape_of(walk.sink.var))}, not one number for each head")

    def _scale(self, walk: AttentionWalk, pairs: SeenPairs) -> float:
        """The factor of the scores. Raises UnreadableError where the definition with it is something else than the equations."""
        positions, (q, k, v) = self._positions(_MOST), (np.zeros_like(x) for x in self._noise(0))

        @jax.jit
        def both(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, values: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            known = dict(zip(walk.operands, values, strict=True))
            at = jnp.asarray(positions)
            seen = pairs.seen(at, at, [self._of_positions(known[one], one, positions) for one in pairs.operands])
            block = XLA_BLOCKS.forward(q, k, v, seen, False, scale)
            block = block if walk.sink is None else block.with_sink(jnp.ravel(known[walk.sink]).astype(jnp.float32))
            return walk.run(q, k, v, positions, known.__getitem__), block.out

        drawn = [[self._draw(one, positions, seed) for one in walk.operands] for seed in range(3)]
        k[:, -1, :, 0] = v[:, -1, :, 0] = 1

        def log_ratio(factor: float) -> float:
            q[..., 0] = factor
            share = float(both(q, k, v, 1.0, drawn[0])[0][0, -1, 0, 0])
            return math.log(share / (1 - share)) if 0 < share < 1 else math.inf

        rest = log_ratio(0.0)
        rough = (log_ratio(0.1) - rest) / 0.1
        if not math.isfinite(rough) or rough == 0:
            raise UnreadableError("the weights of keys do not grow with their products with the query as a softmax's do")
        measured = (log_ratio(1 / rough) - rest) * rough
        scale = min(self._candidates(), key=lambda one: abs(one - measured))
        if abs(scale / measured - 1) > 1e-3:
            raise UnreadableError(f"the factor of its scores, about {measured:.4g}, follows from no number in it")
        for seed in (1, 2):
            q, k, v = self._noise(seed)
            # Scores of a few units: the weights differ, and none is all.
            found, wanted = both(q * 2 / (scale * math.sqrt(q.shape[-1])), k, v, scale, drawn[seed])
            error, most = float(jnp.max(jnp.abs(found - wanted))), float(jnp.max(jnp.abs(wanted)))
            if not error <= _TOLERANCE * most:
                raise UnreadableError(
                    f"it is not softmax(scale · q · k) · v: results differ by {error:.2g}, where the largest is {most:.2g}"
                )
        return scale

    def _candidates(self) -> list[float]:
        known = {1.0, self.shapes[0][-1] ** -0.5}
        for equation in self.flat.eqns:
            for atom in equation.invars:
                if not jx.is_var(atom) and jnp.issubdtype(jx.dtype_of(atom), jnp.floating) and 1e-6 < abs(float(atom.val)) < 1e6:
                    known.add(abs(float(atom.val)))
            if cudnn.is_attention(equation):
                known.add(cudnn.options(equation)[0])
        return [value for a, b in itertools.product(known, known) for value in (a * b, a / b, 1 / (a * b))]

    def _of_positions(self, x: jax.Array, operand: Operand, positions: np.ndarray) -> jax.Array:
        """The value of an operand as `SeenPairs.seen` takes it: where it has queries and keys, with all keys of the sequence."""
        if not {"queries", "keys"} <= set(operand.labels):
            return jnp.asarray(x)
        dim = operand.labels.index("keys")
        shape = list(x.shape)
        shape[dim] = self.shapes[1][1]
        return jnp.zeros(shape, x.dtype).at[(slice(None),) * dim + (positions,)].set(x)

    def _sight(self, pairs: SeenPairs) -> tuple[bool, bool, int | None]:
        """is_causal, is_plain and window, see `Attention`. They hold whatever the operands are."""
        positions = self._positions(_SAMPLE)
        behind = positions[:, None] - positions
        found = jax.jit(lambda at: possible_pairs(pairs, at, at))(jnp.asarray(positions))
        possible = np.ones((1, 1, 1), bool) if found is None else np.asarray(found)
        is_causal = not (possible & (behind < 0)).any()
        is_plain = not pairs.operands and bool((possible == (behind >= 0 if is_causal else True)).all())
        window = None if is_plain else self._window(pairs)
        is_bounded = window is not None and not (possible & (behind >= window)).any()
        return is_causal, is_plain, window if is_bounded else None

    def _window(self, pairs: SeenPairs) -> int | None:
        """The number of positions that each query sees in a row of one document, if that is one number."""
        s = self.shapes[0][1]
        if any(one.rows is None or {"queries", "keys"} <= set(one.labels) for one in pairs.operands):
            return None
        zeros = [jnp.zeros([1 if label else size for size, label in one.dims], jx.dtype_of(one.var)) for one in pairs.operands]
        run = jax.jit(lambda query: pairs.seen(query, jnp.arange(s), zeros))
        found: set[int] = set()
        for query in (s - 1, s - 1 - s // 4):
            seen = np.asarray(run(jnp.array([query]))).reshape(-1, s)[0]
            count = int(seen.sum())
            if not seen[query - count + 1 : query + 1].all():
                return None
            found.add(count)
        return found.pop() if len(found) == 1 else None
