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
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jgt import signal
from jgt.replicas import Pack, Replicas, WireType, exchange, turns_of, with_riders

from .objective import Arrays, Objective, Part

_Sums = TypeVar("_Sums")

Result = tuple[tuple[jax.Array, Part], Any, "Carried"]
"""The loss and the rest of its results, the gradient by the parameters as the state has them, and what the next step needs."""


class Carried(NamedTuple):
    """What gradients leave for the next step, [R, ...] as the model has its parameters, or ().

    residual: what rounding took away. waiting: with `sync.late`, the gradients of this step, which the next step adds up and applies.
    """

    residual: Any = ()
    waiting: Any = ()


_NOTHING = Carried()


@dataclass(frozen=True, kw_only=True)
class Wired:
    """How gradients cross an axis, the outermost of the batch.

    replicas: along that axis. shardings: of the sums. wire: in which numbers travel. feedback: what they lose is kept, as the residual.
    is_late: they cross it in the next step.
    """

    replicas: Replicas
    shardings: Any
    wire: WireType
    feedback: bool = False
    is_late: bool = False

    def crossed(self, gradients: Any, residual: Any) -> tuple[Any, Any]:
        """The sums over the axis, [R, ...] → [...], and the new residual."""
        sums, lost = exchange(gradients, self.replicas, self.shardings, self.wire, residual if self.feedback else None)
        return sums, residual if lost is None else lost


@dataclass(frozen=True, kw_only=True)
class Apart:
    """How the gradients of replicas stay apart until the last part is done.

    shardings: of the gradient by the parameters as the model uses them. dtypes: the type in which each of them crosses the axes. wired: how
    they cross the first axis instead. rides: whether the layers are a scan that sums can ride in, which they are not in a pipeline.
    """

    replicas: Replicas
    shardings: Any
    dtypes: Any
    wired: Wired | None = None
    rides: bool = True

    @property
    def can_ride(self) -> bool:
        """Whether sums of the last step's gradients can ride along in a scan: they travel as they are, beside one part of the batch."""
        wired = self.wired
        return self.rides and wired is not None and wired.is_late and wired.wire != "int8" and self.replicas.axes == wired.replicas.axes

    def summed(self, gradients: Any, carried: Carried) -> tuple[Any, Carried]:
        """The sums over all replicas, [R, ...] → [...]: of these gradients, or of those that were waiting."""
        wired = self.wired
        if wired is None:
            return jax.tree.map(self.replicas.added, gradients, self.dtypes), carried
        own = self.waiting(gradients)
        sums, residual = wired.crossed(carried.waiting if wired.is_late else own, carried.residual)
        return sums, Carried(residual, own if wired.is_late else ())

    def waiting(self, gradients: Any) -> Any:
        """The gradients of the replicas along the first axis, from those of all. Late ones wait in the type in which they travel."""
        wired = self.wired
        assert wired is not None
        outer = wired.replicas.count
        if self.replicas.count > outer:
            # [R, ...] → [outer, others, ...]: the others add up first.
            gradients = jax.tree.map(lambda g, dtype: _over_others(g, outer, dtype), gradients, self.dtypes)
            lifted = jax.tree.map(wired.replicas.lifted, self.shardings)
            gradients = jax.lax.with_sharding_constraint(gradients, lifted)
        return jax.tree.map(lambda g: g.astype(waiting_type(wired.wire)), gradients) if wired.is_late else gradients


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Into how many equal parts a batch is cut.

    pin: gives a tree of gradients its shardings. apart: None adds up the gradients of each part over all devices.
    """

    count: int = 1
    pin: Callable[[Any], Any]
    apart: Apart | None = None

    @property
    def is_late(self) -> bool:
        """Whether the gradient is the last step's."""
        return self.apart is not None and self.apart.wired is not None and self.apart.wired.is_late

    def differentiate(self, objective: Objective, params: Any, variables: Any, batch: Arrays, carried: Carried = _NOTHING) -> Result:
        """The loss and its gradient, added up over the parts of the batch; with `sync.late`, the gradient of the last step."""
        # Once for all parts: what is stored on other devices is brought here, and what a part's gradient brings back.
        used, to_stored = jax.vjp(objective.used, params)
        if self.apart is not None:
            if self.count == 1 and self.apart.can_ride:
                values, gradients, carried = self._riding(self.apart, objective, used, variables, batch, carried)
            else:
                values, apart = self._summed_apart(self.apart, objective, used, variables, batch)
                gradients, carried = self.apart.summed(apart, carried)
            gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, used)
            return (jnp.sum(values), Part(None, {}, variables)), self.pin(to_stored(gradients)[0]), carried

        def differentiated(variables: Any, rows: Arrays) -> tuple[tuple[jax.Array, Part], Any]:
            result, gradients = jax.value_and_grad(objective.loss, has_aux=True)(used, variables, rows)
            return result, to_stored(gradients)[0]

        if self.count == 1:
            return *differentiated(variables, batch), carried
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
        return (value, Part(weight, metrics, variables)), gradients, carried

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

    def _riding(
        self, apart: Apart, objective: Objective, used: Any, variables: Any, batch: Arrays, carried: Carried
    ) -> tuple[jax.Array, Any, Carried]:
        """The losses of all replicas, the sums of what was waiting, which ride in the layer scan, and their own gradients, which wait."""
        wired, replicas, rows = apart.wired, apart.replicas, apart.replicas.rows(batch)
        assert wired is not None
        waiting, structure = jax.tree.flatten(carried.waiting)
        places, shapes = jax.tree.leaves(wired.shardings), [x.shape[1:] for x in waiting]
        pack = Pack.of(shapes, places, replicas, _turns(replicas, objective, used, variables, rows))

        def ride(parts: list[list[jax.Array]]) -> list[jax.Array]:
            # Not the model's: a plan would take what waits for parameters.
            with signal.context("optimizer"):
                return pack.sums(parts)

        def differentiated(rows: Arrays, riders: list[list[jax.Array]]) -> tuple[jax.Array, Any, list[jax.Array]]:
            def loss(used: Any) -> tuple[jax.Array, list[jax.Array]]:
                (value, _), sums = with_riders(objective.loss, (used, variables, rows), riders, ride)
                return value, sums

            (value, sums), gradients = jax.value_and_grad(loss, has_aux=True)(used)
            return value, jax.tree.map(lambda g: g.astype(jnp.float32), gradients), sums

        values, gradients, turns = replicas.map(differentiated, (0, 0), (0, 0, None))(rows, pack.cut(waiting))
        gradients = jax.lax.with_sharding_constraint(gradients, jax.tree.map(replicas.lifted, apart.shardings))
        found = pack.joined(turns, shapes) | {n: replicas.added(waiting[n], waiting[n].dtype, places[n]) for n in pack.rest}
        sums = jax.lax.with_sharding_constraint([found[n].astype(jnp.float32) for n in range(len(waiting))], places)
        return values, jax.tree.unflatten(structure, sums), Carried(carried.residual, apart.waiting(gradients))

    def _split(self, batch: Arrays) -> Arrays:
        # [b, ...] → [parts, b / parts, ...]. Part i takes rows i, i + parts, ...: each part has rows of every device, and none has to move.
        return jax.tree.map(lambda x: x.reshape(x.shape[0] // self.count, self.count, *x.shape[1:]).swapaxes(0, 1), batch)


def _turns(replicas: Replicas, objective: Objective, used: Any, variables: Any, rows: Any) -> int:
    """The number of turns of the scan over layers."""
    found: list[int] = []

    def probe(rows: Arrays) -> jax.Array:
        found.append(turns_of(objective.loss, used, variables, rows))
        return jnp.zeros(())

    # Under the map, where the loss is traced anyway.
    jax.eval_shape(replicas.map(probe), rows)
    return found[0]


def first_residual(params: Any, replicas: int, dtype: Any = jnp.float32) -> Any:
    """`State.residual` before the first step, of a model's parameters; in another type `State.waiting`."""
    return jax.tree.map(lambda p: jnp.zeros((replicas, *p.shape), dtype), params)


def waiting_type(wire: WireType) -> Any:
    """The type in which gradients wait for the next step."""
    return jnp.bfloat16 if wire == "bf16" else jnp.float32


def _over_others(x: jax.Array, outer: int, dtype: Any) -> jax.Array:
    x = x.reshape(outer, -1, *x.shape[1:]).astype(dtype)
    return jax.lax.reduce(x, jnp.zeros((), dtype), jax.lax.add, (1,)).astype(jnp.float32)
