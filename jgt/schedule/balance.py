"""Stages of unequal layers or on unequal devices: measured costs, and the numbers of layers that make a step fastest.

A run that profiles some steps writes `profile/costs-P.json`, with the times of a microbatch in each layer of the stages of process P:

    {"layers": [{"layer": 0, "stage": 0, "forward_ms": 9.1, "backward_ms": 18.4}, ...], "ends_ms": 3.2}

All stages of a tick wait for the slowest one, so a good split has the smallest largest chunk. `balanced` finds it by dynamic programming:
the best split of the first layers into one chunk more is the best of all its last chunks behind a best split of what is before them. Not
every tick has all chunks, so all splits are simulated if these are few. If not, layers move between chunks as long as the simulated step
becomes shorter, which may end a few per cent above the best split.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated

from jgt.document import Bound, InputError, bind, read
from jgt.schedule.simulate import Simulation, simulate
from jgt.schedule.table import Table, count_noun

_MOST_WORK, _GAIN = 1_000_000, 1 - 1e-9
_Time = Annotated[float, Bound(low=0, high=1e9)]


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """The milliseconds of a microbatch in a layer, as a stage measured them. backward_ms includes what is recomputed."""

    layer: Annotated[int, Bound(low=0, high=65_535)]
    stage: Annotated[int, Bound(low=0, high=65_535)]
    forward_ms: _Time
    backward_ms: _Time


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """The costs of a model's layers, and of embedding and head, `ends_ms`, for which all stages work together."""

    layers: tuple[LayerCost, ...]
    ends_ms: _Time = 0.0

    @classmethod
    def read(cls, run: str | Path, where: str) -> MeasuredCosts:
        """The costs that a run has measured. Raises InputError; where: the beginning of a message about the run."""
        problems, found = list[str](), list[MeasuredCosts]()
        for path in sorted(Path(run).glob("profile/costs-*.json")):
            with InputError.collect(problems):
                found += filter(None, [bind(read(path), cls, problems)])
        layers = {cost.layer: cost for costs in found for cost in costs.layers}
        if not problems and (not layers or set(layers) != set(range(len(layers)))):
            lacks = (
                "has no measured costs of layers" if not layers else "lacks the costs of some layers: copy profile/ of all its processes"
            )
            advice = "Profile a step of a run with pipeline.schedule: 1f1b or gpipe, by the key p of jgt top or by --profile"
            problems.append(f"{where}: {str(run)!r} {lacks}. {advice}")
        if problems:
            raise InputError(problems)
        return cls(layers=tuple(layers[i] for i in range(len(layers))), ends_ms=max(costs.ends_ms for costs in found))

    def on_equal_stages(self, stage_costs: Sequence[float] | None) -> list[tuple[float, float]]:
        """(forward, backward) of each layer on a stage of cost 1, if the stages that measured them had these costs."""
        rates = [stage_costs[c.stage] if stage_costs and c.stage < len(stage_costs) else 1.0 for c in self.layers]
        return [(c.forward_ms / rate, c.backward_ms / rate) for c, rate in zip(self.layers, rates, strict=True)]

    def chunks(self, table: Table, sizes: Sequence[int], stage_costs: Sequence[float] | None) -> list[tuple[float, float, float]]:
        """The costs of an item of each kind in each chunk. Half of a backward pass counts as weight gradients where these are apart."""
        layers, begins = self.on_equal_stages(stage_costs), [0, *accumulate(sizes)]
        found = list[tuple[float, float, float]]()
        for stage, begin, size in zip(table.stages, begins, sizes, strict=False):
            forward, backward = map(math.fsum, zip(*layers[begin : begin + size], strict=True))
            rate, apart = 1.0 if stage_costs is None else stage_costs[stage], 0.0 if table.weight is None else backward / 2
            found.append((forward * rate, (backward - apart) * rate, apart * rate))
        return found


def even(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """The sizes of chunks of almost equal length; the first ones get the layers that are left over."""
    size, more = divmod(num_layers, num_chunks)
    return tuple(size + (chunk < more) for chunk in range(num_chunks))


def chosen_sizes(
    table: Table, num_layers: int, costs: MeasuredCosts | None, stage_costs: Sequence[float] | None, run: str | Path | None = None
) -> tuple[int, ...]:
    """The layers of each chunk for the shortest step. Raises ValueError if the numbers of layers or stages do not fit."""
    if stage_costs is not None and len(stage_costs) != table.num_stages:
        raise ValueError(f"{count_noun(len(stage_costs), 'number')} for {table.num_stages} stages: give one for each stage")
    if costs is not None and len(costs.layers) != num_layers:
        raise ValueError(f"the costs in {str(run)!r} are of {count_noun(len(costs.layers), 'layer')}, but the model has {num_layers}")
    # Equal layers that none of the stages has measured.
    costs = costs or MeasuredCosts(
        layers=tuple(LayerCost(layer=i, stage=table.num_stages, forward_ms=1, backward_ms=2) for i in range(num_layers))
    )
    layers = [sum(times) for times in costs.on_equal_stages(stage_costs)]
    sizes = balanced(layers, [1.0 if stage_costs is None else stage_costs[stage] for stage in table.stages])
    work = table.num_ticks * table.num_stages
    if math.comb(num_layers - 1, len(sizes) - 1) * work < _MOST_WORK:
        return min(_splits(num_layers, len(sizes)), key=lambda split: (_simulate(table, costs, stage_costs, split).time, split != sizes))
    # Larger tables are in their steady state most of the time.
    return _improved(table, costs, stage_costs, sizes) if len(sizes) ** 2 * work < _MOST_WORK else sizes


def simulate_measured(table: Table, costs: MeasuredCosts, stage_costs: Sequence[float] | None = None) -> Simulation:
    """Simulates a table with measured layers, split as well as possible; in milliseconds. Raises ValueError."""
    num_layers = len(costs.layers)
    if num_layers < table.num_chunks:
        raise ValueError(f"{count_noun(num_layers, 'measured layer')} cannot be split into {count_noun(table.num_chunks, 'chunk')}")
    sizes = chosen_sizes(table, num_layers, costs, stage_costs)
    evenly = _simulate(table, costs, stage_costs, even(num_layers, table.num_chunks))
    return replace(_simulate(table, costs, stage_costs, sizes), sizes=sizes, even_time=evenly.time)


def _simulate(table: Table, costs: MeasuredCosts, stage_costs: Sequence[float] | None, sizes: Sequence[int]) -> Simulation:
    return simulate(table, None, stage_costs, costs.chunks(table, sizes, stage_costs), costs.ends_ms)


def _improved(table: Table, costs: MeasuredCosts, stage_costs: Sequence[float] | None, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes, changed by a layer at a time as long as that saves time in ticks that not all chunks are in."""
    time = _simulate(table, costs, stage_costs, sizes).time
    while True:
        moves = [_moved(sizes, a, b) for a, b in itertools.permutations(range(len(sizes)), 2) if sizes[a] > 1]
        found = min(((_simulate(table, costs, stage_costs, moved).time, moved) for moved in moves), default=(time, sizes))
        if found[0] >= time * _GAIN:
            return sizes
        time, sizes = found


def _splits(num_layers: int, num_chunks: int) -> Iterator[tuple[int, ...]]:
    """The sizes of all splits into chunks of at least one layer."""
    for cuts in itertools.combinations(range(1, num_layers), num_chunks - 1):
        yield tuple(end - begin for begin, end in itertools.pairwise((0, *cuts, num_layers)))


def _moved(sizes: Sequence[int], a: int, b: int) -> tuple[int, ...]:
    return tuple(size - (chunk == a) + (chunk == b) for chunk, size in enumerate(sizes))


def balanced(layers: Sequence[float], rates: Sequence[float]) -> tuple[int, ...]:
    """The sizes of the chunks, at least 1 each, with the smallest largest cost: that of a chunk's layers times its rate."""
    num, ends, cuts = len(layers), [0.0, *accumulate(layers)], list[list[int]]()
    # (the largest chunk, the sum of squares) of a best split of the first layers: of equally good ones, the most even.
    before = [(0.0, 0.0)] + [(math.inf, math.inf)] * num
    for rate in rates:
        best, cut = [(math.inf, math.inf)] * (num + 1), [0] * (num + 1)
        for end in range(1, num + 1):
            for begin in range(end - 1, -1, -1):
                cost = (ends[end] - ends[begin]) * rate
                if cost > best[end][0]:
                    break
                found = (max(before[begin][0], cost), before[begin][1] + cost**2)
                if found < best[end]:
                    best[end], cut[end] = found, begin
        before = best
        cuts.append(cut)
    sizes, end = list[int](), num
    for cut in reversed(cuts):
        sizes.append(end - cut[end])
        end = cut[end]
    return tuple(reversed(sizes))
