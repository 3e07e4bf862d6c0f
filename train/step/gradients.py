"""The loss and the gradient of a batch: how its parts (`train.accumulate`) and the devices that split it add up.

A gradient is a sum over all devices that split the batch. Along an axis that splits parameters too, each part needs it at once, because
no device has room for whole gradients. Along any other axis it can wait until the last part is done, if the loss is a sum over rows: the
devices are replicas there, each adds up the gradients of its rows, and the sum crosses the axis once, with the bytes of a batch without
parts. Each device then holds a whole sum in f32 for each parameter that it has, also with ZeRO-1, which keeps only a part of it afterwards.

The axis of `sync: {every: 1}` is the first of these. Numbers cross it in another type (`wire`), or one step late: then a step adds up the
gradients of the step before, which needs nothing that it computes itself, in the scan over layers where that is possible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jgt import Replicas, signal

from .objective import Arrays, Objective, Part
from .state import Tree
from .sync.config import Wire

_Sums = TypeVar("_Sums")


@dataclass(frozen=True, kw_only=True)
class GradientSum:
    """The way in which the gradient of a batch is added up.

    parts: the number of equal parts in which a batch runs. pin: gives a tree of gradients its shardings. replicas: devices that add up the
    gradients of all parts before they send any; None: all devices add up each part. shardings: the shardings of the gradient by the
    parameters as the model uses them. dtypes: the types in which these cross the axes of `replicas`.

    sync: the replicas along the axis of `sync`, which is then the first of these axes. sums, wire: the shardings of the sums over it, and
    the type in which they travel. is_late: they are added up in the next step. in_layer_scan: in the scan over layers.
    """

    parts: int = 1
    pin: Callable[[Tree], Tree]
    replicas: Replicas | None = None
    shardings: Tree | None = None
    dtypes: Tree | None = None
    sync: Replicas | None = None
    sums: Tree | None = None
    wire: Wire = "f32"
    is_late: bool = False
    in_layer_scan: bool = False

    def first_waiting(self, params: Tree) -> Tree | None:
        """The gradients that wait before the first step: zeros. params: the shapes of the parameters as the model uses them."""
        if self.sync is None or not self.is_late:
            return None
        count, dtype = self.sync.count, self._waiting_type
        return jax.tree.map(lambda p: jnp.zeros((count, *p.shape), dtype), params)

    @property
    def _waiting_type(self) -> jax.typing.DTypeLike:
        return jnp.bfloat16 if self.wire == "bf16" else jnp.float32

    def differentiate(
        self, objective: Objective, params: Tree, variables: Tree, batch: Arrays, waiting: Tree | None = None
    ) -> tuple[tuple[jax.Array, Part], Tree, Tree | None]:
        """The loss and the rest of its results, the gradient by the parameters as the state has them, and the gradients that wait now.

        With `is_late` the gradient is the last step's, which waited.
        """
        # Once for all parts: what is stored on other devices is brought here, and what a part's gradient brings back.
        used, to_stored = jax.vjp(objective.used, params)
        if self.replicas is not None:
            if self.in_layer_scan:
                values, gradients, waiting = self._summed_in_layer_scan(self.replicas, objective, used, variables, batch, waiting)
            else:
                values, of_replicas = self._of_replicas(self.replicas, objective, used, variables, batch)
                gradients, waiting = self._summed(self.replicas, of_replicas, waiting)
            gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, used)
            return (jnp.sum(values), Part(None, {}, variables)), self.pin(to_stored(gradients)[0]), waiting

        def differentiated(variables: Tree, rows: Arrays) -> tuple[tuple[jax.Array, Part], Tree]:
            result, gradients = jax.value_and_grad(objective.loss, has_aux=True)(used, variables, rows)
            return result, to_stored(gradients)[0]

        if self.parts == 1:
            return *differentiated(variables, batch), waiting
        split = self._split(batch)
        value, part = jax.eval_shape(objective.loss, used, variables, jax.tree.map(lambda x: x[0], split))
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (value, part.weight, part.metrics))
        # Pinned, or the scan would carry whole gradients on every device.
        gradients = self.pin(jax.tree.map(jnp.zeros_like, params))

        def add(carry: tuple[Any, Tree], rows: Arrays) -> tuple[Any, Tree]:
            sums, variables = carry
            (value, part), gradients = differentiated(variables, rows)
            return jax.tree.map(jnp.add, sums, (value, part.weight, part.metrics, gradients)), part.variables

        (value, weight, metrics, gradients), variables = self._in_turn(add, ((*zero, gradients), variables), split)
        return (value, Part(weight, metrics, variables)), gradients, waiting

    def _of_replicas(self, replicas: Replicas, objective: Objective, used: Tree, variables: Tree, batch: Arrays) -> tuple[jax.Array, Tree]:
        """The losses and gradients of all replicas, [R, ...] in f32. The loss is a sum over rows, without metrics."""
        lifted = jax.tree.map(replicas.lift, self.shardings)

        def differentiated(rows: Arrays) -> tuple[jax.Array, Tree]:
            (value, _), gradients = jax.value_and_grad(objective.loss, has_aux=True)(used, variables, rows)
            return value, jax.tree.map(lambda g: g.astype(jnp.float32), gradients)

        def pinned(results: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
            return results[0], jax.lax.with_sharding_constraint(results[1], lifted)

        if self.parts == 1:
            return pinned(replicas.map(differentiated)(replicas.rows(batch)))

        def add(sums: tuple[jax.Array, Tree], rows: Arrays) -> tuple[jax.Array, Tree]:
            return pinned(jax.tree.map(jnp.add, sums, replicas.map(differentiated)(replicas.rows(rows))))

        zeros = jax.tree.map(lambda p: jnp.zeros((replicas.count, *p.shape), jnp.float32), used)
        return self._in_turn(add, pinned((jnp.zeros(replicas.count, jnp.float32), zeros)), self._split(batch))

    def _summed(self, replicas: Replicas, gradients: Tree, waiting: Tree | None) -> tuple[Tree, Tree | None]:
        """The sums over all replicas, [R, ...] → [...], of these gradients or of those that wait, and the ones that wait now."""
        if self.sync is None:
            return jax.tree.map(replicas.add_up, gradients, self.dtypes), None
        own = self._along_sync(replicas, self.sync, gradients)
        return self.sync.exchange(waiting if self.is_late else own, self.sums, self.wire), own if self.is_late else None

    def _along_sync(self, replicas: Replicas, sync: Replicas, gradients: Tree) -> Tree:
        """The gradients of the replicas along the axis of `sync`, from all replicas' gradients. Late ones have the type of the wire."""
        if replicas.count > sync.count:
            # [R, ...] → [outer, others, ...]: the others add up first.
            gradients = jax.tree.map(partial(_over_others, sync.count), gradients, self.dtypes)
            gradients = jax.lax.with_sharding_constraint(gradients, jax.tree.map(sync.lift, self.shardings))
        return jax.tree.map(lambda g: g.astype(self._waiting_type), gradients) if self.is_late else gradients

    def _summed_in_layer_scan(
        self, replicas: Replicas, objective: Objective, used: Tree, variables: Tree, batch: Arrays, waiting: Tree | None
    ) -> tuple[jax.Array, Tree, Tree]:
        """The losses of all replicas, the sums of the gradients that waited, which the scan over layers takes, and the new gradients."""
        values, gradients, sums = replicas.differentiate_beside_sums(
            objective.loss,
            used,
            variables,
            replicas.rows(batch),
            waiting,
            gradients=self.shardings,
            sums=self.sums,
            # Not the model's: a plan would take what waits for parameters.
            region=partial(signal.context, "optimizer"),
        )
        return values, sums, self._along_sync(replicas, replicas, gradients)

    def _in_turn(self, add: Callable[[_Sums, Arrays], _Sums], sums: _Sums, split: Arrays) -> _Sums:
        """The sums after all parts, one after another."""
        # The number is hidden from XLA. If it were known, the passes that let collectives of one part run beside the next would keep the
        # activations of two parts at once, or compute each part twice.
        count = jax.lax.optimization_barrier(jnp.int32(self.parts))

        def body(carry: tuple[jax.Array, _Sums]) -> tuple[jax.Array, _Sums]:
            i, sums = carry
            return i + 1, add(sums, jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), split))

        with signal.trips(self.parts):
            return jax.lax.while_loop(lambda carry: carry[0] < count, body, (jnp.int32(0), sums))[1]

    def _split(self, batch: Arrays) -> Arrays:
        # [b, ...] → [parts, b / parts, ...]. Part i takes rows i, i + parts, ...: each part has rows of every device, and none has to move.
        return jax.tree.map(lambda x: x.reshape(x.shape[0] // self.parts, self.parts, *x.shape[1:]).swapaxes(0, 1), batch)


def _over_others(outer: int, x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    x = x.reshape(outer, -1, *x.shape[1:]).astype(dtype)
    return jax.lax.reduce(x, jnp.zeros((), dtype), jax.lax.add, (1,)).astype(jnp.float32)
