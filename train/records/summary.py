"""The lines about a run on the screen: first its size and its data, then one for each logged step, last its result.

The line of a step has as many of its metrics as fit the width of the screen. Steps, loss, tokens, speed, memory, MFU and the time left are
what a person looks for, and fit 80 columns even for long runs. Whatever else is logged is shown while there is room, in this order: metrics
that the loss returns, grad_norm, lr, the time of a step, and the epoch. Room is counted for what a line will have later, too: the first
steps have no speed yet, and columns should not come and go.

The lines at the end cover the whole run and not only its last start, so they are read from the run's files: the best evaluation from
metrics.jsonl, the goodput from the events, as `train.watch` computes it. Whatever cannot be read is left out, and no run ends because of
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jgt
from jgt import amount
from jgt.document import InputError

from ..journal.accounts import read_accounts
from ..journal.rows import read_metrics
from ..settings.formats import duration_text, short_text
from ..setup import Setup

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
    trained = f", {setup.num_parameters - setup.num_frozen:,} of them trained" if setup.num_frozen else ""
    return f"Model: {setup.num_parameters:,} parameters{trained}. A step is {step}"


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


def describe_data(fingerprint: Mapping[str, object]) -> str:
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


def _source(fingerprint: Mapping[str, object]) -> str:
    parts = [value for key, value in fingerprint.items() if key.startswith("mixture[") and key.endswith("].source")]
    source = str(fingerprint.get("source", "the run's own"))
    return f"{source} of {', '.join(map(str, parts))}" if parts else source


def _files(fingerprint: Mapping[str, Any]) -> str | None:
    """The files of all parts and splits together."""
    files, size = (
        sum(value for key, value in fingerprint.items() if key.rpartition(".")[2] in (name, f"eval_{name}")) for name in ("files", "bytes")
    )
    return None if not files else f"{files:,} {'file' if files == 1 else 'files'}, {amount(size, 'B')}"


def _splits(fingerprint: Mapping[str, object]) -> Iterator[str]:
    for unit in ("tokens", "samples"):
        if train := fingerprint.get(f"train_{unit}"):
            yield f"{train:,} {unit} to train on"
        if held_out := fingerprint.get(f"eval_{unit}"):
            yield f"{held_out:,} to evaluate on"


_GAP = 2
_SPEEDS = ("tokens_per_s", "samples_per_s")
_NOT_SHOWN = (*_SPEEDS, "tokens", "samples", "memory_bytes", "memory_peak_bytes", "memory_limit_bytes", "time", "step")
"""Metrics that are part of another column, or of no interest in a line."""
_PART = "eval_loss/"
"""The beginning of the name of the loss on one part of a mixture."""
_SPEED, _MFU, _TIME_LEFT = 7, 7, 10
"""The widths of columns that the first lines lack."""


def step_line(step: int, total: int, metrics: Mapping[str, object], width: int) -> str:
    """The line of a step: `step  30/300  loss 2.4513   123k tok  27.3k/s  31/80 GB  mfu 41%  eta 12m30s`.

    metrics: the logged metrics by name, with `eta_s`. None and what is not a number are left out. The line is longer than `width` only if
    step and loss alone are.
    """
    known = {name: value for name, value in metrics.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    head = [f"step {step:>{len(str(total))}}/{total}", *_named(known, "loss", "eval_loss")]
    main = list(filter(None, [_amount(known), _speed(known), _memory(known), *_named(known, "mfu", "eta_s")]))
    others = [name for name in known if name not in (*_NOT_SHOWN, *_ESSENTIAL, *_LAST)]
    extra: list[str] = []
    for text in _named(known, *others, *_LAST):
        if len(_joined([*head, *extra, text, *main])) + _reserved(known) > width:
            break
        extra.append(text)
    parts = [*head, *extra, *main]
    # The last columns count least.
    while len(parts) > len(head) and len(_joined(parts, gap=1)) > width:
        parts.pop()
    return _joined(parts, gap=_GAP if len(_joined(parts)) <= width else 1)


def _joined(parts: list[str], gap: int = _GAP) -> str:
    return (" " * gap).join(parts)


def _reserved(known: Mapping[str, float]) -> int:
    """The columns that this line lacks, and others have."""
    if "eval_loss" in known:
        return 0
    has_speed = any(name in known for name in _SPEEDS)
    # Whether there is an MFU is known with the speed. Devices with memory statistics are likely to have one.
    missing = [(not has_speed, _SPEED), (not has_speed and "memory_bytes" in known, _MFU), ("eta_s" not in known, _TIME_LEFT)]
    return sum(width + _GAP for is_missing, width in missing if is_missing)


def _named(known: Mapping[str, float], *names: str) -> list[str]:
    return [_text(name, known[name]) for name in names if name in known]


def _amount(known: Mapping[str, float]) -> str | None:
    if "tokens" in known:
        return f"{short_text(known['tokens']):>5} tok"
    return f"{short_text(known['samples']):>5} samples" if "samples" in known else None


def _speed(known: Mapping[str, float]) -> str | None:
    speed = known.get("tokens_per_s", known.get("samples_per_s"))
    return None if speed is None else f"{short_text(speed):>5}/s"


def _memory(known: Mapping[str, float]) -> str | None:
    used, limit = known.get("memory_peak_bytes", known.get("memory_bytes")), known.get("memory_limit_bytes")
    if used is None:
        return None
    digits = 1 if max(used, limit or 0) < 10e9 else 0
    return f"{used / 1e9:.{digits}f}{'' if limit is None else f'/{limit / 1e9:.{digits}f}'} GB"


def _text(name: str, value: float) -> str:
    if name.startswith(_PART):
        # Beside the loss of all parts, the name of one is enough.
        return f"{name.removeprefix(_PART)} {value:.4f}"
    return _LAST.get(name, _ESSENTIAL.get(name, lambda v: f"{name} {f'{v:#.4g}'.rstrip('.')}"))(value)


_ESSENTIAL: Mapping[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.4f}",
    "eval_loss": lambda value: f"eval_loss {value:.4f}",
    "mfu": lambda value: f"mfu {value:>3.0%}",
    "eta_s": lambda value: f"eta {duration_text(value):>6}",
}
_LAST: Mapping[str, Callable[[float], str]] = {
    "grad_norm": lambda value: f"grad_norm {value:.4f}",
    "lr": lambda value: f"lr {value:.2e}",
    "step_time_s": lambda value: f"{value * 1000:.0f} ms",
    "epoch": lambda value: f"epoch {value:.2f}",
}
