"""The state of a checkpoint as this run has it, from a run that may have had other parts of a state, or another number of replicas.

Right after an exchange all replicas have the same parameters, so their number can change there: from another `sync.axis`, without `sync:`,
or the other way round. The moments have not been exchanged, and continue with their mean. In the middle of a phase the replicas differ, and
only a run with as many can continue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jgt import path_text
from jgt.document import InputError

from ..checkpoint.restore import restore, restore_parts
from ..checkpoint.saved import SavedStep, UnusableError
from ..settings.command_line import may_have_fewer
from ..setup import Setup
from ..setup.published import base_shapes
from ..setup.state import COMPILED_ONCE, without_arrays
from ..step.state import OPTIONAL, State, Tree
from ..step.sync.phases import mean_of_replicas, of_replicas
from ..weights.base import restored_frozen, restored_params


def saved_params(setup: Setup, saved: SavedStep, shapes: Tree, shardings: Tree, *, cast: bool = False) -> Tree:
    """Parameters of a checkpoint, whichever of them were frozen, and packed or not. Raises InputError if they do not fit."""
    adapters, base = setup.program.adapters, saved.manifest.base
    stored = {entry.path.partition("/")[2]: entry.dtype for entry in (*saved.manifest.arrays, *(() if base is None else base.arrays))}

    def as_stored(path: jax.tree_util.KeyPath, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        packing, dtype = None if adapters is None else adapters.packing_of(path_text(path)), stored.get(path_text(path), "uint8")
        return x if packing is None or dtype == "uint8" else jax.ShapeDtypeStruct(packing.unpacked(x.shape), dtype)

    wanted = jax.tree.map_with_path(as_stored, shapes)
    params = restored_params(saved, wanted, shardings, model=setup.run.config.model, whole=base_shapes(setup), cast=cast)
    return params if adapters is None else adapters.packed_params(params, shardings)


def restore_state(setup: Setup, saved: SavedStep, allow: Sequence[str] = ()) -> State:
    """The state of a checkpoint, laid out for this run. Raises InputError if it does not fit.

    Between two starts train.skip_spikes may be switched on, or its window changed: the window then starts empty. An average that is
    switched on starts at the parameters. Late gradients, and the momentum of the outer step, start at zero. allow: as in `Resume`.
    """
    before, now = saved_replicas(saved), 0 if setup.phases is None else setup.phases.replicas.count
    check_phase(setup.run.where, saved, now)
    if before == now:
        shapes, shardings = setup.saved_shapes, setup.saved_shardings
    else:
        shapes, shardings = setup.saved_of_one
        if before:
            shapes, shardings = lifted_shapes(shapes, shardings, before, momentum=setup.shapes.momentum is not None)
    absent, cast = _absent(saved, shapes), setup.run.config.checkpoint.cast
    frozen: dict[str, object] = {}
    if saved.manifest.base is not None:
        places, model, whole = (shapes.frozen, shardings.frozen), setup.run.config.model, base_shapes(setup)
        frozen = {"frozen": restored_frozen(saved, *places, model=model, whole=whole, cast=cast, allow=allow)}
        shapes, shardings = replace(shapes, frozen={}), replace(shardings, frozen={})
    state = restore(saved, replace(shapes, **absent), replace(shardings, **absent), cast=cast)
    state = replace(state, **frozen)
    state = setup.from_saved(state if before == now else with_replicas(setup, state, has_replicas=before > 0))
    state = replace(state, **_first_values(setup, [name for name in absent if name != "average"]))
    return setup.with_average(state) if "average" in absent else state


def _absent(saved: SavedStep, shapes: State) -> dict[str, None]:
    """The optional parts of a state that a checkpoint lacks, or has in another shape."""
    entries = {entry.path: entry.shape for entry in saved.manifest.arrays}
    wanted = {path_text(path): x.shape for path, x in jax.tree.leaves_with_path(shapes)}
    missing = {path.partition("/")[0] for path, shape in wanted.items() if entries.get(path) != shape}
    return dict.fromkeys(OPTIONAL & missing)


def _first_values(setup: Setup, names: Sequence[str]) -> dict[str, object]:
    """The values of optional parts of a state before the first step: NaN for losses, otherwise zero."""
    shapes, shardings = ({name: getattr(tree, name) for name in names} for tree in (setup.shapes, setup.shardings))

    def first() -> dict[str, object]:
        values = {name: jnp.nan if name == "losses" else 0 for name in names}
        return {name: jax.tree.map(partial(jnp.full_like, fill_value=values[name]), part) for name, part in shapes.items()}

    return jax.jit(first, out_shardings=shardings)()


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

    def shape(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((replicas, *x.shape), x.dtype)

    def sharding(s: NamedSharding) -> NamedSharding:
        return NamedSharding(s.mesh, PartitionSpec(None, *s.spec), memory_kind=s.memory_kind)

    def lifted(state: State, fn: Callable[..., object]) -> State:
        anchor = state.params
        # Right after an exchange, all replicas' parameters are the anchor's.
        return replace(of_replicas(fn, replace(state, params=())), anchor=anchor, momentum=anchor if momentum else None)

    return lifted(one, shape), lifted(shardings, sharding)


def restored_of_one(saved: SavedStep, one: State, shardings: State, name: str, *, cast: bool = False, keys: bool = True) -> Tree:
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
