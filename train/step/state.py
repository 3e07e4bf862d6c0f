"""The state of a run, which a step takes and returns and a checkpoint stores.

A feature that is off has None in the place of its arrays, which is not an array to JAX, so one type serves all runs. The names of the
fields are the names on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import optax

Tree = optax.Params
"""Arrays in nested containers; in a tree of shapes or shardings, these."""

OPTIONAL = frozenset(("losses", "average", "anchor", "momentum", "waiting"))
"""The parts of a state that some runs lack."""
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
"""By the bytes of an element, the words that a checksum adds up."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The arrays that a run goes through its steps with. Also a tree of their shapes or shardings.

    step: the number n of steps so far; ~n after an update that ends the run (`StepFeatures`). variables: everything but parameters that the
    model keeps from step to step, such as running statistics and random keys. losses: the losses of the last steps for `train.skip_spikes`,
    f32[window], NaN for steps still to come. average: the moving average of the parameters for `train.ema`, in f32. anchor, momentum: the
    parameters of the last exchange, if `sync.every` is above 1, and the momentum of `sync.outer`. waiting: the gradients of each replica
    that the next step applies, if `sync.late` is 1, [R, ...]. frozen: the parameters that are not trained, and so not in `params`.
    """

    step: jax.Array
    params: Tree
    opt_state: optax.OptState
    variables: Tree = ()
    losses: jax.Array | None = None
    average: Tree | None = None
    anchor: Tree | None = None
    momentum: Tree | None = None
    waiting: Tree | None = None
    frozen: Tree = field(default_factory=dict)

    def arrays(self) -> dict[str, Tree]:
        """The parts that contain arrays, by name."""
        return {name: part for name, part in vars(self).items() if jax.tree.leaves(part)}


@jax.jit
def digest_of_arrays(tree: object) -> jax.Array:
    """A checksum of all arrays of a tree, uint32[]. Integer sums do not depend on their order, so any mesh gives the same."""
    words = [
        jnp.sum(jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize]).astype(jnp.uint32))
        for x in (x.astype(jnp.uint8) if x.dtype == bool else x for x in jax.tree.leaves(tree))
    ]
    # Odd factors, so that two arrays cannot be exchanged unnoticed, and no factor maps two different sums to the same value.
    weighted = [word * jnp.uint32(2 * i + 1) for i, word in enumerate(words)]
    return jnp.sum(jnp.stack(weighted), dtype=jnp.uint32)
