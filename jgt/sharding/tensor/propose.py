"""Tensor parallelism proposed for a program: the dims of its parameters that an axis splits.

Megatron-LM (arXiv 1909.08053) splits the columns of a block's first matmul and the rows of its second, and the tables by vocabulary. In a
program that is a factor of both: splitting it divides the work of both matmuls, and devices add up once behind the second, and once in the
backward pass before the first. So the factors that divide most work for each number that is added up come first, and no value has two of
them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jgt.program.jaxpr import Program
from jgt.replacements.replacement import ParameterPlace
from jgt.sharding.tensor.factors import Factors
from jgt.sharding.tensor.walk import factors_of


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The dim of each parameter that the axis splits, by its path, and why other large parameters stay whole."""

    dims: Mapping[str, int]
    whole: Mapping[str, str]


def propose(program: Program, places: Sequence[ParameterPlace], parts: int, small: int) -> Proposal:
    """A proposal for an axis of `parts` devices. small: the numbers of a parameter below which none is split for its own sake."""
    factors = factors_of(program, len(places))
    whole = _whole(factors, parts)
    flops, sent = (_by_factor(factors, noted) for noted in (factors.flops, factors.sent))
    large = [dims for place, dims in zip(places, factors.params, strict=True) if math.prod(place.shape) >= small]
    candidates = {factors.root(dim) for dims in large for dim in dims} - whole.keys()
    met = _met(factors, candidates)
    chosen = set[int]()
    for factor in sorted(candidates, key=lambda factor: (-flops[factor] / (sent[factor] + 1), factor)):
        if flops[factor] and not met[factor] & chosen:
            chosen.add(factor)
    split, why = dict[str, int](), dict[str, str]()
    for place, dims in zip(places, factors.params, strict=True):
        roots = [factors.root(dim) for dim in dims]
        if found := [d for d, root in enumerate(roots) if root in chosen]:
            split[place.path] = found[0]
        elif dims in large:
            reasons = [f"dim {d}: {whole[root]}" for d, root in enumerate(roots) if root in whole]
            why[place.path] = "; ".join(reasons) or "it multiplies nothing that the axis splits"
    return Proposal(dims=split, whole=why)


def _by_factor(factors: Factors, noted: Mapping[int, float]) -> Mapping[int, float]:
    total: dict[int, float] = defaultdict(float)
    for dim, number in noted.items():
        total[factors.root(dim)] += number
    return total


def _whole(factors: Factors, parts: int) -> dict[int, str]:
    """The factors that cannot be split, each with the first reason."""
    whole: dict[int, str] = {}
    for dim, why in factors.whole.items():
        whole.setdefault(factors.root(dim), why)
    for dims in factors.values:
        roots = [factors.root(dim) for dim in dims if factors.sizes[dim] != 1]
        for root in {root for root in roots if roots.count(root) > 1}:
            whole.setdefault(root, "a value has it twice")
    for dim, size in enumerate(factors.sizes):
        if size % parts:
            whole.setdefault(factors.root(dim), f"{parts} devices do not divide {size}")
    return whole


def _met(factors: Factors, candidates: set[int]) -> Mapping[int, set[int]]:
    """For each candidate those that some value has besides."""
    met: dict[int, set[int]] = defaultdict(set)
    for dims in factors.values:
        together = {factors.root(dim) for dim in dims} & candidates
        for factor in together:
            met[factor] |= together - {factor}
    return met
