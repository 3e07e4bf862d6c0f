"""Where the parts of a training program go: parameters by their use, optimizer state and inputs by the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from jgt.rules import Matcher, Rules, SpecRule, expand, show_dims
from jgt.uses import parameter_uses


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
    fn: Callable[..., Any], rules: Rules, mesh: Mesh | AbstractMesh, *args: Any, problems: Sequence[str] = (), **kwargs: Any
) -> Placement:
    """Where `fn(params, ...)`'s parameters, gradients, optimizer state and inputs go, from arrays or ShapeDtypeStructs.

    Nothing is computed and no device is touched. Raises InputError with every misfit of parameters, activations and
    inputs, and every rule that matches nothing; `problems` found before are reported with them.
    """
    check_arguments(rules, mesh)
    leaves, tree = jax.tree.flatten_with_path((args, kwargs))
    dynamic = [is_array(x) for _, x in leaves]
    return trace_and_place(unwrapped(fn), rules, mesh, leaves, tree, dynamic, problems).placement


def check_arguments(rules: Rules, mesh: Mesh | AbstractMesh) -> None:
    """Raises TypeError unless rules are Rules, and ValueError unless all axes of the mesh are Auto."""
    if not isinstance(rules, Rules):
        raise TypeError(f"rules must be jgt.Rules, not {type(rules).__name__}; make them with jgt.load_rules(path) or jgt.make_rules(mapping)")
    if not mesh.are_all_axes_auto:
        raise ValueError(f"the mesh must have Auto axes, not {mesh.axis_types}; make it with jgt.make_mesh, or pass axis_types to jax.make_mesh")


def unwrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The user's own function below `jgt.shard`."""
    return getattr(fn, "__jgt_function__", fn)


def is_array(x: Any) -> bool:
    """Whether an argument is traced; anything else (flags, None, names) stays as it is."""
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def trace_and_place(
    fn: Callable[..., Any],
    rules: Rules,
    mesh: Mesh | AbstractMesh,
    leaves: Sequence[tuple[Any, Any]],
    tree: Any,
    dynamic: Sequence[bool],
    problems: Sequence[str] = (),
    *,
    partial: bool = False,
) -> Traced:
    """Traces, places and rewrites; the function's first positional argument holds the parameters."""

    def flat(*arrays: Any) -> Any:
        values = iter(arrays)
        args, kwargs = jax.tree.unflatten(tree, [next(values) if d else x for d, (_, x) in zip(dynamic, leaves, strict=True)])
        return fn(*args, **kwargs)

    arrays = [(path, x) for d, (path, x) in zip(dynamic, leaves, strict=True) if d]
    positional = tree.children()[0].children()
    if not positional or not all(dynamic[: positional[0].num_leaves]):
        raise ValueError("the first argument must hold the parameters and nothing else: a tree of arrays")
    program, out_tree = jx.trace(flat, *[x for _, x in arrays])
    matcher = Matcher(rules)
    rewriter = Rewriter(matcher, mesh)
    rewriter.problems += [*problems, *rules.axis_problems(mesh.axis_names)]
    parameters = _place_parameters(arrays, program, matcher, rewriter)
    pins = {i: (p.dims, p.optimizer_dims) for i, p in enumerate(parameters)}
    pins |= _place_inputs(arrays, len(parameters), matcher, rewriter)
    new_program = rewriter.rewrite(program, pins if not rewriter.problems else {})
    found = [*matcher.problems, *rewriter.problems, *(() if partial else matcher.unreached())]
    if found:
        raise InputError(found)
    placement = Placement(rules=rules, mesh=mesh, parameters=parameters, tree=positional[0])
    return Traced(placement=placement, program=new_program, out_tree=out_tree)


def _place_parameters(
    arrays: Sequence[tuple[Any, Any]], program: jx.Program, matcher: Matcher, rewriter: Rewriter
) -> tuple[ParameterPlace, ...]:
    # Paths start with the index of (args, kwargs), then that of the argument: parameters are below [0][0].
    params = [(path[2:], x) for path, x in arrays if path[0].idx == 0 and path[1].idx == 0]
    placed = []
    for (path, x), use in zip(params, parameter_uses(program, len(params)), strict=True):
        name = path_text(path)
        dims = _parameter_dims(matcher, rewriter, name, x.shape, use.signals, use.num_sliced)
        rule = matcher.optimizer(name, use.signals, len(x.shape), use.num_sliced)
        state = dims if rule is None else _checked(rule, f"optimizer state of {name}", x.shape, use.num_sliced, rewriter)
        placed.append(
            ParameterPlace(path=name, shape=x.shape, dtype=x.dtype, signals=use.signals, dims=dims, optimizer_dims=state)
        )
    return tuple(placed)


def _parameter_dims(
    matcher: Matcher, rewriter: Rewriter, name: str, shape: tuple[int, ...], signals: tuple[str, ...], leading: int
) -> Dims:
    before = len(matcher.problems)
    rule = matcher.param(name, signals, len(shape), leading)
    if rule is not None:
        return _checked(rule, f"parameter {name}", shape, leading, rewriter)
    if len(matcher.problems) == before and matcher.rules.default is None:
        used = f"used under {', '.join(signals)}" if signals else "used under no signal"
        rewriter.problems.append(
            f"{matcher.rules.where}: {name}: no rule matches this parameter of shape {list(shape)}, {used}. "
            "Add a pattern under params: of that signal, or `default: replicate`"
        )
    return ((),) * len(shape)


def _checked(rule: SpecRule, what: str, shape: tuple[int, ...], leading: int, rewriter: Rewriter) -> Dims:
    dims = expand(rule.spec, len(shape), leading)
    rewriter.problems += misfit_problems(rule, dims, shape, dict(rewriter.mesh.shape), what)
    return dims


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
    """The rule and dims of one argument that is not a parameter; random keys are left alone."""
    rank = len(x.shape)
    rule = None if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else matcher.input(path, rank)
    return rule, () if rule is None else expand(rule.spec, rank)


def path_text(path: Sequence[Any]) -> str:
    """A key path of jax.tree_util as names joined by slashes; the `value` of Flax variables is left out."""
    names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    if len(names) > 1 and names[-1] in ("value", "raw_value"):
        names.pop()
    return "/".join(names)
