"""The kinds of the inputs of a pipelined call: rows of the batch, a random key, or one value for all rows.

A pipeline cuts the batch into microbatches, so it has to know which dims are the batch: the first dim of the inputs that a rule shards or,
if the rules shard no input, of the first input. docs/pipeline.md has an example.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jgt.pipeline.config import PipelineConfig
from jgt.pipeline.ends import InputKind
from jgt.program import jaxpr as jx
from jgt.program.dataflow import is_random_key, is_scanned
from jgt.program.dims import Dims
from jgt.program.jaxpr import Program
from jgt.rules import Rules, SpecRule
from jgt.sharding.inputs import Input


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """The inputs of a call, in order: their names, kinds and dims.

    keys: the numbers of the random keys, also of inputs with a key for each row. axes: the mesh axes of size above 1 that split the batch,
    into `num_shards` parts. replicas: the axes of a vmap around the call, each of whose entries has another batch. num_rows: the number of
    rows of the whole batch; 0 if no input has a batch.
    """

    names: tuple[str, ...]
    inputs: tuple[InputKind, ...]
    keys: tuple[int, ...]
    dims: tuple[Dims, ...]
    axes: tuple[str, ...]
    replicas: tuple[str, ...]
    num_rows: int
    num_shards: int
    problems: tuple[str, ...]

    def division_problems(self, pipeline: PipelineConfig) -> Iterator[str]:
        """The problem of a number of microbatches that does not divide the rows of each data shard, with the numbers that do."""
        if not self.num_rows:
            yield pipeline.problem("microbatches", "the function has no batch to split: besides the parameters it takes no array")
            return
        # The schedule runs one part of the batch at a time.
        num_rows = self.num_rows // pipeline.parts
        if pipeline.microbatches < 1 or num_rows % (pipeline.microbatches * self.num_shards) == 0:
            return
        per_shard, left = divmod(num_rows, self.num_shards)
        shards = f" ({per_shard} on each of {self.num_shards} data shards)" if self.num_shards > 1 else ""
        # If the rows do not divide among the data shards, no number of microbatches fits.
        fitting = [] if left else [str(n) for n in range(1, per_shard + 1) if per_shard % n == 0]
        multiple = pipeline.microbatches * self.num_shards
        allowed = f"These divide it: {', '.join(fitting)}" if fitting else f"Make the batch a multiple of {multiple}"
        batch = f"the batch of {num_rows}{shards}"
        yield pipeline.problem("microbatches", f"{pipeline.microbatches} microbatches do not divide {batch}. {allowed}")


@dataclass(frozen=True, kw_only=True)
class _RuledInput:
    """An input with the rule that places it. is_scanned: whether a scan of the program goes over it."""

    input: Input
    rule: SpecRule | None
    dims: Dims
    is_key: bool
    is_scanned: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.input.x.shape

    @property
    def is_shared(self) -> bool:
        """Whether all rows of the batch share it: state, or an input whose rule is []."""
        return self.input.is_state or (self.rule is not None and self.rule.rank == 0)

    @property
    def is_split(self) -> bool:
        """Whether a rule splits its first dim."""
        return not self.is_key and not self.input.is_state and bool(self.dims) and bool(self.dims[0])

    def as_input(self, num_rows: int) -> InputKind:
        """Its kind, given the rows of the batch."""
        # An input without a rule is cut too if it has as many rows as the batch: weights or a mask of the same rows.
        has_rows = bool(self.shape) and self.shape[0] == num_rows and not self.is_shared
        if not self.is_key:
            return "rows" if has_rows else "whole"
        # If there are as many keys as rows, each row has a key, unless a scan goes over them: then each layer has one.
        is_one = len(self.shape) < (1 if _is_typed_key(self.input) else 2)
        return "rows" if has_rows and not is_one and not self.is_scanned else "key"


def find_microbatches(
    inputs: Sequence[Input], program: Program, rules: Rules, mesh: Mapping[str, int], claimed: Collection[str]
) -> Microbatches:
    """The kind of each input, by the rules and the mesh sizes.

    program: its last arguments are the inputs. claimed: the axes of vmaps around the call.
    """
    num_params = len(jx.body(program).invars) - len(inputs)
    ruled = [_ruled(one, rules, program, number) for number, one in enumerate(inputs, start=num_params)]
    split = [one for one in ruled if one.is_split]
    free = [one for one in ruled if one.shape and not one.is_key and not one.is_shared]
    batch = next(iter([*split, *free]), None)
    num_rows = 0 if batch is None else batch.shape[0]
    batch_axes = split[0].dims[0] if split else ()
    # An axis of size 1 splits nothing, so the pipeline need not make it manual.
    axes = tuple(axis for axis in batch_axes if mesh.get(axis, 1) > 1 and axis not in claimed)
    return Microbatches(
        names=tuple(one.name for one in inputs),
        inputs=tuple(one.as_input(num_rows) for one in ruled),
        keys=tuple(i for i, one in enumerate(ruled) if one.is_key),
        dims=tuple(tuple(tuple(a for a in axes if a not in claimed) for axes in one.dims) for one in ruled),
        axes=axes,
        replicas=tuple(axis for axis in batch_axes if axis in claimed),
        num_rows=num_rows,
        num_shards=math.prod(mesh[axis] for axis in axes),
        problems=(*_row_problems(split), *_dim_problems(ruled, batch_axes)),
    )


def _ruled(one: Input, rules: Rules, program: Program, number: int) -> _RuledInput:
    match, dims = one.match(rules)
    # Numbers in uint32 may be keys or may be data; only the program knows whether random bits are drawn from them.
    is_key = _is_typed_key(one) or (one.x.dtype == np.uint32 and one.x.shape[-1:] == (2,) and is_random_key(program, number))
    return _RuledInput(input=one, rule=match.rule, dims=dims, is_key=is_key, is_scanned=is_key and is_scanned(program, number))


def _is_typed_key(one: Input) -> bool:
    return jnp.issubdtype(one.x.dtype, jax.dtypes.prng_key)


def _row_problems(split: Sequence[_RuledInput]) -> Iterator[str]:
    for one in split:
        if one.shape[0] != split[0].shape[0] and one.rule is not None:
            yield (
                f"{one.rule.where}: inputs: {one.input.name}: has {one.shape[0]} rows, but {split[0].input.name} has {split[0].shape[0]}: "
                "which of them is the batch? Give the other one the rule []"
            )


def _dim_problems(ruled: Sequence[_RuledInput], batch_axes: Sequence[str]) -> Iterator[str]:
    for one in ruled:
        for dim, axes in enumerate(() if one.input.is_state else one.dims[1:], start=1):
            for axis in axes:
                if axis in batch_axes and one.rule is not None:
                    yield (
                        f"{one.rule.where}: inputs: {one.input.name}: the batch must be the first dim in a pipeline, "
                        f"but this spec splits dim {dim} of {list(one.shape)} over {axis}"
                    )
