"""What a run starts from: its own newest checkpoint, another run's, another run's parameters, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jgt.document import InputError
from train.checkpoint import Checkpoints, Found, find_in, restore, restore_params
from train.folder import Resume, check_origin
from train.setup import Setup
from train.step import State, no_losses

Phase = Callable[..., AbstractContextManager[None]]
"""phase(name, **details): a context that notes how long a phase takes."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where training is: the state, updates done, and sequences of training data consumed."""

    state: State
    step: int = 0
    samples: int = 0


class Start:
    """Finds and restores what a run starts from; `say` tells a person."""

    def __init__(self, setup: Setup, data: Mapping[str, Any], phase: Phase, say: Callable[[str], None]):
        self._setup, self._data, self._phase, self._say = setup, data, phase, say
        self._config = setup.run.config.checkpoint

    def position(self, checkpoints: Checkpoints, resume: Resume) -> Position:
        """The position to train from. Raises InputError for a checkpoint that does not fit."""
        with self._phase("verify"):
            found, reports = checkpoints.find()
        _report(reports)
        if found is not None:
            position = self._at(found)
            self._say(f"Resumed from step {position.step} in {self._setup.run.config.run.path}")
            return position
        if resume.path is not None:
            found = self._foreign("--resume", resume.path)
            check_origin(self._setup.run, found.manifest.fingerprints, self._data, str(found.folder), resume.allow)
            position = self._at(found)
            self._say(f"Goes on from {found.folder}, at step {position.step}")
            return position
        return Position(state=self.fresh())

    def fresh(self) -> State:
        """The state before the first step of a run that goes on from none. Raises InputError for parameters that do not fit."""
        with self._phase("init"):
            state = jax.block_until_ready(self._setup.init())
        if self._config.weights is None:
            return state
        found = self._foreign(f"{self._setup.run.where('checkpoint.weights')}: checkpoint.weights", Path(self._config.weights))
        with self._phase("restore", step=0):
            params = restore_params(found, self._setup.shapes.params, self._setup.shardings.params, cast=self._config.cast)
        self._say(f"Starts with the parameters of {found.folder}")
        return state._replace(params=params)

    def _at(self, found: Found) -> Position:
        with self._phase("restore", step=found.manifest.step):
            state = restored(self._setup, found)
        return Position(state=state, step=found.manifest.step, samples=found.manifest.samples)

    def _foreign(self, where: str, path: Path) -> Found:
        with self._phase("verify"):
            found, reports = find_in(path)
        _report(reports)
        if found is None:
            raise InputError([f"{where}: no whole checkpoint in {path}. Name a run directory, or one of the steps in its checkpoints/"])
        return found


def restored(setup: Setup, found: Found) -> State:
    """The state of a checkpoint, laid out for this run. Raises InputError where it does not fit."""
    shapes, shardings, config = setup.shapes, setup.shardings, setup.run.config
    has_losses = any(entry.path == "losses" and shapes.losses and entry.shape == shapes.losses.shape for entry in found.manifest.arrays)
    if has_losses:
        return restore(found, shapes, shardings, cast=config.checkpoint.cast)
    state = restore(found, shapes._replace(losses=()), shardings._replace(losses=()), cast=config.checkpoint.cast)
    return state._replace(losses=jax.tree.map(jax.device_put, no_losses(config.train.skip_spikes), shardings.losses))


def _report(reports: list[str]) -> None:
    for report in reports:
        print(f"jgt: {report}", file=sys.stderr)
