"""`shard` goes around a forward or loss function; `place` tells where its parts go, and `init` makes its parameters there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh

from jgt.call import Call
from jgt.pipeline.config import Pipeline
from jgt.placement import Placement
from jgt.rules import Rules

F = TypeVar("F", bound=Callable[..., Any])


def shard(
    fn: F, rules: Rules | None, mesh: Mesh | AbstractMesh | None, *, partial: bool = False, pipeline: Pipeline | None = None
) -> F:
    """`fn` rewritten by rules: the same signature, values and gradients, laid out over a mesh.

    The first argument holds the parameters. Put `shard` around the forward or loss function, then differentiate, vmap
    and jit the result. Constraints go on parameters, inputs, values that leave a signal and named tensors; the
    gradient of a parameter is laid out like its optimizer state. Without rules `fn` itself is returned.

    Calling the result raises InputError when rules, mesh and shapes do not fit, with every problem. A rule that matches
    nothing is one, unless `partial` says that `fn` is only a part of what the rules speak of (inference without a loss).

    With a `pipeline` the layer scan under its signal runs over stages. The function's results are then sums and means over
    the batch, and its gradient is that of the first one by the parameters.
    """
    if rules is None or mesh is None:
        return fn
    _check_arguments(rules, mesh)

    @functools.wraps(fn)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        call = Call(fn, args, kwargs)
        traced = call.placed(rules, mesh, partial=partial, pipeline=pipeline)
        return jax.tree.unflatten(traced.out_tree, traced.run(call.arrays))

    setattr(sharded, _INNER, (sharded, fn))
    return sharded  # pyright: ignore[reportReturnType]


def place(
    fn: Callable[..., Any],
    rules: Rules,
    mesh: Mesh | AbstractMesh,
    *args: Any,
    partial: bool = False,
    pipeline: Pipeline | None = None,
    problems: Sequence[str] = (),
    **kwargs: Any,
) -> Placement:
    """Where `fn(params, ...)`'s parameters, gradients, optimizer state and inputs go, from arrays or ShapeDtypeStructs.

    Nothing is computed and no device is touched. Raises InputError with every misfit of parameters, activations and
    inputs, and every rule that matches nothing (not with `partial`); `problems` found before are reported with them.
    """
    _check_arguments(rules, mesh)
    return Call(_unwrapped(fn), args, kwargs).placed(rules, mesh, problems, partial=partial, pipeline=pipeline).placement


def init(
    init_fn: Callable[..., Any],
    rules: Rules,
    mesh: Mesh,
    *args: Any,
    loss: Callable[..., Any],
    batch: Any,
    optimizer: Any = None,
    partial: bool = False,
    pipeline: Pipeline | None = None,
) -> Any:
    """Parameters from `init_fn(*args)`, born sharded: no device ever holds more than its part.

    `loss(params, batch)` tells where parameters are used; `batch` may be arrays or ShapeDtypeStructs, and is a tuple where
    the loss takes several arguments. With an optax `optimizer` the result is (params, optimizer state). The random bits are
    the same on every mesh. Raises InputError.
    """
    batches = batch if isinstance(batch, tuple) else (batch,)
    placement = place(_unwrapped(loss), rules, mesh, jax.eval_shape(init_fn, *args), *batches, partial=partial, pipeline=pipeline)
    if optimizer is None:
        return jax.jit(init_fn, out_shardings=placement.params)(*args)

    def both(*args: Any) -> Any:
        params = init_fn(*args)
        return params, optimizer.init(params)

    _, state = jax.eval_shape(both, *args)
    return jax.jit(both, out_shardings=(placement.params, placement.optimizer(state)))(*args)


_INNER = "__jgt_function__"
"""Where a sharded function keeps itself and the function that it wraps."""


def _check_arguments(rules: Rules, mesh: Mesh | AbstractMesh) -> None:
    """Raises TypeError unless rules are Rules, and ValueError unless all axes of the mesh are Auto."""
    if not isinstance(rules, Rules):
        raise TypeError(f"rules must be jgt.Rules, not {type(rules).__name__}; make them with jgt.load_rules(path) or jgt.make_rules(mapping)")
    if not mesh.are_all_axes_auto:
        raise ValueError(f"the mesh must have Auto axes, not {mesh.axis_types}; make it with jgt.make_mesh, or pass axis_types to jax.make_mesh")


def _unwrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The user's own function below `jgt.shard`."""
    # A decorator that copies attributes (functools.wraps) makes another function of it, with other arguments perhaps.
    sharded, inner = getattr(fn, _INNER, (None, fn))
    return inner if sharded is fn else fn
