"""The `checkpoint:` section of a run's file. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from jgt import document
from jgt.document import Bound, LocalPath

from ..files.bucket import PathOrUrl
from ..settings.numbers import Count, Natural
from ..settings.sections import OTHER_WORDS


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
