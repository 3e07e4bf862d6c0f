"""The loss and the gradient of a batch that runs in parts, one after another (`train.accumulate`).

A gradient is a sum over all devices that split the batch. Along an axis that splits parameters too, each part needs it at once, because
no device has room for whole gradients. Along any other axis it can wait until the last part is done: the devices are replicas there
(`jgt.replicas`), each adds up the gradients of its own rows, and the sum crosses the axis once, with the bytes of a batch without parts.
The loss has to be a sum over rows for this.

Each device then has a sum of its own for each parameter that it has, in f32, also with ZeRO-1, which keeps only a part of it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jgt.replicas import Replicas, WireType, exchange

from .objective import Arrays, Objective, Part

_Sums = TypeVar("_Sums")

Result = tuple[tuple[jax.Array, Part], Any, Any]
"""The loss and the rest of its results, the gradient by the parameters as the state has them, and the new residual."""


@dataclass(frozen=True, kw_only=True)
class Wired:
    """How gradients cross an axis, the outermost of the batch.

    replicas: along that axis. shardings: of the sums. wire: in which numbers travel. feedback: what they lose is kept, as the residual.
    """

    replicas: Replicas
    shardings: Any
    wire: WireType
    feedback: bool = False


@dataclass(frozen=True, kw_only=True)
class Apart:
    """How the gradients of replicas stay apart until the last part is done.

    shardings: of the gradient by the parameters as the model uses them. dtypes: the type in which each of them crosses the axes. wired: how
    they cross the first axis instead.
    """

    replicas: Replicas
    shardings: Any
    dtypes: Any
    wired: Wired | None = None

    def summed(self, gradients: Any, residual: Any) -> tuple[Any, Any]:
        """The sums over all replicas, [R, ...] → [...], and the new residual."""
        if self.wired is None:
            return jax.tree.map(self.replicas.added, gradients, self.dtypes), residual
        outer = self.wired.replicas.count
        if self.replicas.count > outer:
            # [R, ...] → [outer, others, ...]: the others add up first.
            gradients = jax.tree.map(lambda g, dtype: _over_others(g, outer, dtype), gradients, self.dtypes)
            lifted = jax.tree.map(self.wired.replicas.lifted, self.shardings)
            gradients = jax.lax.with_sharding_constraint(gradients, lifted)
        lost = residual if self.wired.feedback else None
        sums, lost = exchange(gradients, self.wired.replicas, self.wired.shardings, self.wired.wire, lost)
        return sums, residual if lost is None else lost


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Into how many equal parts a batch is cut.

    pin: gives a tree of gradients its shardings. apart: None adds up the gradients of each part over all devices.
    """

    count: int = 1
    pin: Callable[[Any], Any]
    apart: Apart | None = None

    def differentiate(self, objective: Objective, params: Any, variables: Any, batch: Arrays, residual: Any = ()) -> Result:
        """The loss and its gradient, added up over the parts of the batch."""
        # Once for all parts: what is stored on other devices is brought here, and what a part's gradient brings back.
        used, to_stored = jax.vjp(objective.used, params)
        if self.apart is not None:
            values, apart = self._summed_apart(self.apart, objective, used, variables, batch)
            gradients, residual = self.apart.summed(apart, residual)
            gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, used)
            return (jnp.sum(values), Part(None, {}, variables)), self.pin(to_stored(gradients)[0]), residual

        def differentiated(variables: Any, rows: Arrays) -> tuple[tuple[jax.Array, Part], Any]:
            result, gradients = jax.value_and_grad(objective.loss, has_aux=True)(used, variables, rows)
            return result, to_stored(gradients)[0]

        if self.count == 1:
            return *differentiated(variables, batch), residual
        split = self._split(batch)
        value, part = jax.eval_shape(objective.loss, used, variables, jax.tree.map(lambda x: x[0], split))
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (value, part.weight, part.metrics))
        # Pinned, or the scan would carry whole gradients on every device.
        gradients = self.pin(jax.tree.map(jnp.zeros_like, params))

        def add(carry: tuple[Any, Any], rows: Arrays) -> tuple[Any, Any]:
            sums, variables = carry
            (value, part), gradients = differentiated(variables, rows)
            return jax.tree.map(jnp.add, sums, (value, part.weight, part.metrics, gradients)), part.variables

        (value, weight, metrics, gradients), variables = self._in_turn(add, ((*zero, gradients), variables), split)
        return (value, Part(weight, metrics, variables)), gradients, residual

    def _summed_apart(self, apart: Apart, objective: Objective, used: Any, variables: Any, batch: Arrays) -> tuple[jax.Array, Any]:
        """The losses and gradients of all replicas, [R, ...] in f32. The loss is a sum over rows, without metrics."""
        replicas = apart.replicas
        lifted = jax.tree.map(replicas.lifted, apart.shardings)

        def differentiated(rows: Arrays) -> tuple[jax.Array, Any]:
            (value, _), gradients = jax.value_and_grad(objective.loss, has_aux=True)(used, variables, rows)
            return value, jax.tree.map(lambda g: g.astype(jnp.float32), gradients)

        def pinned(found: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            return found[0], jax.lax.with_sharding_constraint(found[1], lifted)

        if self.count == 1:
            return pinned(replicas.map(differentiated)(replicas.rows(batch)))

        def add(sums: tuple[jax.Array, Any], rows: Arrays) -> tuple[jax.Array, Any]:
            return pinned(jax.tree.map(jnp.add, sums, replicas.map(differentiated)(replicas.rows(rows))))

        zeros = jax.tree.map(lambda p: jnp.zeros((replicas.count, *p.shape), jnp.float32), used)
        return self._in_turn(add, pinned((jnp.zeros(replicas.count, jnp.float32), zeros)), self._split(batch))

    def _in_turn(self, add: Callable[[_Sums, Arrays], _Sums], sums: _Sums, split: Arrays) -> _Sums:
        """The sums after all parts, one after another."""
        # The number is hidden from XLA. If it were known, the passes that let collectives of one part run beside the next would keep the
        # activations of two parts at once, or compute each part twice.
        count = jax.lax.optimization_barrier(jnp.int32(self.count))

        def body(carry: tuple[jax.Array, _Sums]) -> tuple[jax.Array, _Sums]:
            i, sums = carry
            return i + 1, add(sums, jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), split))

        with jax.named_scope(f"jgt.trips.{self.count}"):
            return jax.lax.while_loop(lambda carry: carry[0] < count, body, (jnp.int32(0), sums))[1]

    def _split(self, batch: Arrays) -> Arrays:
        # [b, ...] → [parts, b / parts, ...]. Part i takes rows i, i + parts, ...: each part has rows of every device, and none has to move.
        return jax.tree.map(lambda x: x.reshape(x.shape[0] // self.count, self.count, *x.shape[1:]).swapaxes(0, 1), batch)


def first_residual(params: Any, replicas: int) -> Any:
    """`State.residual` before the first step, of a model's parameters."""
    return jax.tree.map(lambda p: jnp.zeros((replicas, *p.shape), jnp.float32), params)


def _over_others(x: jax.Array, outer: int, dtype: Any) -> jax.Array:
    x = x.reshape(outer, -1, *x.shape[1:]).astype(dtype)
    return jax.lax.reduce(x, jnp.zeros((), dtype), jax.lax.add, (1,)).astype(jnp.float32)
