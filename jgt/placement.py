"""Where the parts of a training program go: parameters by their use, optimizer state and inputs by the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jgt import jaxpr as jx
from jgt.document import InputError
from jgt.problems import misfit_problems
from jgt.rewrite import Dims, Rewriter, partition_spec
from jgt.rules import Matcher, Rules, SpecRule, expand, fits_rank, misfits, show_dims
from jgt.uses import Use, parameter_uses


@dataclass(frozen=True, kw_only=True)
class ParameterPlace:
    """One parameter: its path and shape, the signals it is used under, its dims' axes and its optimizer state's."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    signals: tuple[str, ...]
    dims: Dims
    optimizer_dims: Dims

    @property
    def spec(self) -> str:
        """The axes of each dim, as the YAML writes them."""
        return show_dims(self.dims)

    def bytes_per_device(self, mesh: Mesh | AbstractMesh) -> int:
        """Bytes of this parameter on one device."""
        local = NamedSharding(mesh, partition_spec(self.dims)).shard_shape(self.shape)
        return int(np.prod(local, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Shardings for everything around one function: built by `place`, complete and checked."""

    rules: Rules
    mesh: Mesh | AbstractMesh
    parameters: tuple[ParameterPlace, ...]
    tree: Any
    tensors: tuple[str, ...] = ()
    """Names of the tensors in the program."""

    @property
    def params(self) -> Any:
        """The parameters' NamedShardings, as a tree like the parameters."""
        return jax.tree.unflatten(self.tree, [self._sharding(p.dims) for p in self.parameters])

    @property
    def gradients(self) -> Any:
        """The gradients' NamedShardings: those of the optimizer state."""
        return jax.tree.unflatten(self.tree, [self._sharding(p.optimizer_dims) for p in self.parameters])

    def optimizer(self, state: Any) -> Any:
        """NamedShardings for an optimizer state (arrays or ShapeDtypeStructs).

        A leaf whose path ends with a parameter's and that has its shape is placed by that parameter (optax's moments);
        others, such as counts, are replicated.
        """
        leaves, tree = jax.tree.flatten_with_path(state)
        return jax.tree.unflatten(tree, [self._sharding(self._optimizer_dims(path_text(p), x.shape)) for p, x in leaves])

    def inputs(self, batch: Any) -> Any:
        """NamedShardings for the arguments that are not parameters."""
        matcher = Matcher(self.rules)
        leaves, tree = jax.tree.flatten_with_path(batch)
        dims = [input_rule(matcher, path_text(p), x)[1] for p, x in leaves]
        return jax.tree.unflatten(tree, [self._sharding(d) for d in dims])

    def _optimizer_dims(self, path: str, shape: tuple[int, ...]) -> Dims:
        matching = [p for p in self.parameters if p.shape == shape and (not p.path or f"/{path}".endswith(f"/{p.path}"))]
        return max(matching, key=lambda p: len(p.path)).optimizer_dims if matching else ()

    def _sharding(self, dims: Dims) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(dims))

    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A function traced at one set of arguments, placed and rewritten."""

    placement: Placement
    program: jx.Program
    out_tree: Any


def place(
    fn: Callable[..., Any],
    rules: Rules,
    mesh: Mesh | AbstractMesh,
    *args: Any,
    partial: bool = False,
    problems: Sequence[str] = (),
    **kwargs: Any,
) -> Placement:
    """Where `fn(params, ...)`'s parameters, gradients, optimizer state and inputs go, from arrays or ShapeDtypeStructs.

    Nothing is computed and no device is touched. Raises InputError with every misfit of parameters, activations and
    inputs, and every rule that matches nothing (not with `partial`); `problems` found before are reported with them.
    """
    check_arguments(rules, mesh)
    return Call(unwrapped(fn), args, kwargs).placed(rules, mesh, problems, partial=partial).placement


INNER = "__jgt_function__"
"""Where a sharded function keeps itself and the function that it wraps."""


def check_arguments(rules: Rules, mesh: Mesh | AbstractMesh) -> None:
    """Raises TypeError unless rules are Rules, and ValueError unless all axes of the mesh are Auto."""
    if not isinstance(rules, Rules):
        raise TypeError(f"rules must be jgt.Rules, not {type(rules).__name__}; make them with jgt.load_rules(path) or jgt.make_rules(mapping)")
    if not mesh.are_all_axes_auto:
        raise ValueError(f"the mesh must have Auto axes, not {mesh.axis_types}; make it with jgt.make_mesh, or pass axis_types to jax.make_mesh")


def unwrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The user's own function below `jgt.shard`."""
    # A decorator that copies attributes (functools.wraps) makes another function of it, with other arguments perhaps.
    sharded, inner = getattr(fn, INNER, (None, fn))
    return inner if sharded is fn else fn


class Call:
    """A function and the arguments of one call: arrays, tracers or ShapeDtypeStructs, and whatever else it takes."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        self._fn = fn
        self._leaves, self._tree = jax.tree.flatten_with_path((tuple(args), dict(kwargs)))
        self._dynamic = [isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct) for _, x in self._leaves]
        self.named = [(path, x) for d, (path, x) in zip(self._dynamic, self._leaves, strict=True) if d]

    @property
    def arrays(self) -> list[Any]:
        """The arguments that are traced; all others (flags, None, names) stay as they are."""
        return [x for _, x in self.named]

    def placed(self, rules: Rules, mesh: Mesh | AbstractMesh, problems: Sequence[str] = (), *, partial: bool = False) -> Traced:
        """Traces, places and rewrites; the first positional argument holds the parameters. Raises InputError, ValueError."""
        tree = self._parameter_tree()
        program, out_tree = jx.trace(self._flat, *self.arrays)
        matcher = Matcher(rules)
        rewriter = Rewriter(matcher, mesh)
        rewriter.problems += [*problems, *rules.axis_problems(mesh.axis_names)]
        parameters = _place_parameters(self.named[: tree.num_leaves], program, matcher, rewriter)
        pins = {i: (p.dims, p.optimizer_dims) for i, p in enumerate(parameters)}
        pins |= _place_inputs(self.named, len(parameters), matcher, rewriter)
        new_program = rewriter.rewrite(program, pins if not rewriter.problems else {})
        found = [*matcher.problems, *rewriter.problems, *(() if partial else matcher.unreached())]
        if found:
            raise InputError(found)
        placement = Placement(rules=rules, mesh=mesh, parameters=parameters, tree=tree, tensors=tuple(matcher.tensors))
        return Traced(placement=placement, program=new_program, out_tree=out_tree)

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
            if not isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
                raise ValueError(
                    f"the first argument must hold the parameters and nothing else, a tree of arrays, but "
                    f"{path_text(path[2:]) or 'it'} is {type(x).__name__}. Pass {x!r} in another argument"
                )
        return positional[0]


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
                rewriter.problems += misfit_problems(rule, dims, x.shape, dict(rewriter.mesh.shape), f"input {name}")
            reported.add((rule, x.shape))
            pins[index] = (dims, dims)
    return pins


def input_rule(matcher: Matcher, path: str, x: Any) -> tuple[SpecRule | None, Dims]:
    """The rule and dims of one argument that is not a parameter; random keys (uint32[2] too) are left alone."""
    rank = len(x.shape)
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or (x.dtype == np.uint32 and x.shape == (2,))
    rule = None if is_key else matcher.input(path, rank)
    return rule, () if rule is None else expand(rule.spec, rank)


def path_text(path: Sequence[Any]) -> str:
    """A key path of jax.tree_util as names joined by slashes; the `value` of Flax variables is left out."""
    names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    if len(names) > 1 and names[-1] in ("value", "raw_value"):
        names.pop()
    return "/".join(names)
