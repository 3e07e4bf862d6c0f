"""The `train:` section of a run's file, with the sections in it. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from jgt.document import Bound

from .numbers import BatchSize, Count, Fraction, Natural, Positive
from .sections import OTHER_WORDS

DPO = "dpo"
PAIRED = (DPO, "orpo")
"""The names of the losses of preferences, in `train.loss`."""


@dataclass(frozen=True, kw_only=True)
class SpikesConfig:
    """`train.skip_spikes`: updates whose loss is far above the recent losses are skipped.

    window: the number of recent losses.
    deviations: skips a loss that lies more than this many standard deviations above their mean.
    """

    window: Annotated[int, Bound(low=4, high=1_000_000)] = 128
    deviations: Positive = 6.0


@dataclass(frozen=True, kw_only=True)
class StopEarlyConfig:
    """`train.stop_early`: when a run ends before its last step, because its evaluations do not improve.

    by: a metric of evaluations. The lower it is, the better; with a minus in front of its name, the higher.
    patience: the number of evaluations after the best one that end the run.
    """

    by: str = "eval_loss"
    patience: Count


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The `train:` section.

    steps: the total number of updates, including those before a resume; null: as many as `epochs` makes.
    epochs: instead of `steps`: the number of passes over the training data, in a mixture over all parts together. The last step completes
    the last pass, also if a resume changes the batch. The run prints how many steps this makes. A file that gives both is an error;
    `train.steps=null train.epochs=3` replaces the steps of a file.
    batch: sequences per update, over all devices.
    auto: take the [best layout for the devices at hand](search.md#at-the-start-of-a-run), of those that the file leaves open.
    accumulate: gradient accumulation: splits each batch into this many parts (the effective batch size remains `batch`), computes their
    gradients one after another to save memory, and combines them into one update ([what this sends](scaling.md#gradient-accumulation)). It
    must divide `batch`, and the mesh axes that split the batch must divide a part. A loss of your own that [compares
    rows](own.md#losses-that-compare-rows) is refused.
    loss: [a loss of your own](own.md#your-own-loss), MODULE:NAME; null: the cross entropy of the next token; `dpo`: [direct preference
    optimisation](finetune.md#preferences-dpo); `orpo`: [odds ratio preference optimisation](finetune.md#preferences-orpo).
    beta: for `loss: dpo`, the factor of rewards: the larger, the nearer the model stays to its beginning; for `loss: orpo`, the weight of
    the odds.
    remat: what the backward pass recomputes. none: norms and the activation of the MLP, from their inputs; matmuls: each layer, except for
    the results of its matmuls with weights and of attention (XLA's attention scores are recomputed; cuDNN's kernel does not run again);
    attention: as none, and also the attention scores and whatever lies between matmuls and named tensors (with cuDNN's kernel, which never
    stores scores, it is none); block: each layer, from its input; a list: each layer, except for the named [tensors](#model), where `heads`
    includes all that cuDNN's kernel stores; `auto`: the setting with the [least recompute that
    fits](performance.md#recompute-that-fits). Gradients are the same. A model [of your own](own.md#your-own-model) needs layers that are a
    scan. See [Performance](performance.md#what-each-setting-buys).
    loss_chunks: compute the loss and its gradient in this many chunks along the sequence, so that the full logits are never materialised.
    It must divide `model.seq`. null: the fewest chunks that keep logits under 1 GiB per device.
    uneven: what happens to a parameter with a dim that its mesh axes do not divide, such as a vocabulary of 50,257. pad: it is [stored with
    zeros](scaling.md#sizes-that-do-not-divide) behind it, which the model does not see. refuse: an error. An optimizer of your own and
    `optimizer.offload: host` always refuse.
    ema: the decay of a moving average of the parameters, such as 0.999; null: no average. Evaluations, the sample and `jgt.load` use the
    average. It is kept in f32, laid out like the moments, and is in checkpoints. In the first steps the decay is at most (1 + step) / (10 +
    step).
    log_every: steps between two logged steps; the last step is always logged.
    eval_every: steps between two evaluations; 0: only after the last step, where there is always one.
    eval_batches: batches in an evaluation, of each part of a mixture; null: the whole held-out split.
    on_nonfinite: the reaction to an update whose loss or gradient is not finite. Such an update is never applied. stop: the run saves the
    state before the update and ends with exit code 1; skip: it continues. stderr and `events.jsonl` record the step and the positions of
    its samples.
    skip_spikes: skips updates whose loss is extreme; null: applies them.
    max_skipped: ends the run after this many skipped updates in a row.
    stop_early: ends the run when its evaluations [no longer improve](#early-stopping); null: after `steps`.
    """

    WORDS = OTHER_WORDS
    steps: Count | None = 100
    epochs: Annotated[float, Bound(above=0, high=1_000_000)] | None = None
    batch: BatchSize = 32
    auto: bool = False
    accumulate: BatchSize = 1
    loss: str | None = None
    beta: Positive = 0.1
    remat: Literal["none", "matmuls", "attention", "block", "auto"] | tuple[str, ...] = "none"
    loss_chunks: Count | None = None
    uneven: Literal["pad", "refuse"] = "pad"
    ema: Fraction | None = None
    log_every: Count = 1
    eval_every: Natural = 0
    eval_batches: Count | None = None
    on_nonfinite: Literal["stop", "skip"] = "stop"
    skip_spikes: SpikesConfig | None = None
    max_skipped: Count = 10
    stop_early: StopEarlyConfig | None = None

    def problems(self) -> Iterator[tuple[str, str]]:
        """Accumulation needs parts of equal size, and a run an end."""
        if self.steps is None and self.epochs is None:
            yield "steps", "null is for runs with train.epochs. Write a number of steps, or add train.epochs"
        if self.batch % self.accumulate:
            # All divisors: the user chooses by memory, which is not known here.
            fits = ", ".join(str(n) for n in range(1, self.batch + 1) if self.batch % n == 0)
            yield "accumulate", f"batch {self.batch} is not divisible by accumulate {self.accumulate}. These divide it: {fits}"
