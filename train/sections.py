"""The sections of a run's YAML: their keys, types, defaults and limits, and what of a section is wrong by itself. Without JAX."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from jgt import document
from jgt.document import Bound
from jgt.mesh.sizes import MAX_DEVICES

Count = Annotated[int, Bound(low=1, high=1_000_000_000)]
Natural = Annotated[int, Bound(low=0, high=1_000_000_000)]
Batch = Annotated[int, Bound(low=1, high=1_000_000)]
Positive = Annotated[float, Bound(above=0, high=1e30)]
NotNegative = Annotated[float, Bound(low=0, high=1e30)]
Seconds = Annotated[float, Bound(above=0, high=1_000_000)]
MAX_FLAGS = 64
MAX_NAME, MAX_PATH = 240, 2_000
"""Bytes of a run directory's path; a system's own limits are 255 and 4096."""
Fraction = Annotated[float, Bound(low=0, high=1)]
MAX_BF16_DECAY = 0.99
"""The slowest decay of a moment kept in bf16: 1 - 0.99 is more than twice the 2^-8 that rounding may take away."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The `run:` section. dir defaults to runs/NAME."""

    name: str = "run"
    dir: str | None = None
    # JAX keeps 32 bits of a seed.
    seed: Annotated[int, Bound(low=0, high=2**32 - 1)] = 0

    @property
    def path(self) -> Path:
        """The run directory."""
        return Path(self.dir or f"runs/{self.name}")

    def problems(self) -> Iterator[tuple[str, str]]:
        """A name is one folder's name, and what is written below the directory has to have a name too."""
        if not self.name.isprintable() or set(self.name) & set("/\\") or self.name in ("", ".", ".."):
            yield "name", f"{document.shown(self.name)} cannot name a folder. Use letters, digits, dots and dashes"
        key = "name" if self.dir is None else "dir"
        if self.dir is not None and not (self.dir and self.dir.isprintable()):
            yield "dir", f"{document.shown(self.dir)} cannot be a path. Use letters, digits, dots, dashes and slashes, or null"
        elif max(map(len, map(os.fsencode, self.path.parts)), default=0) > MAX_NAME or len(os.fsencode(self.path)) > MAX_PATH:
            yield key, f"{document.shown(str(self.path))} is too long; a name has at most {MAX_NAME} bytes here, a path {MAX_PATH:,}"


@dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """The `devices:` section: absent, all that JAX finds; or this many virtual CPU devices a process."""

    virtual_cpu: Annotated[int, Bound(low=1, high=MAX_DEVICES)] | None = None


@dataclass(frozen=True, kw_only=True)
class XlaConfig:
    """The `xla:` section. preset: a set of XLA flags; auto: gpu-overlap, or gpu-fp8 for a model in eight bits, where there are NVIDIA GPUs; flags: more of them, by name.

    cache: the folder of compiled programs; auto: in the user's cache folder; null: none are kept.
    """

    preset: Literal["auto", "none", "gpu-overlap", "gpu-fp8"] = "auto"
    flags: dict[str, bool | int | float | str] = field(default_factory=dict)
    cache: str | None = "auto"

    def plain_flags(self) -> dict[str, str]:
        """The flags as XLA reads them, without dashes."""
        return {name.removeprefix("--"): str(value).lower() if isinstance(value, bool) else str(value) for name, value in self.flags.items()}

    def problems(self) -> Iterator[tuple[str, str]]:
        """Names that can be XLA's, of which none leads to a place: there XLA would write, or run what it finds."""
        for name, value in self.flags.items():
            if not re.fullmatch(r"(--)?xla_\w{1,100}", name, re.ASCII) or not re.fullmatch(r"[\w.,:+-]{1,100}", str(value), re.ASCII):
                yield f"flags.{name}", "is no flag of XLA. Write xla_NAME: VALUE, without spaces and slashes"
            elif re.search(r"dump|_(dir|file|path|to|from|cache)(_|$)", name):
                yield f"flags.{name}", "names a place. Set it in the environment: XLA_FLAGS"
        if len(self.flags) > MAX_FLAGS:
            yield "flags", f"has {len(self.flags):,} flags; {MAX_FLAGS} are the most"
        if self.cache is not None and not (self.cache and self.cache.isprintable()):
            yield "cache", f"{document.shown(self.cache)} cannot be a path. Write auto, null, or the path of a folder"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The `optimizer:` section: AdamW (arXiv 1711.05101) or Muon (arXiv 2502.16982) with warm-up, then a schedule over the run's steps.

    cosine falls to final_lr x lr by the end of the run; wsd stays and falls linearly over the last `decay` share of the
    steps (arXiv 2404.06395); constant stays. Weight decay spares norms and biases. clip: the largest global norm of
    the gradient, or null. momentum: Muon's, of the layers' matrices; the rest are AdamW's. moments: the type in which both keep
    theirs. offload: where they are between two updates, on the device or in the host's memory.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: Positive = 3e-4
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: Natural = 0
    decay: Fraction = 0.2
    final_lr: Fraction = 0.1
    b1: Fraction = 0.9
    b2: Fraction = 0.95
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    clip: Positive | None = 1.0
    momentum: Fraction = 0.95
    moments: Literal["f32", "bf16"] = "f32"
    offload: Literal["none", "host"] = "none"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Moments of 8 bits, which cannot follow what changes by less than half a step of theirs."""
        slow = ("momentum", "b1", "b2") if self.name == "muon" else ("b1", "b2")
        for key in slow if self.moments == "bf16" else ():
            value = getattr(self, key)
            if value > MAX_BF16_DECAY:
                yield key, (
                    f"{value:g} changes a moment by {1 - value:.2g} of itself in a step, of which bf16 rounds away up to 0.004. "
                    f"Use at most {MAX_BF16_DECAY:g}, or optimizer.moments=f32"
                )


@dataclass(frozen=True, kw_only=True)
class SpikesConfig:
    """`train.skip_spikes`: skips an update whose loss lies so many standard deviations above the mean of the last `window` losses."""

    window: Annotated[int, Bound(low=4, high=1_000_000)] = 128
    deviations: Positive = 6.0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The `train:` section. batch is global, in sequences; accumulate splits it into that many parts, one after another.

    remat: none, attention (its scores are recomputed), block (each layer is, from its input), or a list of tensor names to keep. loss_chunks: parts of a sequence
    of which logits and loss are computed one after another; null: as few as leave a device 1 GiB of logits. eval_every: 0 evaluates at the end only. eval_batches bounds an evaluation; null goes over the whole held-out split. on_nonfinite: what follows an update
    whose loss or gradient is not finite, which is never applied: the run stops, or goes on. skip_spikes skips updates with
    extreme losses too. max_skipped in a row end the run.
    """

    steps: Count = 100
    batch: Batch = 32
    accumulate: Batch = 1
    remat: Literal["none", "attention", "block"] | tuple[str, ...] = "none"
    loss_chunks: Count | None = None
    log_every: Count = 1
    eval_every: Natural = 0
    eval_batches: Count | None = None
    on_nonfinite: Literal["stop", "skip"] = "stop"
    skip_spikes: SpikesConfig | None = None
    max_skipped: Count = 10

    def problems(self) -> Iterator[tuple[str, str]]:
        """Parts of equal size."""
        if self.batch % self.accumulate:
            fits = ", ".join(str(n) for n in range(1, self.batch + 1) if self.batch % n == 0)
            yield "accumulate", f"batch {self.batch} is not divisible by accumulate {self.accumulate}. These divide it: {fits}"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The `checkpoint:` section: every so many steps (0: only at the end), and how many are kept.

    Files have a CRC-32 each; sha256 adds a SHA-256, which costs ten times as much. weights: another run's directory, or one of its
    checkpoints, whose parameters a new run starts with. cast: floating arrays of another type are converted when they are read.
    """

    every: Natural = 0
    keep: Count = 3
    sha256: bool = False
    weights: str | None = None
    cast: bool = False


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """The `watchdog:` section: after how many seconds a process that makes no progress is ended, and says where it was.

    step_seconds: in a step, or ten times the slowest step so far, if that is longer; start_seconds: in anything else;
    peer_seconds: without a word from another process of the run.
    """

    step_seconds: Seconds = 60.0
    start_seconds: Seconds = 1800.0
    peer_seconds: Seconds = 30.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault that a drill injects, once in a run, before a step begins or into the first save from it on."""

    at_step: Count
    kind: Literal["kill", "hang", "raise", "nan", "corrupt", "disk_full"]
    process: Natural = 0


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """The `debug:` section: faults for drills."""

    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The `sample:` section: text generated when training ends. tokens 0: none."""

    tokens: Natural = 0
    prompt: str = "\n"
    temperature: NotNegative = 0.8
