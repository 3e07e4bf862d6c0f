"""Files of a folder that may come from a stranger: only its own are read, with limits, and their JSON is read strictly.

Imports no numpy, so that config.json and the headers of safetensors files are read as early as a run's file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from jgt.document import InputError, path_problem, read_bytes, shown

from ..files.disk import open_file, patiently
from ..files.json_text import json_value

METADATA = "__metadata__"
"""The key of a header that is not a tensor."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""The ends of the names of files that run code when they are read."""
_MOST_PROBLEMS = 100
# A file of the largest published models has less than 1 MB of header.
_MAX_HEADER = 1 << 24


def inside(folder: Path, name: str) -> Path:
    """The file of this name in a folder, with links followed. Raises InputError if it leads out of the folder, or is not a regular file."""
    top = folder.resolve()
    # The cache of huggingface_hub has links from `snapshots/REVISION` to `blobs`, both of the same model.
    allowed = [top, *([top.parent.parent / "blobs"] if top.parent.name == "snapshots" else [])]
    with problems_at(folder / name):
        file = Path(os.path.realpath(top / name, strict=True))
        if not any(file.is_relative_to(place) for place in allowed):
            raise ValueError(f"leads to {file}, outside of the folder, and is not read. Copy that file into the folder")
        if problem := path_problem(file):
            raise ValueError(f"cannot be read: {problem}")
    return file


def has_weights(folder: Path) -> bool:
    """Whether a folder has files of weights, also such as `open_folder` refuses. Raises InputError if it cannot be listed."""
    with problems_at(folder):
        names = [entry.name for entry in folder.iterdir()]
    return any(name.endswith((".safetensors", ".safetensors.index.json", *PICKLES)) for name in names)


def read_json(file: Path, most: int) -> dict[str, object]:
    """A JSON file of at most `most` bytes with a mapping in which no key is given twice. Raises InputError."""
    with problems_at(file):
        return parse_json(read_bytes(file, most))


@contextlib.contextmanager
def problems_at(place: Path) -> Iterator[None]:
    """Turns what is wrong with a file into an InputError."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else error
        raise InputError([f"{place}: {problem}"]) from None


def first(problems: Iterable[str]) -> list[str]:
    """The first of many problems; a folder may have a million."""
    found = list(itertools.islice(problems, _MOST_PROBLEMS + 1))
    return found if len(found) <= _MOST_PROBLEMS else [*found[:-1], "and more problems of this kind"]


def parse_json(data: bytes) -> dict[str, object]:
    """The mapping that a JSON text is, in which no key is given twice. Raises ValueError."""
    try:
        values = json_value(data.decode(), _mapping)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"is not a mapping, but {shown(values)}")
    return values


def read_header(file: Path) -> tuple[bytes, int, int]:
    """The header of a file, the place of the first byte behind it, and the bytes of the file. Raises OSError or ValueError."""
    with open_file(file) as opened:
        size, start = os.fstat(opened.fileno()).st_size, opened.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            raise ValueError("is a pointer of Git LFS to the file. Fetch the file with `git lfs pull`")
        if len(start) < 8 or length > min(size - 8, _MAX_HEADER):
            limits = f"the file has {size:,} bytes, and a header at most {_MAX_HEADER:,}. The file may be cut short"
            raise ValueError(f"its header has {length:,} bytes by the first 8 bytes, but {limits}")
        return opened.read(length), 8 + length, size


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a safetensors file, by name. Raises OSError or ValueError."""
    entries = parse_json(patiently(lambda: read_header(file), file)[0])
    entries.pop(METADATA, None)
    shapes = {name: entry.get("shape") if isinstance(entry, dict) else None for name, entry in entries.items()}
    if odd := [name for name, shape in shapes.items() if not (isinstance(shape, list) and all(type(n) is int for n in shape))]:
        raise ValueError(f"{shown(odd[0])}: has no shape")
    return {name: tuple(shape or ()) for name, shape in shapes.items()}


def _mapping(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"{shown(Counter(name for name, _ in pairs).most_common(1)[0][0])} is given twice")
    return values
