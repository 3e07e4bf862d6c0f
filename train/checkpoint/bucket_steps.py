"""The steps of a run on a bucket: each is a manifest, and objects with the pieces of its arrays. Needs neither JAX nor Orbax.

    RUN/checkpoints/manifests/0000000012.json
    RUN/checkpoints/data/12-9f3a1c-0/params/layers/mlp/up/2-0

A store has no rename, but a manifest can be created as the last object of a step, on the condition that there is none. So a step is listed
exactly if its manifest is there, and that is after all of its pieces are stored. Each save has a folder of its own, so what a killed one
leaves never mixes with the next. Removal goes the other way round: first the manifest, then the pieces. What has no manifest is removed by
the next start, which holds the lease.

An object ends with the CRC-32 of its name and content, in hexadecimal. So a flipped bit, a cut, and an object in the place of another are
all found while it is read, and nothing is read twice. An object that the store does not have is damage. A store that fails is an OSError.

Pieces are uncompressed, in C order, and cut as the devices had them, to at most 16 MB: no upload needs parts, and a restored array needs
only the pieces that it overlaps, on whatever mesh. Folders keep the format of Orbax, which other tools read too.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jgt.document import InputError

from ..files.bucket import ABSENT, Bucket, ChangedError
from ..files.disk import open_file, patiently
from . import manifest
from .listing import Manifest, ObjectsEntry
from .manifest import BrokenError

_MANIFEST = re.compile(r"manifests/([0-9]{10})\.json")
_CRC_BYTES = 8


def seal(name: str, content: bytes | memoryview) -> bytes:
    """An object: its content and a checksum of its name and content."""
    return b"".join([content, b"%08x" % _crc(name, content)])


def unseal(name: str, sealed: bytes) -> memoryview:
    """The content of an object. Raises BrokenError if it is another one, or damaged."""
    content = memoryview(sealed)[: -_CRC_BYTES or None]
    if len(sealed) < _CRC_BYTES or sealed[-_CRC_BYTES:] != b"%08x" % _crc(name, content):
        raise BrokenError(f"{name} has other content than was written (checksum)")
    return content


def piece_name(folder: str, path: str, index: Sequence[int]) -> str:
    """The name of the object of a piece, by its place in the grid of pieces."""
    return f"data/{folder}/{path}/{'-'.join(map(str, index)) or '0'}"


def object_names(listing: Manifest, entry: ObjectsEntry) -> Iterator[str]:
    """The names of all objects of a step but its manifest."""
    for array, piece in zip(listing.arrays, entry.pieces, strict=True):
        yield from (piece_name(entry.folder, array.path, index) for index in piece_grid(array.shape, piece))
    yield from (f"data/{entry.folder}/{file.path}" for file in listing.files)


def piece_grid(shape: Sequence[int], piece: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The places of the pieces of an array in their grid."""
    return itertools.product(*(range(-(-size // part)) for size, part in zip(shape, piece, strict=True)))


def content_of(bucket: Bucket, name: str) -> memoryview:
    """The content of an object of a step. Raises BrokenError if it is absent or damaged, and OSError."""
    try:
        return unseal(name, bucket.read(name).content)
    except FileNotFoundError:
        raise BrokenError(f"{name} is missing") from None


@dataclass(frozen=True, kw_only=True)
class SavedStep:
    """A step whose files match the checksums in its manifest, or whose objects are all there.

    folder: its place, a path or a URL. bucket: has its objects; None: its arrays are files of Orbax.
    """

    folder: Path | str
    manifest: Manifest
    bucket: Bucket | None = None

    def content(self, path: str, most: int) -> bytes:
        """A file of the step, of at most `most` bytes. Raises InputError, or BrokenError or OSError."""
        if self.bucket is None or self.manifest.objects is None:
            file = Path(self.folder, path)
            # `document.read_bytes` would report an error of the disk as wrong input.
            with patiently(lambda: open_file(file), file) as opened:
                content = patiently(lambda: opened.read(most + 1), file)
            if len(content) > most:
                raise InputError([f"{file}: the file is larger than {most:,} bytes, which is the limit for such a file"])
            return content
        return bytes(content_of(self.bucket, f"data/{self.manifest.objects.folder}/{path}"))


class BucketSteps:
    """The steps below a URL, which ends in `checkpoints`, as `train.checkpoint.steps.Steps` has those of a folder."""

    def __init__(self, url: str):
        self.bucket = Bucket(url)
        self.folder = self.bucket.url()
        self._times: dict[int, float] = {}
        self.start = ""
        """The start that is running: its processes remove their own objects of a step that is retired."""

    def listed(self) -> list[int]:
        """The finished steps, the newest last. Raises OSError."""
        found = (_MANIFEST.fullmatch(name) for name in self.bucket.names("manifests/"))
        return sorted(int(match[1]) for match in found if match and int(match[1]))

    def newest(self) -> int:
        """The newest finished step; 0 if there is none, or if the store fails."""
        try:
            return max(self.listed(), default=0)
        except OSError:
            return 0

    def path(self, step: int) -> str:
        """The URL of a step's manifest."""
        return self.bucket.url(_manifest_name(step))

    def saved_at(self, step: int) -> float:
        """The time at which a step was finished, in seconds since 1970; NaN if that cannot be read. Raises OSError."""
        if step not in self._times:
            try:
                entry = self._listing(step).objects
                self._times[step] = float("nan") if entry is None else entry.time
            except (BrokenError, FileNotFoundError):
                return float("nan")
        return self._times[step]

    def open(self, step: int, part: tuple[int, int] = (0, 1)) -> SavedStep:
        """A step whose objects are all there. part: (i, n) as in `Steps.read`; the first process looks for them.

        Raises BrokenError if the step must not be used, and OSError.
        """
        saved = self.saved(step)
        listing, (index, count) = saved.manifest, part
        assert listing.objects is not None
        # A listing shows what is missing. The pieces of arrays are compared with their checksums when they are read.
        if index == 0:
            there = set(self.bucket.names(f"data/{listing.objects.folder}/"))
            if missing := [name for name in object_names(listing, listing.objects) if name not in there]:
                raise BrokenError(f"{missing[0]} is missing" + (f", and {len(missing) - 1:,} more objects" if missing[1:] else ""))
        for file in listing.files[index::count]:
            content_of(self.bucket, f"data/{listing.objects.folder}/{file.path}")
        return saved

    def saved(self, step: int) -> SavedStep:
        """A step as its manifest describes it. Raises as `open` does."""
        listing = self._listing(step)
        if listing.step != step or listing.objects is None:
            raise BrokenError(f"its manifest is from step {listing.step}" if listing.step != step else "its manifest names no objects")
        return SavedStep(folder=self.path(step), manifest=listing, bucket=self.bucket)

    def set_aside(self, step: int) -> str:
        """Moves the manifest of a damaged step away, so that it is not listed again. Its objects stay. Returns the new URL."""
        name = _manifest_name(step)
        content = self.bucket.read(name).content
        # A second step of this number may have been damaged too.
        target = f"broken/{step}-{zlib.crc32(content):08x}.json"
        self.bucket.write(target, content)
        self.bucket.remove([name])
        return self.bucket.url(target)

    def finish(self, listing: Manifest) -> None:
        """Creates the manifest of a step whose objects are stored. Raises OSError, and ChangedError if another start has finished it."""
        assert listing.objects is not None
        name = _manifest_name(listing.step)
        listing = replace(listing, objects=replace(listing.objects, time=time.time()))
        content = seal(name, json.dumps(manifest.sealed(manifest.as_json(listing))).encode())
        try:
            self.bucket.write(name, content, ABSENT)
        except ChangedError:
            # An earlier try of this start may have failed, and the store have done the write all the same, even later. Its objects may be
            # gone. Those of this listing are there.
            found = self.bucket.read(name)
            entry = manifest.parse(bytes(unseal(name, found.content))).objects
            if entry is None or f"-{self.start}-" not in entry.folder:
                raise
            self.bucket.write(name, content, found.version)

    def retire(self, keep: int, held: Collection[int] = ()) -> None:
        """Removes all but the newest `keep` steps, and those that are held."""
        for step in self.listed()[:-keep]:
            if step in held:
                continue
            # A manifest that cannot be read has objects that the next start finds.
            try:
                entry = self._listing(step).objects
            except BrokenError:
                entry = None
            self.bucket.remove([_manifest_name(step)])
            if entry is not None and f"-{self.start}-" not in entry.folder:
                self.bucket.remove(self.bucket.names(f"data/{entry.folder}/"))

    def clear(self) -> None:
        """Removes the objects of saves that were never finished. Must not be called while a save is under way."""
        names = self.bucket.names("data/")
        if not names:
            return
        kept = set()
        for name in self.bucket.names("manifests/") + self.bucket.names("broken/"):
            # A damaged manifest may name anything, and its objects may be looked at.
            content = self.bucket.read(name).content
            kept |= {folder.decode(errors="replace") for folder in re.findall(rb'"folder": "([0-9a-f-]+)"', content)}
        self.bucket.remove(name for name in names if name.split("/")[1] not in kept)

    def _listing(self, step: int) -> Manifest:
        name = _manifest_name(step)
        return manifest.parse(bytes(unseal(name, self.bucket.read(name).content)))


def _manifest_name(step: int) -> str:
    return f"manifests/{step:010d}.json"


def _crc(name: str, content: bytes | memoryview) -> int:
    return zlib.crc32(content, _crc_of_name(name))


@functools.lru_cache(maxsize=1024)
def _crc_of_name(name: str) -> int:
    return zlib.crc32(name.encode())
