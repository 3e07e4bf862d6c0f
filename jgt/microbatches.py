"""Which inputs of a call are its batch, which are random keys, and whether the batch can be cut into microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jgt.pipeline.config import Pipeline
from jgt.pipeline.ends import Input
from jgt.pipeline.layout import Dims
from jgt.placement import input_rule, is_key, path_text
from jgt.rules import Matcher, Rules, SpecRule
from jgt.rules.spec import min_rank


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """The inputs of a call, in order: names, kinds, dims; the mesh axes that split the batch, and its rows."""

    names: tuple[str, ...]
    inputs: tuple[Input, ...]
    dims: tuple[Dims, ...]
    axes: tuple[str, ...]
    num_rows: int
    num_shards: int
    problems: tuple[str, ...]

    def division_problems(self, pipeline: Pipeline) -> Iterator[str]:
        """Whether the microbatches divide the batch on every data shard, and which would."""
        if not self.num_rows:
            yield pipeline.problem("microbatches", "no input of the function has a batch to split: an array besides the parameters")
            return
        if pipeline.microbatches < 1 or self.num_rows % (pipeline.microbatches * self.num_shards) == 0:
            return
        per_shard, left = divmod(self.num_rows, self.num_shards)
        batch = f"the batch of {self.num_rows}" + (f", of which each of {self.num_shards} data shards has {per_shard}" if self.num_shards > 1 else "")
        fitting = [] if left else [str(n) for n in range(1, per_shard + 1) if per_shard % n == 0]
        allowed = f"These divide it: {', '.join(fitting)}" if fitting else f"Make the batch a multiple of {pipeline.microbatches * self.num_shards}"
        yield pipeline.problem("microbatches", f"{pipeline.microbatches} microbatches do not divide {batch}. {allowed}")


def find_microbatches(
    named: Sequence[tuple[Any, Any]], rules: Rules, mesh: Mapping[str, int], is_drawn_from: Callable[[int], bool]
) -> Microbatches:
    """What each input (path and array) is. The batch is the first dim of inputs; where the rules shard it, they say which.

    is_drawn_from: whether the program uses input number i as a random key, for those that look like one.
    """
    matcher = Matcher(rules)
    names = [path_text(path[2:] or path[1:]) for path, _ in named]
    found = [(x, *_rule(matcher, name, x, is_drawn_from(i) if is_key(x) else False)) for i, (name, (_, x)) in enumerate(zip(names, named, strict=True))]
    split = [(name, x, rule, dims) for name, (x, rule, dims, key) in zip(names, found, strict=True) if not key and dims and dims[0]]
    free = [x for x, rule, _, key in found if x.shape and not key and not _is_whole(rule)]
    num_rows = split[0][1].shape[0] if split else free[0].shape[0] if free else 0
    axes = split[0][3][0] if split else ()
    problems = [
        f"{rule.where}: inputs: {name}: has {x.shape[0]} rows, but {split[0][0]} has {num_rows}: which of them is the batch? "
        f"Give the one that is not the rule []"
        for name, x, rule, _ in split
        if x.shape[0] != num_rows and rule is not None
    ]
    problems += [
        f"{rule.where}: inputs: {name}: the batch must be the first dim in a pipeline, but this spec splits dim {dim} of {list(x.shape)} over {axis}"
        for name, (x, rule, dims, _) in zip(names, found, strict=True)
        for dim, own in enumerate(dims)
        for axis in own
        if dim and axis in axes and rule is not None
    ]

    def kind(x: Any, rule: SpecRule | None, key: bool) -> Input:
        if key:
            return Input(kind="key")
        whole = not x.shape or x.shape[0] != num_rows or _is_whole(rule)
        return Input(kind="whole" if whole else "rows")

    axes = tuple(axis for axis in axes if mesh.get(axis, 1) > 1)
    return Microbatches(
        names=tuple(names),
        inputs=tuple(kind(x, rule, key) for x, rule, _, key in found),
        dims=tuple(dims for _, _, dims, _ in found),
        axes=axes,
        num_rows=num_rows,
        num_shards=math.prod(mesh.get(axis, 1) for axis in axes),
        problems=tuple(problems),
    )


def _is_whole(rule: SpecRule | None) -> bool:
    """Whether a rule says [] of an input: it is alike for all rows."""
    return rule is not None and min_rank(rule.spec) == 0


def _rule(matcher: Matcher, name: str, x: Any, drawn_from: bool) -> tuple[SpecRule | None, Dims, bool]:
    """The rule and dims of an input, and whether it is a random key; bits that nothing is drawn from are numbers."""
    key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or drawn_from
    return *input_rule(matcher, name, x), key
