"""One call of a function: traced, its parameters and inputs placed, its program rewritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jgt import jaxpr as jx
from jgt.document import InputError
from jgt.pipeline.config import Pipeline
from jgt.placement import ParameterPlace, Placement, input_rule, path_text
from jgt.problems import misfit_problems
from jgt.rewrite import Dims, Rewriter
from jgt.rules import Matcher, Rules, SpecRule, expand, fits_rank, misfits
from jgt.staging import stage
from jgt.uses import Use, parameter_uses

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A function traced at one set of arguments, placed and rewritten."""

    placement: Placement
    run: Callable[[Sequence[Any]], list[Any]]
    """The results' leaves, from the arguments' arrays."""
    out_tree: Any


class Call:
    """A function and the arguments of one call: arrays, tracers or ShapeDtypeStructs, and whatever else it takes."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        self._fn = fn
        self._leaves, self._tree = jax.tree.flatten_with_path((tuple(args), dict(kwargs)))
        self._dynamic = [isinstance(x, _ARRAYS) for _, x in self._leaves]
        self.named = [(path, x) for d, (path, x) in zip(self._dynamic, self._leaves, strict=True) if d]

    @property
    def arrays(self) -> list[Any]:
        """The arguments that are traced; all others (flags, None, names) stay as they are."""
        return [x for _, x in self.named]

    def placed(
        self,
        rules: Rules,
        mesh: Mesh | AbstractMesh,
        problems: Sequence[str] = (),
        *,
        partial: bool = False,
        pipeline: Pipeline | None = None,
    ) -> Traced:
        """Traces, places and rewrites; the first positional argument holds the parameters. Raises InputError, ValueError."""
        tree = self._parameter_tree()
        program, out_tree = jx.trace(self._flat, *(map(_plain, self.arrays) if pipeline is not None else self.arrays))
        matcher = Matcher(rules)
        rewriter = Rewriter(matcher, mesh, None if pipeline is None else (pipeline.signal, pipeline.axis))
        rewriter.problems += [*problems, *rules.axis_problems(mesh.axis_names)]
        parameters = _place_parameters(self.named[: tree.num_leaves], program, matcher, rewriter)
        pins = {i: (p.dims, p.optimizer_dims) for i, p in enumerate(parameters)}
        pins |= _place_inputs(self.named, len(parameters), matcher, rewriter)
        new_program = rewriter.rewrite(program, pins if not rewriter.problems else {})
        found = [*matcher.problems, *rewriter.problems, *(() if partial else matcher.unreached())]
        staged = None
        if pipeline is not None:
            staged = stage(self, program, pipeline, rules, mesh, parameters, found)
        if found:
            raise InputError(found)
        if staged is not None:
            parameters = staged.parameters
        placement = Placement(rules=rules, mesh=mesh, parameters=parameters, tree=tree, tensors=tuple(matcher.tensors))
        run = staged.run if staged is not None else lambda arrays: jx.evaluate(new_program, arrays)
        return Traced(placement=placement, run=run, out_tree=out_tree)

    def trace_rows(self, which: Sequence[bool], num_rows: int) -> jx.Program:
        """The program with this many rows in the arrays of which the first dim is the batch."""
        shapes = [
            jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype) if batched else _plain(x) for batched, x in zip(which, self.arrays, strict=True)
        ]
        return jx.trace(self._flat, *shapes)[0]

    def _flat(self, *arrays: Any) -> Any:
        result, before, after = self._run(arrays)
        if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
            self._refuse_changes()
        return result

    def _run(self, arrays: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
        """The function's result, and the leaves of its arguments before and after."""
        values = iter(arrays)
        before = [next(values) if d else x for d, (_, x) in zip(self._dynamic, self._leaves, strict=True)]
        args, kwargs = jax.tree.unflatten(self._tree, before)
        result = self._fn(*args, **kwargs)
        return result, before, jax.tree.leaves((args, kwargs))

    def _refuse_changes(self) -> None:
        # What is called is a copy of the arguments: a Flax nnx module that changes itself would lose the change.
        changed: list[str] = []

        def arrays_after(*arrays: Any) -> list[Any]:
            _, before, after = self._run(arrays)
            if len(before) != len(after):
                changed.append("the arguments' structure")
                return list(arrays)
            changed.extend(path_text(p[2:]) for d, (p, _), a, b in zip(self._dynamic, self._leaves, before, after, strict=True) if not d and a is not b)
            return [b for d, b in zip(self._dynamic, after, strict=True) if d]

        # What went through nnx.remat or nnx.jit is another object, but the same value.
        kept = jx.kept(jx.trace(arrays_after, *self.arrays)[0])
        changed += [path_text(path[2:]) for index, ((path, _), origin) in enumerate(zip(self.named, kept, strict=True)) if index != origin]
        if changed:
            raise ValueError(
                f"the function changes its arguments in place ({', '.join(changed)}), which would be lost. Return such state from the function: "
                "split it off the module (nnx.split) and merge inside, or sow nothing"
            )

    def _parameter_tree(self) -> Any:
        positional = self._tree.children()[0].children()
        if not positional:
            raise ValueError("the first positional argument must hold the parameters, but none was given; pass them by position, not by name")
        for path, x in self._leaves[: positional[0].num_leaves]:
            if not isinstance(x, _ARRAYS):
                raise ValueError(
                    f"the first argument must hold the parameters and nothing else, a tree of arrays, but "
                    f"{path_text(path[2:]) or 'it'} is {type(x).__name__}. Pass {x!r} in another argument"
                )
        return positional[0]


def _plain(x: Any) -> jax.ShapeDtypeStruct:
    """An argument without its sharding, which would name a mesh that the inside of a shard_map does not have."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def _place_parameters(
    params: Sequence[tuple[Any, Any]], program: jx.Program, matcher: Matcher, rewriter: Rewriter
) -> tuple[ParameterPlace, ...]:
    placed: list[ParameterPlace] = []
    same: dict[int, ParameterPlace] = {}
    for (path, x), use in zip(params, parameter_uses(program, len(params)), strict=True):
        name = path_text(path[2:])
        dims = _parameter_dims(matcher, rewriter, name, x.shape, use)
        rule = matcher.optimizer(name, use.signals, lambda rule, x=x, use=use: _fits(rule, x.shape, use, rewriter))
        state = dims if rule is None else expand(rule.spec, len(x.shape), use.sliced)
        one = ParameterPlace(path=name, shape=x.shape, dtype=x.dtype, signals=use.signals, dims=dims, optimizer_dims=state)
        other = one if isinstance(x, jax.ShapeDtypeStruct) else same.setdefault(id(x), one)
        if other.dims != one.dims:
            rewriter.problems.append(
                f"{matcher.rules.where}: {name}: this array is {other.path} too, and the rules lay the two out differently: {one.spec} and "
                f"{other.spec}. Pass it once (nnx.split), or give both the same spec under params: at the top of the file"
            )
        placed.append(one)
    return tuple(placed)


def _fits(rule: SpecRule, shape: tuple[int, ...], use: Use, rewriter: Rewriter) -> bool:
    """Whether a spec has the right number of dims and its axes divide them."""
    if not fits_rank(rule.spec, len(shape) - len(use.sliced)):
        return False
    dims = rewriter.unclaimed(expand(rule.spec, len(shape), use.sliced))
    return not any(misfits(dims, shape, dict(rewriter.mesh.shape)))


def _parameter_dims(matcher: Matcher, rewriter: Rewriter, name: str, shape: tuple[int, ...], use: Use) -> Dims:
    before = len(matcher.problems)
    rule = matcher.param(name, use.signals, len(shape) - len(use.sliced))
    if rule is not None:
        dims = expand(rule.spec, len(shape), use.sliced)
        rewriter.problems += misfit_problems(rule, rewriter.unclaimed(dims), shape, dict(rewriter.mesh.shape), f"parameter {name}")
        rewriter.problems += rewriter.reserved(rule, dims, use.signals, f"parameter {name}")
        return dims
    if len(matcher.problems) == before and matcher.rules.default is None:
        used = f"used under {', '.join(use.signals)}" if use.signals else "used under no signal"
        rewriter.problems.append(
            f"{matcher.rules.where}: {name}: no rule matches this parameter of shape {list(shape)}, {used}. "
            "Add a pattern under params: of that signal, or `default: replicate`"
        )
    return ((),) * len(shape)


def _place_inputs(
    arrays: Sequence[tuple[Any, Any]], num_params: int, matcher: Matcher, rewriter: Rewriter
) -> dict[int, tuple[Dims, Dims]]:
    pins: dict[int, tuple[Dims, Dims]] = {}
    reported: set[tuple[SpecRule, tuple[int, ...]]] = set()
    for index, (path, x) in enumerate(arrays[num_params:], start=num_params):
        name = path_text(path[2:] or path[1:])
        rule, dims = input_rule(matcher, name, x)
        dims = rewriter.unclaimed(dims)
        if rule is not None:
            if (rule, x.shape) not in reported:
                rewriter.problems += misfit_problems(rule, dims, x.shape, dict(rewriter.mesh.shape), f"input {name}", label="inputs")
            reported.add((rule, x.shape))
            pins[index] = (dims, dims)
    return pins
