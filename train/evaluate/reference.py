"""The reference of preferences: how likely the model found each answer before its first step.

`train.loss: dpo` compares the model with the one that it began as (`train.step.preference`). That one never changes, so a run computes its
log-probabilities once, before the first step, and keeps them in its directory. No step holds a second model, and a run that resumes on
another mesh reads the same bits. The checkpoints of the run have a checksum of the file, and what the model was that it was computed with.
If the file is lost or damaged, it is computed again with the same model, and refused with another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from jgt.document import InputError

from ..checkpoint.bucket_steps import seal, unseal
from ..checkpoint.manifest import BrokenError, UnsignedError
from ..checkpoint.signature import read_key
from ..checkpoint.steps import open_steps
from ..config import Run
from ..data.batches import Data
from ..files.disk import open_file, write_whole
from ..files.streams import say
from ..processes.processes import this_process, true_on_all_processes
from ..settings.training import DPO
from ..setup import Setup
from ..step.preference import REFERENCE
from ..step.state import State
from .likelihood import ROWS, score_program

SCORES = "reference.npz"
"""The file of the log-probabilities in a run's directory."""
_REPORT_SECONDS = 5.0
_READ = ("inputs", "targets", "weights")
_MOST_BYTES = 1 << 30
_DATA = "data"
"""The name in the file of the identity of the pairs and of the model."""


def with_reference(
    setup: Setup, data: Data, first: Callable[[], State] | None = None, say: Callable[[str], None] = say, *, has_begun: bool = True
) -> Data:
    """The data of a run with the reference's log-probabilities, f32[b, 2] in a batch, if its loss compares with a reference.

    first: makes the state before the first step, where the run's directory may lack the numbers, and gets them. say: prints a line for a
    person. has_begun: whether the run has taken steps. Before them, the numbers are computed at each start, because `checkpoint.weights`
    may name a run that still trains. Raises InputError if they are missing or damaged without `first`, and OSError where they cannot be
    stored.
    """
    config = setup.run.config
    if config.train.loss != DPO or not data.pairs:
        return data
    model = [repr(config.model), repr(config.lora), config.checkpoint.weights, config.run.seed]
    file, identity = config.run.path / SCORES, json.dumps([data.fingerprint, model], sort_keys=True)
    known = _read(file, identity) if has_begun and checksum(file) == reference_of(setup.run).get("sha256") else None
    if known is None and first is None:
        raise InputError(
            [f"{file}: lacks the reference's log-probabilities of these pairs. The run computes them when it is started again"]
        )
    if first is not None and not true_on_all_processes(known is not None):
        state = first()
        known = {name: np.concatenate([*_scores(setup, state, samples, name, say)]) for name, samples in data.pairs.items()}
        if this_process() == 0:
            np.savez(buffer := io.BytesIO(), allow_pickle=False, **{_DATA: np.array(identity)}, **known)
            write_whole(file, seal(SCORES, buffer.getvalue()))
    assert known is not None
    return data.with_column(REFERENCE, known)


def reference_of(run: Run) -> Mapping[str, object]:
    """The reference as the newest checkpoint that can be read has it: `origin` and `model`, of the parameters, and `sha256`, of the file.

    Empty if it says nothing. Raises OSError.
    """
    steps = open_steps(run.config.run.checkpoints, read_key(run.config.checkpoint.key))
    for step in reversed(steps.listed()):
        with contextlib.suppress(BrokenError, UnsignedError):
            return steps.saved(step).manifest.kept.reference
    return {}


def checksum(file: Path) -> str | None:
    """The SHA-256 of a file; None if it cannot be read, or is not a file that a run has written."""
    with contextlib.suppress(OSError), open_file(file) as opened:
        return hashlib.sha256(opened.read(_MOST_BYTES)).hexdigest()
    return None


def _scores(
    setup: Setup, state: State, samples: Sequence[Mapping[str, np.ndarray]], name: str, say: Callable[[str], None]
) -> Iterator[np.ndarray]:
    """The log-probabilities f32[n, 2] of some pairs after another. samples: {inputs, targets, weights: [2, s]} by index."""
    mesh = setup.mesh
    # The rules may split a batch's rows, and its sequence.
    shards, parts = (math.prod(mesh.shape.get(axis, 1) for axis in axes) for axes in setup.run.batch_dims)
    program, size = score_program(setup, parts), -(-ROWS // (2 * shards)) * shards
    params, variables = setup.model_params(setup.eval_params(state)), setup.eval_variables(state)
    last = time.monotonic()
    for begin in range(0, len(samples), size):
        pairs = [samples[n] for n in range(begin, min(begin + size, len(samples)))]
        # The last batch repeats its last pair, so that all batches have one shape.
        rows = {key: np.concatenate([pair[key] for pair in pairs + [pairs[-1]] * (size - len(pairs))]) for key in _READ}
        nats, _ = program(params, variables, rows)
        yield -np.asarray(jax.device_get(nats), np.float32).reshape(-1, 2)[: len(pairs)]
        if time.monotonic() - last > _REPORT_SECONDS:
            last = time.monotonic()
            say(f"The model before training has scored {begin + len(pairs):,} of {len(samples):,} pairs ({name})")


def _read(file: Path, identity: str) -> Mapping[str, np.ndarray] | None:
    """The stored log-probabilities; None if they are of other pairs or another model, or the file is damaged."""
    # For anything but such an archive, zipfile and numpy raise errors of a dozen types.
    with contextlib.suppress(Exception):
        with open_file(file) as opened:
            content = bytes(unseal(SCORES, opened.read(_MOST_BYTES)))
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            # Written without compression: nothing in it unpacks to more.
            if str(stored[_DATA]) == identity and sum(entry.file_size for entry in stored.zip.infolist()) < len(content):
                return {name: stored[name] for name in stored.files if name != _DATA}
    return None
