"""Sections of a run's YAML: run, devices, xla, hooks, alerts, metrics and debug. Others stand beside their owner. Imports no JAX.

One section is one frozen dataclass, and one field is one key; `jgt.document.bind` fills them from the file. Three things are
checked in three places. A type or a `Bound` here rejects a single value. `problems()` rejects keys of one section that do not
fit each other, and yields (key, message). What several sections decide together is checked in `config.py`. All checks run, so
that a user sees every problem of a file at once, with its line, and before JAX is imported.

The defaults are a small run that trains in minutes on a CPU. `docs/training.md` lists the same keys, in tables that are written from
the classes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from jgt import MeshSizes, document
from jgt.document import Bound, LocalPath

from ..files.bucket import PathOrUrl, is_url
from .numbers import Count, Fraction, Natural, Positive, Seconds

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
class MetricsConfig:
    """The `metrics:` section: a port at which Prometheus reads the run while it trains.

    port: the first process answers at `http://HOST:PORT/metrics`, and process I at PORT + I. Behind `jgt launch`, the launcher answers for
    all processes at PORT.
    host: the address to listen at. The default is this machine alone; `0.0.0.0` is all of its networks.
    """

    port: Annotated[int, Bound(low=1, high=65_535)]
    host: str = "127.0.0.1"


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
