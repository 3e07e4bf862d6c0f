"""The sections of a run's YAML: their keys, types, defaults and limits. Imports no JAX.

One section is one frozen dataclass, and one field is one key; `jgt.document.bind` fills them from the file. Three things are
checked in three places. A type or a `Bound` here rejects a single value. `problems()` rejects keys of one section that do not
fit each other, and yields (key, message). What several sections decide together is checked in `config.py`. All checks run, so
that a user sees every problem of a file at once, with its line, and before JAX is imported.

Bounds look generous on purpose: they do not say what is sensible, only where a number is certainly a mistake or would
overflow. The defaults are a small run that trains in minutes on a CPU. `docs/training.md` lists the same keys, and a test
compares the two.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from jgt import MeshSizes, document
from jgt.document import Bound, LocalPath

from ..files.bucket import PathOrUrl, is_url

Count = Annotated[int, Bound(low=1, high=1_000_000_000)]
Natural = Annotated[int, Bound(low=0, high=1_000_000_000)]
MAX_BATCH = 1_000_000
BatchSize = Annotated[int, Bound(low=1, high=MAX_BATCH)]
Positive = Annotated[float, Bound(above=0, high=1e30)]
NotNegative = Annotated[float, Bound(low=0, high=1e30)]
Seconds = Annotated[float, Bound(above=0, high=1_000_000)]
Fraction = Annotated[float, Bound(low=0, high=1)]

Wire = Literal["f32", "bf16", "int8"]
"""The type in which numbers travel over a slow axis."""

DPO = "dpo"
PAIRED = (DPO, "orpo")
"""The names of the losses of preferences, in `train.loss`."""
LoggerName = Literal["jsonl", "tensorboard", "csv", "wandb", "mlflow"]
_PACKAGES: Mapping[str, str] = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
"""The package that a logger needs. The extra of the logger's name installs it."""

CHECKPOINTS = "checkpoints"
"""The folder of the steps of a run."""
MAX_FLAGS = 64
MAX_NAME, MAX_PATH = 240, 2_000
"""Bytes of a run directory's name and path. Systems allow 255 and 4096; the difference is for the files below the directory."""

OTHER_WORDS: Mapping[str, str] = {
    "activation_checkpointing": "train.remat",
    "batch_size": "train.batch",
    "beta1": "optimizer.b1",
    "beta2": "optimizer.b2",
    "betas": "optimizer.b1 and optimizer.b2",
    "block_size": "model.seq",
    "context_length": "model.seq",
    "d_model": "model.embed",
    "eval_steps": "train.eval_every",
    "grad_clip": "optimizer.clip",
    "gradient_checkpointing": "train.remat",
    "hidden_size": "model.embed",
    "intermediate_size": "model.ffn",
    "learning_rate": "optimizer.lr",
    "logging_steps": "train.log_every",
    "lr": "optimizer.lr",
    "max_grad_norm": "optimizer.clip",
    "mixed_precision": "model.dtype",
    "n_embd": "model.embed",
    "output_dir": "run.dir",
    "precision": "model.dtype",
    "save_every": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "seed": "run.seed",
    "seq_len": "model.seq",
}
"""Keys that other trainers have, and keys that users look for in another section."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The `run:` section.

    name: the name of the run; it names the run directory.
    dir: the run directory; null: `runs/NAME`. Or a folder in a bucket, `s3://BUCKET/FOLDER` or `gs://BUCKET/FOLDER` ([stores](stores.md)).
    spool: with a URL in `dir`: the local folder of the run's small files, which are copied to the bucket; null: `runs/NAME`.
    copy_seconds: with a URL: seconds between two copies.
    lease_seconds: with a URL: seconds that a start on another machine waits after a crash before it takes over the run.
    seed: the seed for the parameters, the order of the data and the generated text.
    verify: when a layout that was never [compared with one device](partitioner.md#while-a-run-trains) is compared: `auto`, beside the
    training, if the machine has three free cores; `before` the first step; or `off`.
    """

    WORDS = OTHER_WORDS
    name: str = "run"
    dir: PathOrUrl | None = None
    spool: LocalPath | None = None
    copy_seconds: Annotated[float, Bound(low=1, high=1_000_000)] = 30.0
    lease_seconds: Annotated[float, Bound(low=3, high=1_000_000)] = 30.0
    # JAX keeps 32 bits of a seed.
    seed: Annotated[int, Bound(low=0, high=2**32 - 1)] = 0
    verify: Literal["auto", "off", "before"] = "auto"

    @property
    def path(self) -> Path:
        """The run directory, or the local folder of a run in a bucket."""
        return Path((self.dir if self.url is None else self.spool) or f"runs/{self.name}")

    @property
    def url(self) -> str | None:
        """The URL of a run in a bucket; None for a run in a folder."""
        return self.dir.rstrip("/") if self.dir is not None and is_url(self.dir) else None

    @property
    def place(self) -> Path | str:
        """The run directory, or the URL of a run in a bucket."""
        return self.url or self.path

    @property
    def checkpoints(self) -> Path | str:
        """The place of the run's checkpoints."""
        return self.path / CHECKPOINTS if self.url is None else f"{self.url}/{CHECKPOINTS}"

    def problems(self) -> Iterator[tuple[str, str]]:
        """A name must name one folder, and the path must leave room for the names of the files below it."""
        if not self.name.isprintable() or set(self.name) & set("/\\") or self.name in ("", ".", ".."):
            yield "name", f"{document.shown(self.name)} cannot name a folder. Use letters, digits, dots and dashes"
        if self.spool is not None and self.url is None:
            yield "spool", "belongs to a run in a bucket, but run.dir is not a URL. Remove the key, or set run.dir: s3://BUCKET/FOLDER"
        key = "name" if self.dir is None else "dir"
        if self.dir is not None and not (self.dir and self.dir.isprintable()):
            yield "dir", f"{document.shown(self.dir)} cannot be a path. Use letters, digits, dots, dashes and slashes, or null"
        # Systems limit names and paths in bytes, not in characters.
        elif max(map(len, map(os.fsencode, self.path.parts)), default=0) > MAX_NAME or len(os.fsencode(self.path)) > MAX_PATH:
            yield key, f"{document.shown(str(self.path))} is too long; a name has at most {MAX_NAME} bytes here, a path {MAX_PATH:,}"


@dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """The `devices:` section.

    virtual_cpu: the number of virtual CPU devices in each process; more than 1,024 are only for `jgt check` and `jgt plan`. null: use all
    devices that JAX finds.
    """

    virtual_cpu: Annotated[int, Bound(low=1, high=MeshSizes.MOST_DEVICES)] | None = None


@dataclass(frozen=True, kw_only=True)
class XlaConfig:
    """The `xla:` section: XLA's flags, and the cache of compiled programs.

    preset: a set of XLA flags. auto: with NVIDIA GPUs gpu-overlap, in a pipeline gpu-pipeline, and for `model.fp8` the flag of gpu-fp8 too;
    elsewhere none.
    flags: further flags by name: `{xla_gpu_enable_triton_gemm: false}`.
    cache: the folder for compiled programs, which the next start of the same program loads instead of compiling. When a start opens the
    folder, it removes the oldest programs beyond 10 GiB. auto: a folder for this kind of CPU below `jgt/compiled` in the user's cache
    folder (`XDG_CACHE_HOME`, otherwise `~/.cache`); for a user without a home there is no cache. null: no cache. In a path that a file
    names, programs are [this user's own](reliability.md#compiled-programs), in a folder below it.
    """

    preset: Literal["auto", "none", "gpu-overlap", "gpu-pipeline", "gpu-fp8"] = "auto"
    flags: dict[str, bool | int | float | str] = field(default_factory=dict)
    cache: LocalPath | None = "auto"

    def plain_flags(self) -> dict[str, str]:
        """The flags as XLA spells them: names without dashes, values as text, `true` and `false` in lower case."""
        # Both spellings of a flag are in use: with dashes as in XLA_FLAGS, and without.
        return {
            name.removeprefix("--"): str(value).lower() if isinstance(value, bool) else str(value) for name, value in self.flags.items()
        }

    def problems(self) -> Iterator[tuple[str, str]]:
        """Flags that cannot be XLA's, and flags that contain a path.

        A config may come from anywhere, and a path in a flag lets XLA write files, or load and run the ones that it finds there.
        """
        for name, value in self.flags.items():
            # Without re.ASCII, \w would take the letters and digits of every script.
            if not re.fullmatch(r"(--)?xla_\w{1,100}", name, re.ASCII) or not re.fullmatch(r"[\w.,:+-]{1,100}", str(value), re.ASCII):
                yield f"flags.{name}", "is not an XLA flag. Write xla_NAME: VALUE, without spaces and slashes"
            # By name, because XLA's flags carry no types: dump_to, data_dir, cache_path and their like.
            elif re.search(r"dump|_(dir|file|path|to|from|cache)(_|$)", name):
                yield f"flags.{name}", "names a path, which a config may not do. Set it in the environment variable XLA_FLAGS"
        if len(self.flags) > MAX_FLAGS:
            yield "flags", f"has {len(self.flags):,} flags; at most {MAX_FLAGS} are allowed"
        if self.cache is not None and not (self.cache and self.cache.isprintable()):
            yield "cache", f"{document.shown(self.cache)} cannot be a path. Write auto, null, or the path of a folder"


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


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """`checkpoint.export`: folders that transformers loads, written while the run trains.

    every: steps between two exports, for which checkpoints are saved too; 0: only at the end.
    path: the folder of the exports: the model of step 500 is written to `PATH/500`.
    dtype: the type of the tensors.
    """

    every: Natural = 0
    path: LocalPath
    dtype: Literal["f32", "bf16"] = "f32"

    def problems(self) -> Iterator[tuple[str, str]]:
        """The path must name a folder of its own."""
        if not Path(self.path).name:
            yield "path", f"{document.shown(self.path)} names no folder of its own. Name one, such as exports"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The `checkpoint:` section.

    every: steps between two checkpoints; 0: none by steps.
    minutes: a checkpoint is saved when the last one was begun this many minutes ago, and is finished; null: none by time.
    keep: how many of the newest checkpoints remain; null: 3, or fewer if the disk has no room for another one.
    keep_every: checkpoints of steps that this number divides remain as well, however old they are; null: none.
    keep_hours: one checkpoint of this many hours remains as well: the oldest one, and then each that was saved this long or longer after
    the one before; null: none.
    best: the name of a [metric of evaluations](#early-stopping), the lower the better, or with a minus in front the higher. An evaluation
    that is better than all before it is saved, also between the steps of `every`, and the best checkpoint remains beside the newest ones;
    null: none.
    sha256: adds a SHA-256 to the CRC-32 of every file; about ten times slower.
    key: signs the manifest of each checkpoint with the key in this file, or in a variable of the environment (`env:NAME`), and uses only
    checkpoints that are signed with it. It implies `sha256`.
    weights: fine-tuning: a run directory, [the URL of a run](stores.md), or one of its checkpoints, whose parameters and statistics (of a
    BatchNorm, the biases of routers) a new run starts with, at step 0, with a new optimizer and random keys of its own. A run with
    checkpoints of its own resumes from them; the path must still have a checkpoint.
    cast: true: convert floating-point arrays of a checkpoint whose type differs from this run's; false: such an array is an error.
    export: folders that Hugging Face's transformers loads, written [while the run trains](weights.md#while-a-run-trains); null: none.
    """

    WORDS = OTHER_WORDS
    every: Annotated[Natural, "For a number of minutes, set checkpoint.minutes"] = 0
    minutes: Annotated[float, Bound(above=0, high=1_000_000)] | None = 10.0
    keep: Count | None = None
    keep_every: Count | None = None
    keep_hours: Annotated[float, Bound(above=0, high=1_000_000)] | None = None
    best: str | None = None
    sha256: bool = False
    key: LocalPath | None = None
    weights: PathOrUrl | None = None
    cast: bool = False
    export: ExportConfig | None = None


@dataclass(frozen=True, kw_only=True)
class HookConfig:
    """An entry of `hooks:`, code of the user's own that is called while the run trains.

    call: MODULE:NAME of a function, which gets the moment and the other keys, or of a class, which gets these keys when the run starts.
    every: steps between two calls; null: no calls by steps.
    at: other moments at which it is called.
    on_error: the answer to an [error in it](#errors). stop: the run saves its state and ends. warn: a line on stderr, and training
    continues.
    arguments: all further keys, which are passed to it.
    """

    REST: ClassVar[str] = "arguments"
    call: str
    every: Count | None = None
    at: tuple[Literal["start", "eval", "save", "end"], ...] = ()
    on_error: Literal["stop", "warn"] = "stop"
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])

    def problems(self) -> Iterator[tuple[str, str]]:
        """Every hook needs `every` or `at`."""
        if self.every is None and not self.at:
            yield "call", "is never called. Add every: N, for every N-th step, or at: with some of start, eval, save and end"


@dataclass(frozen=True, kw_only=True)
class AlertsConfig:
    """The `alerts:` section: notifies a person while the run trains. null turns a kind of alert off.

    command: a program and its arguments, called for each alert. It needs `--allow-command`, and `config.yaml` does not store it.
    seconds: the longest time for the command; then it is killed.
    spike: how far above the usual one, as a share of it, a logged loss is an alert: 1 is twice as high. A loss that is not finite is
    always one.
    straggler: the factor by which a process makes the steps longer, from which on it is an alert.
    throughput: the share of the usual speed below which a logged step is an alert.
    disk: the share of the run directory's disk below which free space is an alert.
    progress: the share of the watchdog's time without progress from which on a process is an alert.
    """

    command: tuple[str, ...] = ()
    seconds: Seconds = 30.0
    spike: Positive | None = 1.0
    straggler: Annotated[float, Bound(low=1.2, high=1_000_000)] | None = 1.2
    throughput: Fraction | None = 0.7
    disk: Fraction | None = 0.05
    progress: Fraction | None = 0.5


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An entry of `debug.faults`: a failure that a drill injects, once in a run.

    at_step: the fault happens before this step; disk_full happens in the first save from this step on.
    kind: the kind of fault.
    process: the process in which it happens.
    """

    at_step: Count
    kind: Literal["kill", "hang", "raise", "nan", "corrupt", "disk_full"]
    process: Natural = 0


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """The `debug:` section.

    faults: faults to inject, each once in a run, for [drills](reliability.md#drills).
    """

    faults: tuple[Fault, ...] = ()


def missing_loggers(names: Sequence[str]) -> list[str]:
    """The loggers among these whose package is not installed."""
    return [name for name in dict.fromkeys(names) if name in _PACKAGES and not is_installed(_PACKAGES[name])]


def logger_problem(name: str) -> str:
    """The message about a logger that is not installed."""
    return f"{name} needs the package {_PACKAGES[name]}. Install it (pip install 'jgt[{name}]'), or take {name} out of the list"


def is_installed(package: str) -> bool:
    """Whether a package can be imported. Does not import it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    # A folder of that name, as wandb makes one in the working directory, is not the package.
    return spec is not None and spec.origin is not None
