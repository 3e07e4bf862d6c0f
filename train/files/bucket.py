"""Objects below a URL: read, written under a condition, listed, removed. The only file about TensorStore's key-value stores.

A store is not a file system. It has no rename and no lock, but an object appears as a whole or not at all, it is durable when its write is
answered, and a write may depend on the version that its writer has seen. All of a run's guarantees on a bucket follow from these three.

Every failure has a type, because a run decides by it. Only an object of which the store says that it is absent is a FileNotFoundError.
Anything else (no permission, no answer, too many requests) is an OSError that says nothing about the object. The answer of a write may be
lost after the store has done it. So a conditional write that is refused reads the object back, and has succeeded if the object is its own;
contents that are written so must therefore differ from writer to writer.

Credentials, regions and endpoints are those that the vendors' own tools use: their files and variables of the environment, such as
AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL and GOOGLE_APPLICATION_CREDENTIALS.
"""

from __future__ import annotations

import bisect
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

from jgt.document import InputError, shown

if TYPE_CHECKING:
    import tensorstore

_Result = TypeVar("_Result")

_URL = re.compile(r"(s3|gs)://([a-z0-9][a-z0-9._-]{1,221}[a-z0-9])(?:/+(.*))?|(file)://(/.+)")
_ALMOST_URL = re.compile(r"(s3|gs|gcs|file|https?):/(?!/)", re.IGNORECASE)
_MAX_LINE = 300
_SECONDS = 300.0
"""The longest time of one request with all its repetitions."""
_RETRIES = {"max_retries": 6, "initial_delay": "250ms", "max_delay": "4s"}
_THREADS = 8
_MOST_BYTES = 1 << 44
ANY, ABSENT = None, b"\x02"
"""Conditions of a write: none, and that there is no object of this name. ABSENT is TensorStore's generation of a missing key."""
_STALL = {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "5", "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1"}
"""Otherwise a connection without an answer is given up after a minute."""


class Object(NamedTuple):
    """An object as it was read."""

    content: bytes
    version: bytes


class StoreError(OSError):
    """A store cannot do what it was asked for; that says nothing about its objects."""


class ChangedError(Exception):
    """An object is not of the version that a write was to replace."""


def is_url(text: object) -> bool:
    """Whether a text is a URL, and not a path."""
    return isinstance(text, str) and "://" in text


def bucket_problem(text: str) -> str | None:
    """Why a URL names no place in a store. None: it does, or is a path."""
    if almost := _ALMOST_URL.match(text):
        remedy = f"It would begin with {almost[1].lower()}://. For a folder of this name, write ./{almost[1]}:/"
        return f"{shown(text)} looks like a URL, but is not one. {remedy}"
    if not is_url(text) or _URL.fullmatch(text):
        return None
    is_known = text.partition("://")[0] in ("s3", "gs", "file")
    why = "names no bucket, as in s3://BUCKET/FOLDER" if is_known else "is not supported. These are: s3://, gs://, and paths"
    return f"{shown(text)} {why}"


PathOrUrl = Annotated[str, bucket_problem]
"""The type of a key that takes a path, or the URL of a place in an object store."""


def path_or_url(text: str | Path) -> Path | str:
    """A path, or the text itself if it is a URL."""
    return text if isinstance(text, str) and is_url(text) else Path(text)


class Bucket:
    """The objects below a URL such as s3://BUCKET/FOLDER, by their names relative to it. Its methods may be called by any thread.

    Methods raise FileNotFoundError for an object that is absent, and StoreError if the store fails.
    """

    def __init__(self, url: str):
        if problem := bucket_problem(url):
            raise InputError([problem])
        self._url = url.rstrip("/")
        self._opened: tensorstore.KvStore | None = None

    def url(self, name: str = "") -> str:
        """The URL of an object, for messages."""
        return f"{self._url}/{name}" if name else self._url

    def below(self, folder: str) -> Bucket:
        """The objects below a folder of this bucket."""
        return Bucket(self.url(folder))

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Object:
        """An object, or its bytes from `begin` to `end`."""
        part = None if begin == 0 and end is None else slice(begin, end)
        found = self._wait(name, lambda: self._store.read(name, byte_range=part))
        if found.state != "value":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url(name))
        return Object(found.value, found.stamp.generation)

    def write(self, name: str, content: bytes | None, version: bytes | None = ANY) -> bytes:
        """Writes an object, or removes it if `content` is None, and returns its new version.

        version: ANY, ABSENT, or the version that it must have; otherwise ChangedError is raised and nothing is written.
        """
        stamp = self._wait(name, lambda: self._store.write(name, content, if_equal=version))
        if stamp.generation or version is ANY:
            return stamp.generation
        # Refused: by another writer, or because the store has done it before and its answer was lost.
        try:
            found = self.read(name)
        except FileNotFoundError:
            if content is None:
                return ABSENT
            raise ChangedError(self.url(name)) from None
        if found.content != content:
            raise ChangedError(self.url(name))
        return found.version

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects that begin with `prefix`, in order."""

        def found() -> tensorstore.Future[list[bytes]]:
            import tensorstore  # noqa: PLC0415

            end = (prefix[:-1] + chr(ord(prefix[-1]) + 1)) if prefix else ""
            return self._store.list(tensorstore.KvStore.KeyRange(prefix, end))

        return sorted(name.decode(errors="replace") for name in self._wait(prefix, found))

    def size(self, name: str) -> int:
        """The bytes of an object. TensorStore does not say them, so some 40 reads of a byte search for the end."""

        def is_behind(place: int) -> bool:
            try:
                self.read(name, place, place + 1)
            except StoreError as error:
                if not str(error.strerror).startswith("OUT_OF_RANGE"):
                    raise
                return True
            return False

        return bisect.bisect_left(range(_MOST_BYTES), True, key=is_behind)

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects; an object that is absent already is not an error."""
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda name: self.write(name, None), names))

    def check_conditions(self) -> None:
        """Raises InputError if the store ignores conditions, or StoreError: two writers would overwrite each other without a word."""
        name = f"probe-{secrets.token_hex(8)}"

        def create(number: int) -> bool:
            try:
                return bool(self.write(name, f"{number}".encode(), ABSENT))
            except ChangedError:
                return False

        # At the same time: TensorStore looks whether there is an object before it sends one, and only the store can tell these apart.
        with ThreadPoolExecutor(_THREADS) as pool:
            created = sum(pool.map(create, range(_THREADS)))
        self.remove([name])
        if created != 1:
            why = "the store ignores the conditions of writes (If-None-Match), so it cannot keep two runs apart"
            remedy = "Use a store that has them, such as S3 or GCS, or a folder"
            if not created:
                why, remedy = "no object can be created there: the store has no such bucket", "Check the name of the bucket, or create it"
            raise InputError([f"{self._url}: {why}. {remedy}"])

    @property
    def _store(self) -> tensorstore.KvStore:
        if self._opened is None:
            for name, value in _STALL.items():
                os.environ.setdefault(name, value)
            if "STORAGE_EMULATOR_HOST" in os.environ:
                # As Google's own libraries call it.
                os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", os.environ["STORAGE_EMULATOR_HOST"])
            import tensorstore  # noqa: PLC0415

            limits = {f"{driver}_request_{kind}": value for driver in ("s3", "gcs") for kind, value in _LIMITS.items()}
            self._opened = tensorstore.KvStore.open(_spec(self._url), context=tensorstore.Context(limits)).result()
        return self._opened

    def _wait(self, name: str, call: Callable[[], tensorstore.Future[_Result]]) -> _Result:
        """The result of a call of TensorStore."""
        try:
            return call().result(timeout=_SECONDS)
        except (ValueError, OSError, TimeoutError, RuntimeError) as error:
            # Its errors are of few types. The message begins with a word for the kind, such as PERMISSION_DENIED.
            line = next(iter(str(error).splitlines()), type(error).__name__)
            has_key = not self._url.startswith("s3:") or "AWS_ACCESS_KEY_ID" in os.environ
            hint = "" if has_key else ". AWS_ACCESS_KEY_ID is not set; AWS_ENDPOINT_URL and AWS_REGION say where the bucket is"
            raise StoreError(errno.EIO, shown(line, _MAX_LINE, quotes=False) + hint, self.url(name)) from error


_LIMITS = {"concurrency": {"limit": 4 * _THREADS}, "retries": _RETRIES}


def _spec(url: str) -> dict[str, object]:
    """TensorStore's description of a URL."""
    match = _URL.fullmatch(url)
    assert match is not None
    scheme, bucket, path, _, folder = match.groups()
    if folder:
        return {"driver": "file", "path": f"{folder}/"}
    spec: dict[str, object] = {"driver": "gcs" if scheme == "gs" else "s3", "bucket": bucket, "path": f"{path}/" if path else ""}
    if scheme == "s3":
        values = {
            "endpoint": os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
            "aws_region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
            # Without the word, the library asks all other providers too, and prints a line for each.
            "aws_credentials": {"type": "environment"} if "AWS_ACCESS_KEY_ID" in os.environ else None,
        }
        spec |= {name: value for name, value in values.items() if value}
    return spec
