"""The stacks of a decoder's layers: which layers share a scan, and in what order.

Layers of several kinds have other parameters each, so one scan cannot run them as equal layers. But in most models they repeat: three
layers of linear attention and one of attention, for example. A scan runs such periods, and its body is one period, layer after layer.
Layers that do not repeat are several stacks, one behind another.

The parameters of a stack have a leading dim, its number of periods, whatever their kind: rules, checkpoints and pipelines see the scan over
equal layers that they see in any model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from .config import ModelConfig

_LONGEST_PERIOD = 16
_COST_OF_STACK = 3
"""The cost of a further scan, in layers that are compiled."""


@dataclass(frozen=True, kw_only=True)
class LayerStack:
    """A stack of layers, which one scan runs.

    name: the name of its parameters. first: the number of the first layer. kinds: the kinds of the layers of a period. count: the number of
    periods. is_dense: the layers have an ordinary MLP, whatever the others have.
    """

    name: str
    first: int
    kinds: tuple[str, ...]
    count: int
    is_dense: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each layer of a period below that of the stack; empty for a period of one layer, whose parameters are the stack's."""
        return tuple(f"{kind}_{n}" for n, kind in enumerate(self.kinds)) if len(self.kinds) > 1 else ("",)

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of the parameters of each layer of a period."""
        return tuple(f"{self.name}/{name}" if name else self.name for name in self.names)

    def layers(self, place: int) -> range:
        """The numbers of the layers at a place of the period."""
        return range(self.first + place, self.first + len(self.kinds) * self.count, len(self.kinds))


def stacks_of(config: ModelConfig) -> tuple[LayerStack, ...]:
    """The stacks of a decoder, in the order of its layers."""
    kinds, dense = config.kinds, 0 if config.experts is None else config.experts.first_dense
    first = _named("dense", 0, kinds[:dense], is_dense=True)
    return (*first, *_named("layers", dense, kinds[dense:]))


def _named(name: str, first: int, kinds: Sequence[str], *, is_dense: bool = False) -> Iterator[LayerStack]:
    parts = _parts(tuple(kinds))
    for number, (period, count) in enumerate(parts):
        own = name if len(parts) == 1 else f"{name}_{number}"
        yield LayerStack(name=own, first=first, kinds=period, count=count, is_dense=is_dense)
        first += len(period) * count


@cache
def _parts(kinds: tuple[str, ...]) -> list[tuple[tuple[str, ...], int]]:
    """The periods of layers of these kinds, and how often each repeats, of which the fewest layers are compiled."""
    if len(set(kinds)) == 1:
        return [(kinds[:1], len(kinds))]
    size, longest = len(kinds), min(_LONGEST_PERIOD, len(kinds))
    repeats = {(n, p): 1 for n in range(size) for p in range(1, min(longest, size - n) + 1)}
    for n in range(size - 1, -1, -1):
        for p in range(1, min(longest, (size - n) // 2) + 1):
            if kinds[n : n + p] == kinds[n + p : n + 2 * p]:
                repeats[n, p] = repeats[n + p, p] + 1
    best: list[tuple[int, list[tuple[tuple[str, ...], int]]]] = [(0, [])] * (size + 1)
    for n in range(size - 1, -1, -1):
        best[n] = min(
            (best[n + p * count][0] + p + _COST_OF_STACK, [(kinds[n : n + p], count), *best[n + p * count][1]])
            for p in range(1, min(longest, size - n) + 1)
            for count in (repeats[n, p],)
        )
    return best[0][1]


def in_order(stacks: Sequence[Sequence[Any]]) -> Any:
    """Trees of arrays [periods, ...], of each stack and each place of its period, as one: [layers, ...] in the order of the layers."""

    def together(places: Sequence[Any]) -> Any:
        if len(places) == 1:
            return places[0]
        return jax.tree.map(lambda *parts: jnp.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:]), *places)

    parts = [together(places) for places in stacks]
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)
