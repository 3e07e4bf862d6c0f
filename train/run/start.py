"""Where training begins: the state that a run starts from, and the batches of data from that position on.

A run may be started any number of times with the same command, by a scheduler that knows nothing about it, and must find its own way.
So the order is fixed: the run's own checkpoints come first; only a run that has none uses `--resume PATH`, and only without that a fresh
state is made, into which `checkpoint.weights` may put another run's parameters and statistics. With this order a second start with
`--resume PATH` continues the run instead of beginning once more from PATH. Another run's folder is only ever read.

The invariants: all processes start from the same step (`train.checkpoint.saved` sees to that), and the same rows reach the model on every
mesh and with any number of processes, so a run that resumes neither repeats nor skips one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jgt import path_text
from jgt.document import InputError

from ..checkpoint.checkpoint import Checkpoints
from ..checkpoint.manifest import Base, Kept
from ..checkpoint.restore import restore, without_keys
from ..checkpoint.saved import SavedStep, Search, UnusableError, search_elsewhere, stored_data
from ..checkpoint.signature import read_key
from ..data.batches import Data
from ..files.bucket import is_url, place_of
from ..files.cache import local_folder
from ..files.streams import say
from ..models.config import ModelConfig
from ..setup import Setup
from ..setup.published import base_shapes, published_params
from ..step.state import OPTIONAL, State
from ..step.trained import merged
from ..weights.adapt.adapters import factors_of
from ..weights.base import agreed, base_in, inherited_base, restored_frozen, restored_params, resumed_base
from ..weights.safetensors import has_weights
from .identity import Resume, check_adapters, check_model, check_origin
from .replicas import check_phase, lifted_shapes, restored_of_one, saved_replicas, with_replicas

_Restored = TypeVar("_Restored")


def _new_id() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True, kw_only=True)
class Position:
    """The progress of a run: its state, the updates so far, the sequences of training data consumed, and the steps since an exchange.

    base: published weights that hold the frozen parameters, so that no checkpoint needs them. data: what the checkpoint has about the place
    in the data. kept: what else it has. origin: for a new run, where its parameters are from, for messages.
    """

    state: State
    step: int = 0
    samples: int = 0
    phase: int = 0
    base: Base | None = None
    data: tuple[str, ...] = ()
    kept: Kept = field(default_factory=lambda: Kept(id=_new_id()))
    origin: str = "seed"


@dataclass(frozen=True)
class Start:
    """Finds and restores the state that a run starts from.

    data: the data's fingerprint. phase(name, **details): a context manager that records how long a phase of the run takes. say: prints a
    line for a person.
    """

    setup: Setup
    data: Mapping[str, Any]
    phase: Callable[..., AbstractContextManager[None]]
    say: Callable[[str], None]

    def position(self, checkpoints: Checkpoints, resume: Resume) -> Position:
        """The position to train from. Raises InputError for a checkpoint that does not fit the run, and DiskError."""
        run, other = self.setup.run, resume.path

        def restore_own(saved: SavedStep) -> State:
            with self.phase("restore", step=saved.manifest.step):
                return restore_state(self.setup, saved, resume.allow)

        def restore_other(saved: SavedStep) -> State:
            # The run directory was checked before JAX was imported. This checkpoint's origin is known only now.
            check_origin(run, saved.manifest.fingerprints, self.data, str(saved.folder), resume.allow)
            return restore_own(saved)

        kept = Kept()
        if restored := self._restore(checkpoints.search(), restore_own):
            kept = restored[0].manifest.kept
            self.say(f"Resumed from step {restored[0].manifest.step} in {run.config.run.place}")
        elif other is not None:
            restored = self._restore_elsewhere("--resume", other, restore_other)
            self.say(f"Continues from {restored[0].folder}, at step {restored[0].manifest.step}")
        else:
            return self.fresh()
        (saved, state), manifest = restored, restored[0].manifest
        base = resumed_base(saved, run.config.model, self.setup.saved_shapes.frozen)
        # Other data, which --allow-change permits, begins at its beginning.
        data = stored_data(saved) if manifest.fingerprints.get("data") == dict(self.data) else ()
        # Another run, or an earlier version, has no identity to go on with.
        kept = kept if kept.id else Kept(id=_new_id())
        return Position(state=state, step=manifest.step, samples=manifest.samples, phase=manifest.phase, base=base, data=data, kept=kept)

    def fresh(self) -> Position:
        """The position before the first step of a new run.

        Raises InputError if the parameters of `checkpoint.weights` or `model.hf` do not fit.
        """
        weights = self.setup.run.config.checkpoint.weights
        with self.phase("init"):
            # Waits, so that the phase includes the work on the devices.
            state = jax.block_until_ready(self.setup.init())
        model = self.setup.run.config.model
        if weights is None and isinstance(model, ModelConfig) and model.hf is not None and (is_url(model.hf) or Path(model.hf).is_dir()):
            return self._published(state, model.hf)
        if weights is None:
            return Position(state=state)
        where = f"{self.setup.run.where('checkpoint.weights')}: checkpoint.weights"
        saved, model = self._restore_elsewhere(where, place_of(weights), partial(self._restore_model, state))
        self.say(f"Starts with the parameters of {saved.folder}")
        base = inherited_base(saved, self.setup.saved_shapes.frozen)
        return Position(state=self.setup.with_model(state, *model), base=base, origin=str(saved.folder))

    def _published(self, state: State, place: str) -> Position:
        """The position with the parameters of a published model, if its folder has files."""
        with self.phase("restore", step=0):
            folder = agreed(partial(local_folder, place))
            if not has_weights(folder):
                self.say(f"{place} has no weights: the model starts from random values")
                return Position(state=state)
            first = self.setup.last_params(state)
            params, base = published_params(self.setup, folder, first), base_in(place, self.setup.saved_shapes.frozen)
        self.say(f"Starts with the parameters of {place}")
        return Position(state=self.setup.with_model(state, params, {}), base=base, origin=place)

    def _restore_elsewhere(self, where: str, path: Path | str, restore: Callable[[SavedStep], _Restored]) -> tuple[SavedStep, _Restored]:
        restored = self._restore(search_elsewhere(path, read_key(self.setup.run.config.checkpoint.key)), restore)
        if restored is None:
            raise InputError([f"{where}: no whole checkpoint in {path}. Name a run directory, or one of the steps in its checkpoints/"])
        return restored

    def _restore(self, search: Search, restore: Callable[[SavedStep], _Restored]) -> tuple[SavedStep, _Restored] | None:
        """The newest step of a search that can be restored, and what `restore` makes of it; None if there is no step."""
        try:
            while True:
                with self.phase("verify"):
                    saved = search.next()
                if saved is None:
                    return None
                try:
                    restored = restore(saved)
                except UnusableError as error:
                    search.refuse(saved.manifest.step, error.why)
                else:
                    search.settle()
                    return saved, restored
        finally:
            for report in search.reports:
                say(report)

    def _with_fresh_adapters(self, state: State, saved: SavedStep, restored: Callable[[Any, Any], Any]) -> Any:
        """The parameters of a checkpoint, with those of a fresh state's adapters if it lacks them. restored: restores some of them."""
        setup, adapters = self.setup, self.setup.program.adapters
        shapes, shardings = setup.saved_params
        stored = {entry.path.partition("/")[2] for entry in saved.manifest.arrays}
        if adapters is None or any(name in stored for path in adapters.matrices for name in factors_of(path)):
            return setup.stored_params(restored(shapes, shardings))
        base = restored(adapters.divided(shapes)[0], adapters.divided(shardings)[0])
        return setup.stored_params(merged(setup.model_params(setup.last_params(state)), base))

    def _restore_model(self, state: State, saved: SavedStep) -> tuple[Any, Any]:
        """The parameters of a checkpoint, and the variables that belong to them, such as statistics. Random keys belong to the run.

        state: a fresh one, which has the adapters that a checkpoint of the base lacks.
        """
        setup, cast = self.setup, self.setup.run.config.checkpoint.cast
        check_adapters(setup.run, saved.manifest.fingerprints, saved.folder)
        with self.phase("restore", step=0):
            try:
                params = self._with_fresh_adapters(state, saved, partial(saved_params, setup, saved, cast=cast))
                one, shardings = setup.saved_of_one
                one, shardings = (replace(state, variables=without_keys(one.variables, state.variables)) for state in (one, shardings))
                if not jax.tree.leaves(one.variables):
                    return params, {}
                return params, restored_of_one(saved, one, shardings, "variables", cast=cast, keys=False)
            except InputError:
                # Where the models differ, a list of all arrays that differ adds nothing.
                check_model(setup.run, saved.manifest.fingerprints, saved.folder)
                raise


def saved_params(setup: Setup, saved: SavedStep, shapes: Any, shardings: Any, *, cast: bool = False) -> Any:
    """Parameters of a checkpoint, whichever of them were frozen, and packed or not. Raises InputError if they do not fit."""
    adapters, base = setup.program.adapters, saved.manifest.base
    stored = {entry.path.partition("/")[2]: entry.dtype for entry in (*saved.manifest.arrays, *(() if base is None else base.arrays))}

    def as_stored(path: Any, x: Any) -> Any:
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
    frozen: dict[str, Any] = {}
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


def _first_values(setup: Setup, names: Sequence[str]) -> dict[str, Any]:
    """The values of optional parts of a state before the first step: NaN for losses, otherwise zero."""
    shapes, shardings = ({name: getattr(tree, name) for name in names} for tree in (setup.shapes, setup.shardings))

    def first() -> dict[str, Any]:
        values = {name: jnp.nan if name == "losses" else 0 for name in names}
        return {name: jax.tree.map(partial(jnp.full_like, fill_value=values[name]), part) for name, part in shapes.items()}

    return jax.jit(first, out_shardings=shardings)()


def eval_batch_of(data: Data, setup: Setup) -> int:
    """The rows of a batch of an evaluation, whose program is traced. Raises InputError if there are too few samples, or if it fails."""
    batch, is_whole, count = setup.run.config.train.batch, setup.objective.is_of_whole_batches, data.eval_sequences
    # Held-out data without padding is read in batches that leave out few of its samples, and that mesh and pipeline still divide.
    multiple = setup.eval_multiple
    rows = batch if is_whole else data.eval_batch(batch, multiple)
    few = f"{setup.run.where('data')}: data.source: {count} held-out samples are fewer than"
    if is_whole and 0 < count < batch:
        why = f"a batch of {batch}, which the loss compares with each other"
        raise InputError([f"{few} {why}. Hold out more, or none, or lower train.batch"])
    if not data.pads and 0 < count < multiple:
        parts = " times the microbatches of the pipeline" if setup.run.pipeline is not None else ""
        source = getattr(setup.run.config.data, "source", "")
        raise InputError([f"{few} {multiple}, the devices that split a batch{parts}. Hold out more, or none ({source})"])
    if count and (rows != batch or setup.program.evaluated is not setup.program.loss):
        setup.eval_shapes(rows)
    return rows


class Feed:
    """Reads global batches: dicts of arrays [batch, ...], laid out as the setup says. Each process reads its devices' rows."""

    def __init__(self, data: Data, setup: Setup):
        self._data, self._shardings, self._element = data, setup.batch_shardings, setup.program.element
        self._batch, self._order = setup.run.config.train.batch, setup.row_order
        self.eval_batch = eval_batch_of(data, setup)

    def train(self, samples: int) -> Iterator[dict[str, jax.Array]]:
        """Training batches without end, after the first `samples` sequences of the training data. Of a stream, returns when it is there."""
        rows = self._rows(self._batch)
        batches = self._data.train_batches(samples, self._batch, rows)
        return (self._global(local, self._batch, rows) for local in batches)

    def evaluation(self, max_batches: int | None, part: str | None = None) -> Iterator[dict[str, jax.Array]]:
        """The held-out samples, of one part or of all, once, in order; of each part at most `max_batches` batches of `eval_batch` rows."""
        rows = self._rows(self.eval_batch)
        for local in self._data.eval_batches(self.eval_batch, rows, max_batches, part=part):
            yield self._global(local, self.eval_batch, rows)

    def held_out(self, max_batches: int | None) -> dict[str, Iterator[dict[str, jax.Array]]]:
        """The held-out samples of each part, as `evaluation` reads them."""
        return {part: self.evaluation(max_batches, part) for part in self._data.eval_parts}

    def _rows(self, batch: int) -> list[int]:
        needed = [local_rows(sharding, (batch, *self._element[name].shape)) for name, sharding in self._shardings.items()]
        return sorted({row for rows in needed for row in rows})

    def _global(self, local: Mapping[str, np.ndarray], batch: int, rows: Sequence[int]) -> dict[str, jax.Array]:
        # `local` has this process's rows one after another. They need not be neighbours in the global batch.
        place = {row: i for i, row in enumerate(rows)}
        if self._order is not None:
            ordered = {name: x[..., self._order] if x.shape[-1:] == self._order.shape else x for name, x in local.items()}
            local = {**ordered, "positions": np.broadcast_to(self._order, local["inputs"].shape)}

        def array(name: str, sharding: NamedSharding) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                # [local rows, ...] → [rows of one device, its part of the other dims]
                return local[name][[place[row] for row in range(*index[0].indices(batch))]][(slice(None), *index[1:])]

            return jax.make_array_from_callback((batch, *self._element[name].shape), sharding, part, dtype=local[name].dtype)

        return {name: array(name, sharding) for name, sharding in self._shardings.items()}


def local_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> list[int]:
    """The rows of a global [batch, ...] array that this process's devices need, in order."""
    # Not batch / processes, because devices of several processes may hold the same rows.
    indices = sharding.addressable_devices_indices_map(shape).values()
    return sorted({row for index in indices if index is not None for row in range(*index[0].indices(shape[0]))})
