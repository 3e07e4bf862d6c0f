"""Where training begins: the state that a run starts from.

A run may be started any number of times with the same command, by a scheduler that knows nothing about it, and must find its own way.
So the order is fixed: the run's own checkpoints come first; only a run that has none uses `--resume PATH`, and only without that a fresh
state is made, into which `checkpoint.weights` may put another run's parameters and statistics. With this order a second start with
`--resume PATH` continues the run instead of beginning once more from PATH. Another run's folder is only ever read.

The invariant: all processes start from the same step (`train.checkpoint.saved` sees to that).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import jax

from jgt.document import InputError

from ..checkpoint.checkpoint import Checkpoints
from ..checkpoint.listing import Base, Kept
from ..checkpoint.restore import without_keys
from ..checkpoint.saved import SavedStep, Search, UnusableError, search_elsewhere, stored_data
from ..checkpoint.signature import read_key
from ..files.bucket import is_url, path_or_url
from ..files.cache import local_folder
from ..files.streams import say
from ..models.config import ModelConfig
from ..processes.processes import agreed
from ..setup import Setup
from ..setup.published import published_model
from ..step.state import State, Tree
from ..step.trained import merged
from ..weights.adapt.adapters import factors_of
from ..weights.base import base_in, inherited_base, resumed_base
from ..weights.foreign import has_weights
from .directory.identity import Resume, check_adapters, check_model, check_origin
from .restored import restore_state, restored_of_one, saved_params

_Restored = TypeVar("_Restored")
_QUICK_SECONDS = 5.0
"""A compilation that takes longer is announced."""


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

    data: the data's fingerprint. timed(name, **details): a context manager that records how long a phase of the run takes. say: prints a
    line for a person.
    """

    setup: Setup
    data: Mapping[str, object]
    timed: Callable[..., AbstractContextManager[None]]
    say: Callable[[str], None]

    def position(self, checkpoints: Checkpoints, resume: Resume) -> Position:
        """The position to train from. Raises InputError for a checkpoint that does not fit the run, and DiskError."""
        run, other = self.setup.run, resume.path

        def restore_own(saved: SavedStep) -> State:
            with self.timed("restore", step=saved.manifest.step):
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
        with self.timed("init"):
            # Waits, so that the phase includes the work on the devices.
            state = jax.block_until_ready(self.setup.init())
        model = self.setup.run.config.model
        if weights is None and isinstance(model, ModelConfig) and model.hf is not None and (is_url(model.hf) or Path(model.hf).is_dir()):
            return self._published(state, model.hf)
        if weights is None:
            return Position(state=state)
        where = f"{self.setup.run.where('checkpoint.weights')}: checkpoint.weights"
        saved, model = self._restore_elsewhere(where, path_or_url(weights), partial(self._restore_model, state))
        self.say(f"Starts with the parameters of {saved.folder}")
        base = inherited_base(saved, self.setup.saved_shapes.frozen)
        return Position(state=self.setup.with_model(state, *model), base=base, origin=str(saved.folder))

    def _published(self, state: State, place: str) -> Position:
        """The position with the parameters of a published model, if its folder has files."""
        with self.timed("restore", step=0):
            folder = agreed(partial(local_folder, place))
            if not has_weights(folder):
                self.say(f"{place} has no weights: the model starts from random values")
                return Position(state=state)
            first = self.setup.last_params(state)
            model, base = published_model(self.setup, folder, first, self.say), base_in(place, self.setup.saved_shapes.frozen)
        self.say(f"Starts with the parameters of {place}")
        return Position(state=self.setup.with_model(state, *model), base=base, origin=place)

    def _restore_elsewhere(self, where: str, path: Path | str, restore: Callable[[SavedStep], _Restored]) -> tuple[SavedStep, _Restored]:
        restored = self._restore(search_elsewhere(path, read_key(self.setup.run.config.checkpoint.key)), restore)
        if restored is None:
            raise InputError([f"{where}: no whole checkpoint in {path}. Name a run directory, or one of the steps in its checkpoints/"])
        return restored

    def _restore(self, search: Search, restore: Callable[[SavedStep], _Restored]) -> tuple[SavedStep, _Restored] | None:
        """The newest step of a search that can be restored, and what `restore` makes of it; None if there is no step."""
        try:
            while True:
                with self.timed("verify"):
                    saved = search.next()
                if saved is None:
                    return None
                try:
                    restored = restore(saved)
                except UnusableError as error:
                    search.refuse(saved.manifest.step, error.why)
                else:
                    search.drop_refused()
                    return saved, restored
        finally:
            for report in search.reports:
                say(report)

    def _with_fresh_adapters(self, state: State, saved: SavedStep, restored: Callable[[Tree, Tree], Tree]) -> Tree:
        """The parameters of a checkpoint, with those of a fresh state's adapters if it lacks them. restored: restores some of them."""
        setup, adapters = self.setup, self.setup.program.adapters
        shapes, shardings = setup.saved_params
        stored = {entry.path.partition("/")[2] for entry in saved.manifest.arrays}
        if adapters is None or any(name in stored for path in adapters.matrices for name in factors_of(path)):
            return setup.stored_params(restored(shapes, shardings))
        base = restored(adapters.divided(shapes)[0], adapters.divided(shardings)[0])
        return setup.stored_params(merged(setup.model_params(setup.last_params(state)), base))

    def _restore_model(self, state: State, saved: SavedStep) -> tuple[Tree, Tree]:
        """The parameters of a checkpoint, and the variables that belong to them, such as statistics. Random keys belong to the run.

        state: a fresh one, which has the adapters that a checkpoint of the base lacks.
        """
        setup, cast = self.setup, self.setup.run.config.checkpoint.cast
        check_adapters(setup.run, saved.manifest.fingerprints, saved.folder)
        with self.timed("restore", step=0):
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
