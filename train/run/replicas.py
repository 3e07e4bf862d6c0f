"""Checkpoints between runs with another number of replicas: from another `sync.axis`, without `sync:`, or the other way round.

Right after an exchange all replicas have the same parameters, so their number can change there. The moments have not been exchanged, and
continue with their mean. In the middle of a phase the replicas differ, and only a run with as many can continue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jgt.document import InputError

from ..checkpoint.restore import restore_parts
from ..checkpoint.saved import SavedStep, UnusableError
from ..settings.command_line import may_have_fewer
from ..setup import Setup
from ..setup.state import COMPILED_ONCE, without_arrays
from ..step.state import State
from ..step.sync.phases import mean_of_replicas, of_replicas


def saved_replicas(saved: SavedStep) -> int:
    """The number of replicas whose parts a checkpoint has; 0 without phases."""
    shapes = {entry.path: entry.shape for entry in saved.manifest.arrays}
    anchors = [path for path in shapes if path.startswith("anchor/")]
    return shapes[f"params/{anchors[0].removeprefix('anchor/')}"][0] if anchors else 0


def check_phase(where: Callable[[str], str], saved: SavedStep, replicas: int) -> None:
    """Raises InputError if a checkpoint is in the middle of a phase of another number of replicas than this run's.

    Where the launcher may have changed the number, the error is UnusableError, so that the start takes an older checkpoint.
    """
    before, since = saved_replicas(saved), saved.manifest.phase
    if not since or before == replicas:
        return
    inside = f"is in the middle of a phase, {since} step{'s' * (since > 1)} after an exchange"
    if may_have_fewer():
        raise UnusableError(saved.folder, f"{inside}, with {before} replicas, but there are {replicas} now")
    key = "sync.axis" if replicas else "sync"
    remedy = f"Resume with {before} up to an exchange, or to the end of the run, and change it then"
    here = f"with {before} replicas, but this run has {replicas or 'no'} replicas"
    raise InputError([f"{where(key)}: {key}: {saved.folder} {inside}, {here}. {remedy}"])


def lifted_shapes(one: State, shardings: State, replicas: int, *, momentum: bool) -> tuple[State, State]:
    """The shapes and shardings of a checkpoint with replicas, from one replica's. A device reads its part of all replicas.

    momentum: whether the outer step's momentum is read.
    """

    def shape(x: Any) -> Any:
        return jax.ShapeDtypeStruct((replicas, *x.shape), x.dtype)

    def sharding(s: NamedSharding) -> NamedSharding:
        return NamedSharding(s.mesh, PartitionSpec(None, *s.spec), memory_kind=s.memory_kind)

    def lifted(state: State, fn: Any) -> State:
        anchor = state.params
        # Right after an exchange, all replicas' parameters are the anchor's.
        return replace(of_replicas(fn, replace(state, params=())), anchor=anchor, momentum=anchor if momentum else None)

    return lifted(one, shape), lifted(shardings, sharding)


def restored_of_one(saved: SavedStep, one: State, shardings: State, name: str, *, cast: bool = False, keys: bool = True) -> Any:
    """A part of a state, `variables` or `average`, from a checkpoint of any number of replicas. one, shardings: one replica's state.

    cast, keys: as in `restore_parts`.
    """
    before = saved_replicas(saved)
    if before:
        one, shardings = lifted_shapes(one, shardings, before, momentum=False)
    part = restore_parts(saved, {name: one.arrays()[name]}, {name: shardings.arrays()[name]}, cast=cast, keys=keys)[name]
    return jax.tree.map(mean_of_replicas, part) if before else part


def with_replicas(setup: Setup, saved: State, *, has_replicas: bool) -> State:
    """The state of a checkpoint as this run has it in its own, from the state of a run with another number of replicas, or with none."""
    phases = setup.phases

    def convert(state: State) -> State:
        if has_replicas:
            state = replace(of_replicas(mean_of_replicas, replace(state, params=())), params=state.anchor, anchor=None)
        return state if phases is None else phases.begin(state)

    absent = without_arrays(jax.eval_shape(convert, saved))
    return jax.jit(convert, out_shardings=replace(setup.saved_shardings, **absent), compiler_options=COMPILED_ONCE)(saved)
