"""Checkpoints between runs with another number of replicas: from another `sync.axis`, without `sync:`, or the other way round.

Right after an exchange all replicas have the same parameters, so their number can change there. The moments have not been exchanged, and
continue with their mean. In the middle of a phase the replicas differ, and only a run with as many can continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jgt.document import InputError

from ..checkpoint.restore import restore_parts
from ..checkpoint.saved import SavedStep, UnusableError
from ..command_line import may_have_fewer
from ..config import Run
from ..setup import Setup
from ..setup.state import COMPILED_ONCE, without_arrays
from ..step.state import State, Tree
from ..sync.phases import mean_of_replicas, of_replicas


def saved_replicas(saved: SavedStep) -> int:
    """The number of replicas whose parts a checkpoint has, each on its own; 0 without phases."""
    shapes = {entry.path: entry.shape for entry in saved.manifest.arrays}
    anchors = [path for path in shapes if path.startswith("anchor/")]
    return shapes[f"params/{anchors[0].removeprefix('anchor/')}"][0] if anchors else 0


def check_phase(run: Run, saved: SavedStep, replicas: int) -> None:
    """Raises InputError if a checkpoint is in the middle of a phase of another number of replicas. replicas: those of the run, or 0.

    Where the launcher may have changed the number, the error is UnusableError, so that the start takes an older checkpoint.
    """
    before, since = saved_replicas(saved), saved.manifest.phase
    if not since or before == replicas:
        return
    here = f"{replicas} replicas" if replicas else "no replicas"
    where = f"{run.where('sync.axis')}: sync.axis" if replicas else f"{run.where('sync')}: sync"
    inside = f"is in the middle of a phase, {since} step{'s' * (since > 1)} after an exchange"
    if may_have_fewer():
        raise UnusableError(saved.folder, f"{inside}, with {before} replicas, but there are {replicas} now")
    remedy = f"Resume with {before} up to an exchange, or to the end of the run, and change it then"
    raise InputError([f"{where}: {saved.folder} {inside}, with {before} replicas, but this run has {here}. {remedy}"])


def lifted_shapes(one: State, shardings: State, replicas: int, *, momentum: bool) -> tuple[State, State]:
    """The shapes and shardings to read a checkpoint of so many replicas, from those of one replica's state.

    momentum: whether the outer step's is read. A device reads its part of all replicas.
    """

    def shape(x: Any) -> Any:
        return jax.ShapeDtypeStruct((replicas, *x.shape), x.dtype)

    def sharding(s: NamedSharding) -> NamedSharding:
        return NamedSharding(s.mesh, PartitionSpec(None, *s.spec), memory_kind=s.memory_kind)

    def lifted(state: State, fn: Any) -> State:
        anchor = state.trained.params
        # Right after an exchange, all replicas' parameters are the anchor's.
        return of_replicas(fn, state.with_parts(params=())).with_parts(anchor=anchor, momentum=anchor if momentum else None)

    return lifted(one, shape), lifted(shardings, sharding)


def merged(state: State) -> State:
    """One state, from the state of several replicas right after an exchange."""
    anchor = state.exchanged.anchor
    return of_replicas(mean_of_replicas, state.with_parts(params=())).with_parts(params=anchor, anchor=None)


def restored_of_one(saved: SavedStep, one: State, shardings: State, name: str) -> Any:
    """A part of a state, `variables` or `average`, from a checkpoint of any number of replicas. one, shardings: of one replica's state."""
    before = saved_replicas(saved)
    if before:
        one, shardings = lifted_shapes(one, shardings, before, momentum=False)
    found = restore_parts(saved, {name: one.arrays()[name]}, {name: shardings.arrays()[name]}, cast=False)[name]
    return jax.tree.map(mean_of_replicas, found) if before else found


def with_replicas(setup: Setup, saved: State, *, has_replicas: bool) -> State:
    """The state of a checkpoint as this run has it in its own, from the state of a run with another number of replicas, or with none."""
    phases = setup.phases

    def convert(state: State) -> State:
        one = merged(state) if has_replicas else state
        return one if phases is None else phases.begun(one)

    absent = without_arrays(jax.eval_shape(convert, saved))
    return jax.jit(convert, out_shardings=setup.saved_shardings.with_parts(**absent), compiler_options=COMPILED_ONCE)(saved)


def first_losses(setup: Setup) -> Tree | None:
    """The window of losses before the first step, on the devices."""
    losses, phases = setup.features.first_losses(), setup.phases
    losses = losses if phases is None or losses is None else phases.spread(losses)
    return jax.tree.map(jax.device_put, losses, setup.shardings.kept.losses)


def with_zeros(setup: Setup, state: State, names: Sequence[str]) -> State:
    """The state with zeros for parts that it lacks."""
    shapes, shardings = ({name: tree.arrays()[name] for name in names} for tree in (setup.shapes, setup.shardings))
    zeros = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), out_shardings=shardings)
    return state.with_parts(**zeros())
