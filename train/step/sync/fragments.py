"""Fragments: the parts of the parameters that are exchanged one after another within a phase (streaming DiLoCo, arXiv 2501.18512).

With `sync: {every: 50, fragments: 5}` a fifth of the parameters is exchanged after 10 steps, the next fifth after 20. Each fifth is still
exchanged every 50 steps, and no exchange is larger than a fifth. A fragment has a run of entries of each array, along a dim that no
mesh axis splits, so that cutting it out moves nothing between devices: of stacked layers these are some layers. An array that cannot be cut
belongs to one fragment as a whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding

from ..state import Tree


@dataclass(frozen=True)
class Cut:
    """A run of entries along a dim of an array."""

    dim: int
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """A part of the parameters. cuts: by the number of a leaf; None: all of it."""

    cuts: Mapping[int, Cut | None]

    def cut(self, tree: object, *, lead: int = 0) -> list[jax.Array]:
        """The parts of this fragment of a tree's leaves. lead: the dims in front of the parameters' own."""
        leaves = jax.tree.leaves(tree)
        return [_cut(leaves[n], cut, lead) for n, cut in self.cuts.items()]

    def paste(self, tree: object, parts: Sequence[jax.Array], *, lead: int = 0) -> Tree:
        """The tree with other parts of this fragment."""
        leaves, structure = jax.tree.flatten(tree)
        for (n, cut), part in zip(self.cuts.items(), parts, strict=True):
            leaves[n] = part if cut is None else jax.lax.dynamic_update_slice_in_dim(leaves[n], part, cut.start, cut.dim + lead)
        return jax.tree.unflatten(structure, leaves)

    def of_shardings(self, shardings: object) -> list[NamedSharding]:
        """The shardings of the parts: no axis splits a dim that is cut."""
        leaves = jax.tree.leaves(shardings)
        return [leaves[n] for n in self.cuts]

    def numbers(self, shapes: object, shardings: object) -> int:
        """The size of the fragment on one device."""
        leaves, places = jax.tree.leaves(shapes), jax.tree.leaves(shardings)
        return sum(
            _local(leaves[n], places[n]) * (cut.size if cut else 1) // (leaves[n].shape[cut.dim] if cut else 1)
            for n, cut in self.cuts.items()
        )


def fragments_of(shapes: object, shardings: object, count: int) -> tuple[Fragment, ...]:
    """Divides parameters of these shapes into `count` fragments of about equal size on a device."""
    leaves, places = jax.tree.leaves(shapes), jax.tree.leaves(shardings)
    cuts: list[dict[int, Cut | None]] = [{} for _ in range(count)]
    filled = [0] * count
    whole: list[tuple[int, int]] = []
    for n, (x, place) in enumerate(zip(leaves, places, strict=True)):
        dim = _dim_to_cut(x.shape, place, count)
        if dim is None:
            whole.append((_local(x, place), n))
            continue
        ends = [round(x.shape[dim] * part / count) for part in range(count + 1)]
        for part, (start, end) in enumerate(itertools.pairwise(ends)):
            cuts[part][n] = Cut(dim, start, end - start) if count > 1 else None
            filled[part] += _local(x, place) // x.shape[dim] * (end - start)
    # The largest first, each to the fragment that has least.
    for size, n in sorted(whole, reverse=True):
        part = filled.index(min(filled))
        cuts[part][n] = None
        filled[part] += size
    return tuple(Fragment(cuts=dict(sorted(of.items()))) for of in cuts)


def _dim_to_cut(shape: tuple[int, ...], place: NamedSharding, count: int) -> int | None:
    """The dim whose parts are the most equal; None if no dim without an axis has an entry for each part."""
    local = place.shard_shape(shape)
    free = [dim for dim, size in enumerate(shape) if size >= count and local[dim] == size]
    return min(free, key=lambda dim: math.ceil(shape[dim] / count) / shape[dim], default=None)


def _local(x: jax.ShapeDtypeStruct, place: NamedSharding) -> int:
    return math.prod(place.shard_shape(x.shape))


def _cut(x: jax.Array, cut: Cut | None, lead: int) -> jax.Array:
    return x if cut is None else jax.lax.slice_in_dim(x, cut.start, cut.start + cut.size, axis=cut.dim + lead)
