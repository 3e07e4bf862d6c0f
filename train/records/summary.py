"""The first and the last lines of a run on the screen: its size and its data, and its result.

The lines at the end cover the whole run and not only its last start, so they are read from the run's files: the best evaluation from
metrics.jsonl, the goodput from the events, as `train.report` computes it. Whatever cannot be read is left out, and no run ends because of
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jgt
from jgt import amount
from jgt.document import InputError

from ..report.accounts import read_accounts
from ..report.rows import read_metrics
from ..setup import Setup
from .line import duration_text, short_text

_FILES = {
    "checkpoints": "checkpoints/",
    "metrics.jsonl": "metrics.jsonl",
    "metrics.csv": "metrics.csv",
    "experts.jsonl": "experts.jsonl",
    "events.jsonl": "events.jsonl",
    "tensorboard": "tensorboard/",
    "sample.txt": "sample.txt",
    "profile": "profile/",
}
"""The files and folders of a run directory that its last line names."""


def describe_start(folder: Path) -> str:
    """The versions, and the run directory."""
    return f"jgt {jgt.__version__}, jax {jax.__version__}. Run directory: {folder}"


def describe_size(setup: Setup) -> str:
    """The number of parameters, and the work of a step."""
    train, tokens = setup.run.config.train, tokens_per_sample(setup.batch_shapes)
    step = f"{train.batch:,} samples" if tokens is None else f"{train.batch * tokens:,} tokens ({train.batch:,} x {tokens:,})"
    return f"Model: {setup.num_parameters:,} parameters. A step is {step}"


def describe_sync(setup: Setup) -> Iterator[str]:
    """A line about `sync:`, with the size of a checkpoint that has a state for each replica; none without the section."""
    sync = setup.run.config.sync
    if sync is None:
        return
    count = setup.mesh.shape[sync.axis]
    if count == 1:
        yield f"Sync: one replica along {sync.axis}, since the launcher has lost the others. It continues alone"
        return
    line = f"Sync: {count} replicas along {sync.axis} exchange"
    if setup.phases is None:
        yield f"{line} gradients in each step, as {sync.wire}{', one step late' if sync.late else ''}"
        return
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(setup.saved_shapes))
    parts = f" in {sync.fragments} fragments" if sync.fragments > 1 else ""
    yield f"{line} parameters every {sync.every} steps{parts}, as {sync.wire}. A checkpoint has the state of each: {amount(size, 'B')}"


def tokens_per_sample(batch: Mapping[str, jax.ShapeDtypeStruct]) -> int | None:
    """The tokens of a sample; None if the inputs of the model are not tokens. batch: the arrays of a batch."""
    inputs = batch.get("inputs")
    is_text = inputs is not None and len(inputs.shape) == 2 and jnp.issubdtype(inputs.dtype, jnp.integer)
    return inputs.shape[1] if is_text and inputs is not None else None


def describe_data(fingerprint: Mapping[str, Any]) -> str:
    """One line about the data, from its fingerprint: the checksums in it are for resuming, not for people."""
    parts = list(filter(None, [_source(fingerprint), _files(fingerprint)]))
    splits = list(_splits(fingerprint))
    return f"Data: {', '.join(parts)}{': ' if parts and splits else ''}{', '.join(splits)}"


def describe_end(folder: Path, *, seconds: float, tokens: int | None, samples: int) -> Iterator[str]:
    """The last lines. seconds: the length of this start. tokens, samples: the amounts of the whole run; tokens is None for other inputs."""
    amount = f"{short_text(samples)} samples" if tokens is None else f"{short_text(tokens)} tokens"
    line = f"Trained for {duration_text(seconds)}, {amount} in all"
    with contextlib.suppress(InputError, OSError):
        accounts = read_accounts(folder)
        starts = f" over {len(accounts.starts)} starts" if len(accounts.starts) > 1 else ""
        line += f", goodput {accounts.goodput:.1%}{starts}"
    yield line
    with contextlib.suppress(OSError):
        rows = read_metrics(folder / "metrics.jsonl")
        evaluations = [(row["eval_loss"], row["step"]) for row in rows if isinstance(row.get("eval_loss"), int | float)]
        if evaluations:
            loss, step = min(evaluations)
            yield f"Best evaluation: loss {loss:.4f} at step {step}"
    names = [shown for name, shown in _FILES.items() if (folder / name).exists()]
    yield f"In {folder}: {', '.join(names)}"


def _source(fingerprint: Mapping[str, Any]) -> str:
    parts = [value for key, value in fingerprint.items() if key.startswith("mixture[") and key.endswith("].source")]
    source = str(fingerprint.get("source", "the run's own"))
    return f"{source} of {', '.join(map(str, parts))}" if parts else source


def _files(fingerprint: Mapping[str, Any]) -> str | None:
    """The files of all parts and splits together."""
    files, size = (
        sum(value for key, value in fingerprint.items() if key.rpartition(".")[2] in (name, f"eval_{name}")) for name in ("files", "bytes")
    )
    return None if not files else f"{files:,} {'file' if files == 1 else 'files'}, {amount(size, 'B')}"


def _splits(fingerprint: Mapping[str, Any]) -> Iterator[str]:
    for unit in ("tokens", "samples"):
        if train := fingerprint.get(f"train_{unit}"):
            yield f"{train:,} {unit} to train on"
        if held_out := fingerprint.get(f"eval_{unit}"):
            yield f"{held_out:,} to evaluate on"
