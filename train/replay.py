"""Recomputes a step of a run twice, and says where a fault in it comes from: the data, the code, or the machine.

The stretch from the checkpoint before the step is trained twice, with the run's own program. What comes out differently the second
time is the machine's; what comes out as it was logged is the data's or the code's, which the losses of the samples tell apart.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jgt.document import InputError
from train.checkpoint import find_in
from train.config import Run
from train.console import Screen
from train.feed import Feed
from train.folder import Resume
from train.loop import open_run
from train.records import read_metrics
from train.setup import Setup
from train.start import Start, restored
from train.step import State

_WORST = 5
_OUTLIER = 6.0
"""Standard deviations above the mean of the losses before, from which on a loss is out of the ordinary."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """A step as it was computed: loss and norm of the gradient, and a checksum of all parameters and optimizer state after it."""

    loss: float
    grad_norm: float
    digest: int

    def same(self, other: Passed) -> bool:
        """Whether both are the same bit for bit."""
        return (_bits(self.loss), _bits(self.grad_norm), self.digest) == (_bits(other.loss), _bits(other.grad_norm), other.digest)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Where the fault is; the text says why."""

    fault: Literal["none", "machine", "code", "data", "changed"]
    text: str


def replay(run: Run, step: int, resume: Resume | None = None) -> Verdict:
    """Recomputes a step and prints what comes out. Raises InputError for a step that was not logged.

    resume: what the run went on from.
    """
    resume = resume or Resume()
    screen = Screen(enabled=jax.process_index() == 0)
    logged = _logged(run.config.run.path)
    if step not in logged:
        steps = sorted(logged)
        known = f"{steps[0]} to {steps[-1]} are, every {run.config.train.log_every}" if steps else "none is"
        raise InputError([f"command line: --replay: step {step} is not logged in {run.config.run.path}. Of its steps {known}"])
    setup, data = open_run(run, resume)
    found, reports = find_in(run.config.run.path, before=step)
    if found is None and resume.path is not None:
        found, reports = find_in(resume.path, before=step)
    for report in reports:
        print(f"jgt: {report}", file=sys.stderr)
    begin = 0 if found is None else found.manifest.step
    screen.say(f"Recomputes steps {begin + 1} to {step} twice, from {'the start' if found is None else found.folder}")
    start = Start(setup, data.fingerprint, lambda name, **details: contextlib.nullcontext(), lambda text: None)
    train_step, feed = setup.compile_train_step(), Feed(data, setup.batch_shardings, run.config.train.batch, run.config.model.seq)
    passes: list[dict[int, Passed]] = []
    samples = 0 if found is None else found.manifest.samples
    before: State | None = None
    for _ in range(2):
        state = start.fresh() if found is None else restored(setup, found)
        passed: dict[int, Passed] = {}
        for number, batch in zip(range(begin + 1, step + 1), feed.train(samples), strict=False):
            before = jax.tree.map(jnp.copy, state) if number == step else None
            state, metrics = train_step(state, batch)
            loss, norm = (float(x) for x in jax.device_get((metrics["loss"], metrics["grad_norm"])))
            passed[number] = Passed(loss=loss, grad_norm=norm, digest=int(_digest((state.params, state.opt_state))))
        passes.append(passed)
    assert before is not None
    first = samples + (step - begin - 1) * run.config.train.batch
    losses = _losses(setup, before, itertools.islice(feed.train(first), 2))
    screen.table(
        "Losses", ["step", "logged", "first pass", "second pass"], [_row(n, logged.get(n), passes) for n in passes[0]], numbers=4
    )
    verdict = judge(step, {n: row for n, row in logged.items() if n > begin}, passes, losses, first)
    screen.say(f"{verdict.fault}: {verdict.text}")
    return verdict


def judge(
    step: int, logged: Mapping[int, float | None], passes: Sequence[Mapping[int, Passed]], losses: Sequence[np.ndarray], first: int
) -> Verdict:
    """What two passes over the same steps say of one of them.

    logged: losses by step, None where not finite; losses: those of the samples (nats per token) of this step and of the next, with
    the parameters before it; first: the position of the step's first sample in the training data.
    """
    for number in passes[0]:
        if not passes[0][number].same(passes[1][number]):
            text = f"step {number} came out differently the second time, from the same state and the same samples. Suspect the hardware, or kernels that are not deterministic (XLA_FLAGS=--xla_gpu_deterministic_ops=true)"
            return Verdict(fault="machine", text=text)
    for number in passes[0]:
        loss = passes[0][number].loss
        if number in logged and logged[number] != (loss if math.isfinite(loss) else None):
            text = f"step {number} comes out as {loss} twice, but was logged as {logged[number]}. Either the machine was at fault then, or mesh, versions, batch or code have changed since"
            return Verdict(fault="changed", text=text)
    found = passes[0][step]
    own, other = losses
    before = [p.loss for n, p in passes[0].items() if n < step and math.isfinite(p.loss)]
    if math.isfinite(found.loss) and math.isfinite(found.grad_norm) and not _extreme(found.loss, before):
        return Verdict(fault="none", text=f"step {step} comes out as it was logged, bit for bit, and nothing in it is out of the ordinary")
    if not np.isfinite(other).all():
        return Verdict(fault="code", text=f"step {step} comes out as it was logged, and other samples fail with these parameters too: not the data. Look at the model, its precision and the learning rate")
    bad = ~np.isfinite(own) if not np.isfinite(own).all() else own > other.mean() + _OUTLIER * max(other.std(), 1e-6)
    if not bad.any():
        return Verdict(fault="code", text=f"step {step} comes out as it was logged, but none of its samples has an extreme loss: it is the gradient. Look at the model, its precision and the learning rate")
    worst = [first + int(i) for i in np.argsort(np.where(np.isfinite(own), own, np.inf))[::-1][:_WORST] if bad[i]]
    return Verdict(fault="data", text=f"step {step} comes out as it was logged, and other samples do well with these parameters. Look at the samples {', '.join(map(str, sorted(worst)))}")


def _extreme(loss: float, before: Sequence[float]) -> bool:
    return len(before) > 1 and loss > statistics.mean(before) + _OUTLIER * statistics.stdev(before)


def _losses(setup: Setup, state: State, batches: Iterable[dict[str, jax.Array]]) -> list[np.ndarray]:
    """The mean loss of each sample by its weights: a loss that is a sum of weights times nats has the nats for its gradient by them."""

    def rows(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        weights = batch["weights"]
        nats = jax.grad(lambda ones: setup.loss(params, batch | {"weights": ones}))(jnp.ones_like(weights))
        return jnp.sum(weights * nats, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1.0)

    compiled = jax.jit(rows, out_shardings=setup.placement.replicated())
    return [np.asarray(compiled(state.params, batch)) for batch in batches]


@jax.jit
def _digest(tree: Any) -> jax.Array:
    """A sum of all bits, which any change of one changes."""
    words = [jnp.sum(jax.lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]).astype(jnp.uint32)) for x in jax.tree.leaves(tree)]
    weighted = [word * jnp.uint32(2 * i + 1) for i, word in enumerate(words)]
    return jnp.sum(jnp.stack(weighted), dtype=jnp.uint32)


def _logged(folder: Path) -> dict[int, float | None]:
    path = folder / "metrics.jsonl"
    rows = [row for _, row in read_metrics(path)] if path.is_file() else []
    return {row["step"]: row["loss"] for row in rows if isinstance(row.get("loss", ""), float | None)}


def _row(step: int, logged: float | None, passes: Sequence[Mapping[int, Passed]]) -> list[str]:
    return [str(step), "" if logged is None else str(logged), *(str(passed[step].loss) for passed in passes)]


def _bits(x: float) -> bytes:
    return np.float64(x).tobytes()
