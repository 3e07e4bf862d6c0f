"""Checkpoints: parameters, optimizer state and the data's position. The only file that knows Orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from train.config import CheckpointConfig
from train.step import State


class Checkpoints:
    """The checkpoints of one run directory, written in the background, the last `keep` kept."""

    def __init__(self, folder: Path, config: CheckpointConfig):
        atomic = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=config.keep,
                cleanup_tmp_directories=True,
                todelete_subdir="trash",
                atomicity_options=atomic,
                enable_async_checkpointing=True,
            ),
        )

    @property
    def latest(self) -> int | None:
        """The newest finished step; None in a new run."""
        return self._manager.latest_step()

    def describe(self) -> str:
        """What there is to go on from, for a person."""
        if self.latest is None:
            return "no checkpoint was saved"
        return f"the newest checkpoint is that of step {self.latest} in {self._manager.directory}; the same command goes on from it"

    def save(self, state: State, step: int, samples: int) -> None:
        """Starts saving `state` after `step` updates and `samples` sequences of training data; returns early."""
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state._asdict()), data=ocp.args.JsonSave({"samples": samples}))
        self._manager.save(step, args=arguments)

    def restore(self, step: int, shapes: State, shardings: State) -> tuple[State, int]:
        """The state of a step, laid out as asked whatever the mesh it was saved on, and the data's position."""
        target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(target._asdict()), data=ocp.args.JsonRestore())
        restored: Any = self._manager.restore(step, args=arguments)
        return State(**restored["state"]), int(restored["data"]["samples"])

    def wait(self) -> None:
        """Returns when the last save is on disk. Raises what went wrong with it."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and lets go of the folder."""
        self._manager.close()
