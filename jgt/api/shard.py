"""The door: `shard` wraps a forward or loss function, `place` and `init` ask the wrapped function about its parameters.

Here the core of `jgt.sharding` meets what is optional: `replacements_of` lists the rules that replace pieces of a program, and a pipeline
comes in as an argument.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, ParamSpec, TypeVar, cast, overload

from jax.sharding import AbstractMesh, Mesh

from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Program
from jgt.program.places import Place
from jgt.program.scopes import DEVICE_PLAN
from jgt.replacements.replacement import Replaced, Replacement, Site
from jgt.rules import Own, Rules
from jgt.sharding.checks import RulesLike, ambient_mesh, as_rules
from jgt.sharding.inputs import StateArguments
from jgt.sharding.placement import Placement
from jgt.sharding.sharded import Sharded
from jgt.sharding.staged import Staging

_P = ParamSpec("_P")
_R = TypeVar("_R")


def replacements_of(rules: Rules, *, wide_gradients: bool = False, reverse_mode: bool = False) -> Sequence[Replacement]:
    """The replacements that these rules ask for, in the order in which they are applied. wide_gradients, reverse_mode: see `shard`."""
    has_overlap, has_context = (any(getattr(rule, key) is not None for rule in rules.signals) for key in ("overlap", "context"))
    found: list[Replacement] = []
    # JAX itself derives one sum over one axis, in the type that the program has.
    if wide_gradients or reverse_mode or len(rules.batch_axes) > 1:
        summed = importlib.import_module("jgt.replacements.gradients").SummedGradients
        found.append(summed(rules, is_wide=wide_gradients, is_reverse=reverse_mode))
    found.append(_ExpertsWhereCalled(rules))
    if has_context:
        found.append(importlib.import_module("jgt.replacements.context.context").Context(rules))
    if has_overlap:
        found.append(importlib.import_module("jgt.replacements.overlap").Overlap(rules))
    if rules.reads:
        found.append(importlib.import_module("jgt.replacements.whole_reads").WholeReads(rules))
    return found


@dataclass(frozen=True)
class _ExpertsWhereCalled:
    """The replacement of calls of experts, loaded with the first of them: a model may have some although no rule is about them."""

    rules: Rules

    def apply(self, program: Program, around: Place, site: Site) -> Replaced:
        if not any(equation.primitive.name == DEVICE_PLAN for equation in jx.body(program).eqns):
            return Replaced(program=program)
        return importlib.import_module("jgt.replacements.experts.experts").Experts(self.rules).apply(program, around, site)


@overload
def shard(
    fn: Callable[_P, _R],
    rules: RulesLike,
    mesh: Mesh | AbstractMesh = ...,
    *,
    partial: bool = False,
    pipeline: Staging | None = None,
    state: StateArguments = None,
    pad: bool = False,
    wide_gradients: bool = False,
    reverse_mode: bool = False,
    own: Own | None = None,
) -> Sharded[_P, _R]: ...


@overload
def shard(
    fn: Callable[_P, _R],
    rules: RulesLike | None,
    mesh: Mesh | AbstractMesh | None,
    *,
    partial: bool = False,
    pipeline: Staging | None = None,
    state: StateArguments = None,
    pad: bool = False,
    wide_gradients: bool = False,
    reverse_mode: bool = False,
    own: Own | None = None,
) -> Callable[_P, _R]: ...


def shard(
    fn: Callable[_P, _R],
    rules: RulesLike | None,
    mesh: Mesh | AbstractMesh | EllipsisType | None = ...,
    *,
    partial: bool = False,
    pipeline: Staging | None = None,
    state: StateArguments = None,
    pad: bool = False,
    wide_gradients: bool = False,
    reverse_mode: bool = False,
    own: Own | None = None,
) -> Callable[_P, _R]:
    """`fn` rewritten by rules: the same signature, values and gradients, laid out over a mesh.

        sharded = jgt.shard(loss, rules, mesh)
        value, gradients = jax.jit(jax.value_and_grad(sharded))(params, batch)

    Put `shard` around the forward or loss function, then differentiate, vmap and jit the result. Parameters, inputs, values that leave a
    signal and named tensors get constraints; the gradient of a parameter is laid out like its optimizer state.

    fn: its first argument contains the parameters.
    rules: Rules, the path of a rules file or the name of a shipped one (`jgt:fsdp`), or the mapping that such a file contains. None: `fn`
    itself is returned.
    mesh: the mesh of the devices, or of hardware elsewhere; left out, the one that `jax.set_mesh` has set. Explicit axes become Auto. None:
    `fn` itself is returned.
    partial: whether `fn` is only a part of the program that the rules describe (inference without a loss). Otherwise a rule that matches
    nothing is an error.
    pipeline: runs the layer scan under its signal over stages. The function's results are then sums and means over the batch, and only the
    first one has a gradient, with respect to the parameters.
    state: the names or positions of arguments that are neither parameters nor batch, such as running statistics. They are replicated unless
    a rule under `inputs:` names them. Variables of nnx that are not `nnx.Param` are state wherever they are; if `fn` changes them in
    place, their new values are stored in the caller's variables.
    pad: whether a parameter may have dims that their axes do not divide. Such parameters are stored padded (`storage`).
    wide_gradients: whether devices add up the gradients of matrices and tables in f32, whatever type `fn` multiplies them in. A pipeline
    has the type of its sums in its config.
    own: what becomes of the layouts that `fn` asks for itself; by default what the rules say.
    reverse_mode: whether the result is differentiated by `jax.grad` and `jax.vjp` alone, not by `jax.jvp`. Matmuls then have derivatives of
    their own where these are faster, which is on CPUs.

    A call of the result raises InputError with every problem if rules, mesh and shapes do not fit.
    """
    if rules is None or mesh is None:
        return fn
    mesh = ambient_mesh() if mesh is ... else mesh
    rules = as_rules(rules) if own is None else replace(as_rules(rules), own=own)
    replacements = functools.partial(replacements_of, wide_gradients=wide_gradients, reverse_mode=reverse_mode)
    return Sharded(fn, rules, mesh, replacements, partial=partial, pipeline=pipeline, state=state, pad=pad)


def place(
    fn: Callable[..., Any],
    rules: RulesLike,
    mesh: Mesh | AbstractMesh,
    *args: Any,
    partial: bool = False,
    pipeline: Staging | None = None,
    state: StateArguments = None,
    problems: Sequence[str] = (),
    **kwargs: Any,
) -> Placement:
    """Where the parameters, gradients, optimizer state and inputs of `fn(params, ...)` go: `shard(fn, ...).placement(...)`.

        placement = jgt.place(loss, rules, mesh, params, batch)
        params = jax.device_put(params, placement.params)

    fn: may be sharded already; then the trace is shared.
    args, kwargs: the arguments of a call, as arrays or ShapeDtypeStructs. Nothing is computed.
    problems: problems that were found before, which the error lists too.
    rules, mesh, partial, pipeline, state: as for `shard`.

    Raises InputError with every misfit of parameters, activations and inputs, and every rule that matches nothing (not with `partial`).
    """
    sharded = _sharded(fn, rules, mesh, partial, pipeline, state)
    return sharded.storage_for(args, kwargs, problems=problems).model


def init(
    init_fn: Callable[..., Any],
    rules: RulesLike,
    mesh: Mesh,
    *args: Any,
    loss: Callable[..., Any],
    batch: Any,
    optimizer: Any = None,
    partial: bool = False,
    pipeline: Staging | None = None,
    state: StateArguments = None,
) -> Any:
    """Parameters from `init_fn(*args)`, made where `loss(params, batch)` uses them: `shard(loss, ...).init(...)`.

        params, moments = jgt.init(make, rules, mesh, jax.random.key(0), loss=loss, batch=batch, optimizer=optax.adam(1e-3))

    No device ever holds more than its part, and the random bits are the same on every mesh.

    init_fn, args: the function that makes the parameters, and its arguments.
    loss: may be sharded already; then the trace is shared.
    batch: the other arguments of `loss`, as arrays or ShapeDtypeStructs, in a tuple if there are several.
    optimizer: one of optax. The result is then (parameters, optimizer state).
    rules, mesh, partial, pipeline, state: as for `shard`.

    Raises InputError as a call of the sharded function does.
    """
    return _sharded(loss, rules, mesh, partial, pipeline, state).init(init_fn, *args, batch=batch, optimizer=optimizer)


def _sharded(
    fn: Callable[..., Any],
    rules: RulesLike,
    mesh: Mesh | AbstractMesh,
    partial: bool,
    pipeline: Staging | None,
    state: StateArguments,
) -> Sharded[..., Any]:
    if isinstance(fn, Sharded):
        return cast("Sharded[..., Any]", fn).under(rules, mesh, partial, pipeline, state)
    return Sharded(fn, rules, mesh, replacements_of, partial=partial, pipeline=pipeline, state=state)
