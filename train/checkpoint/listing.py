"""The parts of a manifest, which lists what a checkpoint has; `train.checkpoint.manifest` writes and reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FORMAT = 2
Evaluated = Mapping[str, tuple[tuple[int, float | None], ...]]
"""By metric, steps and values of evaluations; None: not finite."""


@dataclass(frozen=True, kw_only=True)
class ArrayEntry:
    """One array: its path, shape and element type."""

    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file: its path below the step's folder, size in bytes, CRC-32 and, if `checkpoint.sha256` asks for it, SHA-256."""

    path: str
    size: int
    crc32: int
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Base:
    """A folder of published weights that holds the frozen parameters of a checkpoint. arrays: those parameters, as the state has them.

    sha256: the identity of its tensors (`train.weights.contents`), wherever the folder is.
    """

    path: str
    sha256: str
    arrays: tuple[ArrayEntry, ...]


@dataclass(frozen=True, kw_only=True)
class ObjectsEntry:
    """Where a bucket has the arrays of a step (`train.checkpoint.objects`).

    folder: the folder of their objects. pieces: for each array the shape of the pieces into which it is cut. time: seconds since 1970.
    """

    folder: str
    pieces: tuple[tuple[int, ...], ...]
    time: float


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The facts that a run keeps beside its arrays, and finds again when it resumes.

    id: the identity of the run, which no other run has; empty in a manifest of an earlier version. evaluations: the values that decide
    which step is the best. reference: of preferences, the model before the first step, and a checksum of its scores.
    """

    id: str = ""
    evaluations: Evaluated = field(default_factory=dict[str, tuple[tuple[int, float | None], ...]])
    reference: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint after `step` updates.

    samples: sequences of training data consumed; mesh: axis sizes it was saved on; versions: by package; fingerprints: of config and data.
    phase: the steps since the last exchange of `sync`. base: where arrays are that `arrays` lacks. objects: in a bucket, where arrays are.
    kept: what the run finds again beside them.
    """

    step: int
    samples: int
    mesh: Mapping[str, int]
    versions: Mapping[str, str]
    fingerprints: Mapping[str, object]
    arrays: tuple[ArrayEntry, ...]
    files: tuple[FileEntry, ...]
    format: int = FORMAT
    phase: int = 0
    base: Base | None = None
    objects: ObjectsEntry | None = None
    kept: Kept = field(default_factory=Kept)
