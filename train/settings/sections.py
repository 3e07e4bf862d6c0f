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

    name: the name of the run directory.
    dir: the run directory, relative to the working directory. null: runs/NAME. Or the URL of a folder in a bucket, such as s3://BUCKET/NAME.
    spool: for a URL, the local folder of the run's small files, which are copied to the bucket. null: runs/NAME.
    copy_seconds: seconds between two copies to the bucket.
    lease_seconds: so long after a crash, a start on another machine waits before it takes the run in the bucket.
    seed: the seed of the parameters, of the order of the data, and of the sample.
    verify: when a layout that was never compared with one device is compared: auto, beside the training, if the machine has three free
    cores; before the first step; or off.
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
            yield "spool", "belongs to a run in a bucket, but run.dir is no URL. Remove the key, or set run.dir: s3://BUCKET/FOLDER"
        key = "name" if self.dir is None else "dir"
        if self.dir is not None and not (self.dir and self.dir.isprintable()):
            yield "dir", f"{document.shown(self.dir)} cannot be a path. Use letters, digits, dots, dashes and slashes, or null"
        # Systems limit names and paths in bytes, not in characters.
        elif max(map(len, map(os.fsencode, self.path.parts)), default=0) > MAX_NAME or len(os.fsencode(self.path)) > MAX_PATH:
            yield key, f"{document.shown(str(self.path))} is too long; a name has at most {MAX_NAME} bytes here, a path {MAX_PATH:,}"


@dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """The `devices:` section.

    virtual_cpu: the number of virtual CPU devices in each process. null: all devices that JAX finds.
    """

    virtual_cpu: Annotated[int, Bound(low=1, high=MeshSizes.MOST_DEVICES)] | None = None


@dataclass(frozen=True, kw_only=True)
class XlaConfig:
    """The `xla:` section: XLA's flags, and the cache of compiled programs.

    preset: a set of flags. auto: on NVIDIA GPUs gpu-overlap, in a pipeline gpu-pipeline, and the flag of gpu-fp8 for a model in eight bits;
    elsewhere none.
    flags: more flags, by name.
    cache: the folder of compiled programs. auto: a folder in the user's cache folder; null: no cache.
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
    deviations: the loss is a spike if it exceeds their mean by more than this many standard deviations.
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

    steps: updates of the whole run, including the ones before a resume. null: as many as `epochs` makes. epochs: instead of steps, passes
    of the whole run over the training data. batch: sequences in an update, over all devices. auto: takes the best layout for the devices at
    hand, of those that the file leaves open. accumulate: the number of equal parts of the batch, which run one after another to save
    memory. loss: the loss of the model, MODULE:NAME. null: the cross entropy of the next token. dpo: direct preference optimisation, of
    pairs of answers. orpo: odds ratio preference optimisation, which needs no reference. beta: dpo's factor of rewards: the larger, the
    nearer the model stays to its beginning; orpo's weight of the odds. remat: the values that the
    backward pass computes again instead of reading them from memory. matmuls: all of a layer but the results of its matmuls and of cuDNN's
    attention; attention: attention's scores; block: each layer, from its input; a list: each layer except the tensors of these names; auto:
    the first setting whose step fits in the devices' memory, of matmuls and block, or without a fused kernel of none, attention, matmuls
    and block. loss_chunks: the number of parts of a sequence whose logits and loss are computed one after another. null: the smallest
    number with which the logits on a device take at most 1 GiB. uneven: the treatment of a parameter with a dim that its mesh axes do not
    divide. pad: it is stored with zeros behind it, which the model does not see; refuse: an error. ema: the decay of a moving average of
    the parameters, such as 0.999, which evaluations and samples then use. null: no average. In the first steps it is at most (1 + step) /
    (10 + step). log_every: steps between logged steps. eval_every: steps between evaluations. 0: only at the end. eval_batches: the most
    batches in an evaluation, of each part of a mixture. null: the whole held-out split. on_nonfinite: the answer to an update whose loss or
    gradient is not finite. The update is never applied; the run stops, or skips the update and continues. skip_spikes: when to skip updates
    with an extreme loss. null: never. max_skipped: this many skipped updates in a row end the run. stop_early: when the run ends
    because its evaluations do not improve. null: never.
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

    every: steps between exports, for which there is a checkpoint too. 0: only at the end.
    path: the folder in which the folder of each step is written.
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

    every: steps between checkpoints. 0: none by steps.
    minutes: the most minutes from one checkpoint to the next. null: none by time. There is always one at the end.
    keep: the number of newest checkpoints that are not deleted. null: 3, or fewer if the disk has no room for another one.
    keep_every: checkpoints of steps that this number divides are not deleted either. null: none.
    keep_hours: one checkpoint of so many hours is not deleted either. null: none.
    best: a metric of evaluations, the lower the better; with a minus in front of its name, the higher. The best step so far is saved, and
    not deleted. null: none.
    sha256: adds a SHA-256 to the CRC-32 of every file. It takes ten times as long to compute.
    key: a file, or env:NAME for a variable of the environment, with the key that signs manifests. It implies sha256.
    weights: another run's directory or URL, or one of its checkpoints. A new run starts with its parameters and statistics.
    cast: converts floating arrays of a checkpoint that have another type than in this run. false: another type is an error.
    export: folders that transformers loads. null: none.
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
    every: steps between two calls. null: no calls by steps.
    at: other moments at which it is called.
    on_error: the answer to an error in it. stop: the run saves its state and ends. warn: a line on stderr, and training continues.
    arguments: all further keys.
    """

    REST: ClassVar[str] = "arguments"
    call: str
    every: Count | None = None
    at: tuple[Literal["start", "eval", "save", "end"], ...] = ()
    on_error: Literal["stop", "warn"] = "stop"
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])

    def problems(self) -> Iterator[tuple[str, str]]:
        """A hook has to be called sometime."""
        if self.every is None and not self.at:
            yield "call", "is never called. Add every: N, for every N-th step, or at: with some of start, eval, save and end"


@dataclass(frozen=True, kw_only=True)
class AlertsConfig:
    """The `alerts:` section: what a person should hear of while a run trains. null turns a kind of alert off.

    command: a program and its arguments, which is called for each alert with environment variables that describe it.
    seconds: the longest time for it; then it is killed.
    spike: an alert if a logged loss is above the usual one by this share of it. A loss that is not finite is always one.
    straggler: an alert if a process makes the steps this many times as long.
    throughput: an alert if a logged step has less than this share of the usual speed.
    disk: an alert if less than this share of the disk of the run directory is free.
    progress: an alert if a process has made no progress for this share of the time after which the watchdog ends it.
    """

    command: tuple[str, ...] = ()
    seconds: Seconds = 30.0
    spike: Positive | None = 1.0
    straggler: Annotated[float, Bound(low=1.2, high=1e6)] | None = 1.2
    throughput: Fraction | None = 0.7
    disk: Fraction | None = 0.05
    progress: Fraction | None = 0.5


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An entry of `debug.faults`: a failure that a drill injects, once in a run.

    at_step: the fault happens before this step begins; disk_full happens in the first save from this step on.
    kind: the failure.
    process: the index of the process to which it happens.
    """

    at_step: Count
    kind: Literal["kill", "hang", "raise", "nan", "corrupt", "disk_full"]
    process: Natural = 0


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """The `debug:` section.

    faults: failures to inject, for drills.
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
