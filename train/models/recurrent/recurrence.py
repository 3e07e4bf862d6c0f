"""Linear attention as a recurrence: each head keeps one matrix S [h, e] of all earlier tokens, which decays, and to which a token adds.

    S ← exp(decay) S        S ← S + k ⊗ beta (v - Sᵀk)        y = Sᵀq

That is the gated delta rule (arXiv 2412.06464): what S has for the key k is moved towards v. Without `beta` a token adds k ⊗ v, as in
Mamba-2 (arXiv 2405.21060). Token by token it would be a chain of small products. So tokens are cut into chunks, and within one, what tokens
add follows from a triangular system, whose inverse is made of matmuls. A scan over chunks carries S, in f32, with few matmuls each. Its
time and memory grow with the number of tokens, not with its square.

A document begins with S = 0: its tokens see neither the tokens of the chunk that belong to another one, nor S from before its beginning.

b batch, s tokens, k heads of keys, g heads of values of each, h key size, e value size, z chunks, c tokens of a chunk.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64
_dot = partial(jnp.einsum, preferred_element_type=jnp.float32)
# A rounding to fewer bits would grow with each level of the inverse.
_exact = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class TokenSteps(NamedTuple):
    """The steps of tokens: q and k [b, s, k, h], v [b, s, k, g, e], in f32 decay (a logarithm, at most 0) and beta or None [b, s, k, g]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    beta: jax.Array | None


class _Chunks(NamedTuple):
    """The parts of chunks that the scan over them reads, with a leading dim of chunks."""

    q: jax.Array
    k: jax.Array
    added: jax.Array
    removed: jax.Array | None
    inner: jax.Array
    enters: jax.Array
    leaves: jax.Array
    keeps: jax.Array


def stepped(state: jax.Array, steps: TokenSteps) -> tuple[jax.Array, jax.Array]:
    """The state f32[b, k, g, h, e] after one token, and its values f32[b, 1, k, g, e]."""
    q, k, v = (x[:, 0].astype(jnp.float32) for x in steps[:3])
    state = state * jnp.exp(steps.decay[:, 0])[..., None, None]
    if steps.beta is not None:
        v = (v - _exact("bkghe,bkh->bkge", state, k)) * steps.beta[:, 0][..., None]
    state = state + k[:, :, None, :, None] * v[..., None, :]
    return state, _exact("bkghe,bkh->bkge", state, q)[:, None]


def chunked(steps: TokenSteps, segments: jax.Array | None = None, *, size: int = CHUNK) -> tuple[jax.Array, jax.Array]:
    """The state f32[b, k, g, h, e] after texts from their beginning, and the values f32[b, s, k, g, e]. segments: as in `Rows`."""
    seq = steps.q.shape[1]
    size = min(size, 1 << max(seq - 1, 1).bit_length())
    # Tokens of padding change nothing: they decay by 1 and add 0.
    parts = jax.tree.map(lambda x: _cut(x, size), steps)
    first = None if segments is None else _cut(segments, size, mode="edge")
    # Tokens are behind the heads.
    q, k, v = (jnp.moveaxis(x, 2, -2) for x in parts[:3])
    decay, beta = jax.tree.map(lambda x: jnp.moveaxis(x, 2, -1), parts[3:])
    chunks = _chunks(TokenSteps(q, k, v, decay, beta), first)

    def turn(state: jax.Array, chunk: _Chunks) -> tuple[jax.Array, jax.Array]:
        q, k, added, removed, inner, enters, leaves, keeps = chunk
        known = state.astype(q.dtype)
        if removed is not None:
            added = added - _dot("bkgch,bkghe->bkgce", removed, known)
        read = _dot("bkch,bkghe->bkgce", q, known) * enters[..., None]
        y = read + _dot("bkgij,bkgje->bkgie", inner, added.astype(q.dtype))
        more = _dot("bkch,bkgce->bkghe", k, (added * leaves[..., None]).astype(q.dtype))
        return state * keeps[..., None, None] + more, y

    (b, _, heads, h), (values, e) = steps.q.shape, steps.v.shape[3:]
    state, y = jax.lax.scan(turn, jnp.zeros((b, heads, values, h, e), jnp.float32), chunks)
    # [z, b, k, g, c, e] → [b, z, c, k, g, e]
    return state, jnp.moveaxis(y, (0, 4), (1, 2)).reshape(b, -1, heads, values, e)[:, :seq]


def _cut(x: jax.Array, size: int, mode: str = "constant") -> jax.Array:
    """[b, s, ...] → [z, b, c, ...]."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size), *[(0, 0)] * (x.ndim - 2)], mode=mode)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _chunks(steps: TokenSteps, first: jax.Array | None) -> _Chunks:
    """steps: q, k [z, b, k, c, h], v [z, b, k, g, c, e], decay and beta [z, b, k, g, c]. first: [z, b, c], where documents begin."""
    q, k, v, decay, beta = steps
    total, size = jnp.cumsum(decay, axis=-1), q.shape[3]
    pairs = jnp.tril(jnp.ones((1, 1, 1, 1, size, size), bool))
    enters, leaves, keeps = jnp.exp(total), jnp.exp(total[..., -1:] - total), jnp.exp(total[..., -1])
    if first is not None:
        pairs = pairs & (first[..., :, None] == first[..., None, :])[:, :, None, None]  # [z, b, 1, 1, c, c]
        is_older = first < size * jnp.arange(len(first))[:, None, None]
        enters = jnp.where(is_older[:, :, None, None], enters, 0)
        leaves = jnp.where((first == first[..., -1:])[:, :, None, None], leaves, 0)
        keeps = jnp.where(is_older[:, :, None, None, -1], keeps, 0)
    between = jnp.exp(jnp.where(pairs, total[..., :, None] - total[..., None, :], -jnp.inf))  # [z, b, k, g, c, c]
    inner = (_dot("zbkih,zbkjh->zbkij", q, k)[:, :, :, None] * between).astype(q.dtype)
    if beta is None:
        return _Chunks(q, k, v.astype(jnp.float32), None, inner, enters, leaves, keeps)
    alike = _dot("zbkih,zbkjh->zbkij", k, k)[:, :, :, None] * between * beta[..., None]
    solved = _inverse(jnp.tril(alike, -1)) * beta[..., None, :]
    added = _dot("zbkgij,zbkgje->zbkgie", solved.astype(v.dtype), v)
    removed = _dot("zbkgij,zbkjh->zbkgih", (solved * enters[..., None, :]).astype(k.dtype), k).astype(k.dtype)
    return _Chunks(q, k, added, removed, inner, enters, leaves, keeps)


@jax.custom_vjp
def _inverse(below: jax.Array) -> jax.Array:
    """(1 + below)⁻¹ of matrices [..., c, c] that are zero on the diagonal and above; c is a power of two.

    Twice as large blocks at each level: the inverse of [[A, 0], [C, B]] has -B⁻¹ C A⁻¹ below. Powers of `below` would overflow.
    """
    size = below.shape[-1]
    row, column = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    made, block = jnp.broadcast_to(jnp.eye(size, dtype=below.dtype), below.shape), 1
    while block < size:
        is_new = (row // block == column // block + 1) & (row // (2 * block) == column // (2 * block))
        part = jnp.where(jnp.broadcast_to(is_new, below.shape), below, 0)
        made = made - (part if block == 1 else _exact("...ij,...jk,...kl->...il", made, part, made))
        block *= 2
    return made


def _inverse_forward(below: jax.Array) -> tuple[jax.Array, jax.Array]:
    made = jnp.asarray(_inverse(below))
    return made, made


def _inverse_backward(made: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (-_exact("...ji,...jk,...lk->...il", made, g, made),)


_inverse.defvjp(_inverse_forward, _inverse_backward)
