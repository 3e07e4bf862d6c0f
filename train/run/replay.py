"""Recomputes a step of a run twice, and says whether a fault in it comes from the data, the code, or the machine.

A loss that jumps looks the same in the log, whether samples spoil the step, the model diverges, or hardware computes wrongly. But a run is
deterministic bit for bit. From the checkpoint before the step, with the run's own program and data, all steps up to the step are trained
twice. If the two passes differ in a single bit, the machine (or a kernel that is not deterministic) is at fault. If they agree with each
other but not with the log, the machine was at fault then, or something has changed since. If they agree with the log too, the fault is
reproducible: then the loss of each sample, under the parameters before the step, shows whether only some of its samples are extreme (the
data) or the next step's samples as well (the code).

The invariant: nothing is written to the run directory.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jgt.document import InputError

from ..checkpoint.saved import find_checkpoint, stored_data
from ..checkpoint.signature import read_key
from ..config import Run
from ..evaluate.reference import with_reference
from ..files.streams import say
from ..journal.rows import read_metrics
from ..records.console import Screen
from ..setup import Setup
from ..setup.feed import Feed
from ..step.objective import mean_of_parts
from ..step.state import State, Tree, digest_of_arrays
from .directory.identity import Resume
from .opened import open_run
from .restored import restore_state
from .start import Start

_WORST = 5
_OUTLIER = 6.0
"""A loss is extreme if it lies this many standard deviations above the mean of the losses it is compared with."""


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """A step as it was recomputed: loss, norm of the gradient, and a checksum of all parameters and optimizer state after it."""

    loss: float
    grad_norm: float
    digest: int

    def equals(self, other: ReplayedStep) -> bool:
        """Whether both are the same bit for bit. NaN equals NaN, and 0.0 does not equal -0.0."""
        return (_bits(self.loss), _bits(self.grad_norm), self.digest) == (_bits(other.loss), _bits(other.grad_norm), other.digest)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The cause of a fault. The text says why, and what to do."""

    fault: Literal["none", "machine", "code", "data", "changed"]
    text: str


def replay(run: Run, step: int, resume: Resume | None = None) -> Verdict:
    """Recomputes a step and prints the verdict. Raises InputError for a step that was not logged.

    resume: the checkpoint that the run was resumed from when it trained the step.
    """
    resume = resume or Resume()
    screen = Screen(enabled=jax.process_index() == 0)
    logged = _logged_losses(run.config.run.path)
    if step not in logged:
        steps = sorted(logged)
        known = f"Steps {steps[0]} to {steps[-1]} are, every {run.config.train.log_every}" if steps else "No step is"
        raise InputError([f"command line: --replay: step {step} is not logged in {run.config.run.path}. {known}"])
    setup, data = open_run(run, resume)
    if setup.phases is not None:
        raise InputError([f"{run.where('sync.every')}: sync.every: a run with phases cannot be replayed. --replay needs every: 1"])
    key = read_key(run.config.checkpoint.key)
    # Read only: unlike a start, a replay does not set damaged checkpoints aside.
    saved, reports = find_checkpoint(run.config.run.place, key, before=step)
    # The steps of a run that began in another one's checkpoint may all be later than its own first checkpoint.
    if saved is None and resume.path is not None:
        saved, reports = find_checkpoint(resume.path, key, before=step)
    for report in reports:
        say(report)
    begin = 0 if saved is None else saved.manifest.step
    screen.say(f"Recomputing steps {begin + 1} to {step} twice, from {'the start' if saved is None else saved.folder}")
    start = Start(setup, data.fingerprint, lambda name, **details: contextlib.nullcontext(), lambda text: None)
    train_step, feed = setup.compile_train_step(), Feed(with_reference(setup, data), setup)
    passes: list[dict[int, ReplayedStep]] = []
    samples = 0 if saved is None else saved.manifest.samples
    if saved is not None:
        data.restore(samples, stored_data(saved))
    setup = setup.with_epochs(data.train_sequences, begin, samples)
    before: State | None = None
    # Both passes run the same compiled program on the same samples. A difference can only come from the machine or from a kernel.
    for _ in range(2):
        state = start.fresh().state if saved is None else restore_state(setup, saved, resume.allow)
        replayed: dict[int, ReplayedStep] = {}
        for number, batch in zip(range(begin + 1, step + 1), feed.train(samples), strict=False):
            # A copy, because the step donates the buffers of its state.
            before = jax.tree.map(jnp.copy, state) if number == step else None
            state, metrics = train_step(state, batch, setup.settings(number))
            loss, norm = (float(x) for x in jax.device_get((metrics["loss"], metrics["grad_norm"])))
            digest = int(digest_of_arrays((state.params, state.opt_state, state.variables, state.average)))
            replayed[number] = ReplayedStep(loss=loss, grad_norm=norm, digest=digest)
        passes.append(replayed)
    assert before is not None
    # Two batches: the step's own samples, and the next step's for comparison.
    first = samples + (step - begin - 1) * run.config.train.batch
    losses = _sample_losses(setup, before, itertools.islice(feed.train(first), 2))
    screen.table("Losses", ["step", "logged", "first pass", "second pass"], [_row(n, logged.get(n), passes) for n in passes[0]], numbers=4)
    verdict = judge(step, {n: row for n, row in logged.items() if n > begin}, passes, losses, first)
    screen.say(f"{verdict.fault}: {verdict.text}")
    return verdict


def judge(
    step: int, logged: Mapping[int, float | None], passes: Sequence[Mapping[int, ReplayedStep]], losses: Sequence[np.ndarray], first: int
) -> Verdict:
    """The verdict on a step that was recomputed in two passes.

    logged: losses by step, None where not finite. losses: the loss of each sample, in nats per token, under the parameters before the
    step: [batch] for the step's own samples and [batch] for the next step's. first: position of the step's first sample in the training
    data.
    """
    # The machine first: if it computes wrongly, nothing else that it says counts.
    for number in passes[0]:
        if not passes[0][number].equals(passes[1][number]):
            remedy = "Suspect the hardware, or kernels that are not deterministic (XLA_FLAGS=--xla_gpu_deterministic_ops=true)"
            text = f"step {number} came out differently the second time, from the same state and the same samples. {remedy}"
            return Verdict(fault="machine", text=text)
    for number in passes[0]:
        loss = passes[0][number].loss
        # The log has null for a loss that is not finite, because JSON has no NaN.
        if number in logged and logged[number] != (loss if math.isfinite(loss) else None):
            causes = "Either the machine was at fault then, or mesh, versions, batch or code have changed since"
            text = f"the loss of step {number} is {loss} in both passes, but was logged as {logged[number]}. {causes}"
            return Verdict(fault="changed", text=text)
    return _judge_samples(step, passes[0], losses, first)


def _judge_samples(step: int, replayed: Mapping[int, ReplayedStep], losses: Sequence[np.ndarray], first: int) -> Verdict:
    """The verdict on a step that came out as it was logged."""
    own, other = losses
    this, earlier = replayed[step], [r.loss for n, r in replayed.items() if n < step and math.isfinite(r.loss)]
    same, remedy = f"step {step} came out as it was logged", "Look at the model, its precision and the learning rate"
    if math.isfinite(this.loss) and math.isfinite(this.grad_norm) and not _is_extreme(this.loss, earlier):
        return Verdict(fault="none", text=f"{same}, bit for bit, and nothing in it is unusual")
    if not np.isfinite(other).all():
        return Verdict(
            fault="code", text=f"{same}, and the next step's samples fail with these parameters too: it is not the data. {remedy}"
        )
    # The standard deviation has a floor, because the losses of repeated samples may be equal.
    bad = ~np.isfinite(own) if not np.isfinite(own).all() else own > other.mean() + _OUTLIER * max(other.std(), 1e-6)
    if not bad.any():
        return Verdict(fault="code", text=f"{same}, but none of its samples has an extreme loss: it is the gradient. {remedy}")
    worst = [first + int(i) for i in np.argsort(np.where(np.isfinite(own), own, np.inf))[::-1][:_WORST] if bad[i]]
    names = ", ".join(map(str, sorted(worst)))
    return Verdict(fault="data", text=f"{same}, and the next step's samples do well with these parameters. Look at the samples {names}")


def _is_extreme(loss: float, earlier: Sequence[float]) -> bool:
    return len(earlier) > 1 and loss > statistics.mean(earlier) + _OUTLIER * statistics.stdev(earlier)


def _sample_losses(setup: Setup, state: State, batches: Iterable[dict[str, jax.Array]]) -> list[np.ndarray]:
    """The mean loss of each sample of each batch, [batch] in nats per token.

    The trainer's own loss returns only a sum of weights times nats over all tokens. Its gradient with respect to the weights is therefore
    the nats of each token, and no second loss function is needed. With any other loss, and in a pipeline, which has gradients by parameters
    only, each sample is evaluated alone.
    """
    loss = setup.objective.evaluated

    def rows(params: Tree, variables: Tree, batch: dict[str, jax.Array]) -> jax.Array:
        params = setup.objective.used(params)
        if not setup.objective.is_token_loss or setup.run.pipeline is not None:
            return jax.lax.map(lambda i: alone(params, variables, batch, i), jnp.arange(setup.run.config.train.batch))
        weights = batch["weights"]
        nats = jax.grad(lambda ones: loss(params, variables, batch | {"weights": ones})[0])(jnp.ones_like(weights))
        # [b, s] → [b]
        return jnp.sum(weights * nats, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1.0)

    def alone(params: Tree, variables: Tree, batch: dict[str, jax.Array], row: jax.Array) -> jax.Array:
        # In every row, because the rules lay out the rows of a whole batch.
        total, part = loss(params, variables, {name: jnp.broadcast_to(x[row], x.shape) for name, x in batch.items()})
        return mean_of_parts(total, part.weight, 1)

    # Replicated, so that each process can read the losses of all samples.
    compiled = jax.jit(rows, out_shardings=setup.storage.model.replicated())
    return [np.asarray(compiled(setup.last_params(state), setup.eval_variables(state), batch)) for batch in batches]


def _logged_losses(folder: Path) -> dict[int, float | None]:
    path = folder / "metrics.jsonl"
    rows = list(read_metrics(path)) if path.is_file() else []
    return {row["step"]: row["loss"] for row in rows if isinstance(row.get("loss", ""), float | None)}


def _row(step: int, logged: float | None, passes: Sequence[Mapping[int, ReplayedStep]]) -> list[str]:
    return [str(step), "" if logged is None else str(logged), *(str(replayed[step].loss) for replayed in passes)]


def _bits(x: float) -> bytes:
    return np.float64(x).tobytes()
