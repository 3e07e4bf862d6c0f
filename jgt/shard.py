"""`shard` goes around a forward or loss function; `init` makes its parameters where they belong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh

from jgt import jaxpr as jx
from jgt.placement import INNER, Call, check_arguments, place, unwrapped
from jgt.rules import Rules

F = TypeVar("F", bound=Callable[..., Any])


def shard(fn: F, rules: Rules | None, mesh: Mesh | AbstractMesh | None, *, partial: bool = False) -> F:
    """`fn` rewritten by rules: the same signature, values and gradients, laid out over a mesh.

    The first argument holds the parameters. Put `shard` around the forward or loss function, then differentiate, vmap
    and jit the result. Constraints go on parameters, inputs, values that leave a signal and named tensors; the
    gradient of a parameter is laid out like its optimizer state. Without rules `fn` itself is returned.

    Calling the result raises InputError when rules, mesh and shapes do not fit, with every problem. A rule that matches
    nothing is one, unless `partial` says that `fn` is only a part of what the rules speak of (inference without a loss).
    """
    if rules is None or mesh is None:
        return fn
    check_arguments(rules, mesh)

    @functools.wraps(fn)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        call = Call(fn, args, kwargs)
        traced = call.placed(rules, mesh, partial=partial)
        return jax.tree.unflatten(traced.out_tree, jx.evaluate(traced.program, call.arrays))

    setattr(sharded, INNER, (sharded, fn))
    return sharded  # pyright: ignore[reportReturnType]


def init(
    init_fn: Callable[..., Any],
    rules: Rules,
    mesh: Mesh,
    *args: Any,
    loss: Callable[..., Any],
    batch: Any,
    optimizer: Any = None,
    partial: bool = False,
) -> Any:
    """Parameters from `init_fn(*args)`, born sharded: no device ever holds more than its part.

    `loss(params, batch)` tells where parameters are used; `batch` may be arrays or ShapeDtypeStructs, and is a tuple where
    the loss takes several arguments. With an optax `optimizer` the result is (params, optimizer state). The random bits are the same on every mesh. Raises InputError.
    """
    batches = batch if isinstance(batch, tuple) else (batch,)
    placement = place(unwrapped(loss), rules, mesh, jax.eval_shape(init_fn, *args), *batches, partial=partial)
    if optimizer is None:
        return jax.jit(init_fn, out_shardings=placement.params)(*args)

    def both(*args: Any) -> Any:
        params = init_fn(*args)
        return params, optimizer.init(params)

    _, state = jax.eval_shape(both, *args)
    return jax.jit(both, out_shardings=(placement.params, placement.optimizer(state)))(*args)
