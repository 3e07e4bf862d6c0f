"""The identity of the tensors in a folder of published weights.

All fine-tuned models of one kind have the same tensors, names and shapes, so the identity also covers a sample of the contents of each
tensor, and then all contents: training may change a few rows only. The first process alone reads all of them. The identity covers neither
the name of the folder nor how many files the tensors are in.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from ..files.disk import DiskError, describe, open_file, patiently
from .safetensors import Tensor, open_folder

SAMPLED = 64
"""The length of the part of an identity that is about samples."""
_SAMPLE = 4096
"""The bytes of each tensor in the sample, from the middle. Of norms, these are all."""
_PART, _THREADS = 1 << 24, 8


def identity(folder: Path) -> str:
    """A SHA-256 of names, types, shapes and sampled contents of all tensors of a folder; in the first process, another one of all contents.

    Raises InputError and DiskError.
    """
    tensors = sorted(open_folder(folder).tensors.items())
    return _digest(tensors, _sampled) + (_digest(tensors, _whole) if jax.process_index() == 0 else "")


def has_identity(folder: Path, known: str) -> bool:
    """Whether a folder has an identity, as far as this process sees. One of an earlier version has no part for all contents."""
    found = identity(folder)
    return len(known) >= SAMPLED and (known.startswith(found) or found.startswith(known))


def _digest(tensors: Sequence[tuple[str, Tensor]], content: Callable[[Tensor], bytes]) -> str:
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_THREADS) as pool:
        for (name, tensor), part in zip(tensors, pool.map(content, [tensor for _, tensor in tensors]), strict=True):
            digest.update(json.dumps([name, str(tensor.dtype), tensor.shape]).encode() + part)
    return digest.hexdigest()


def _sampled(tensor: Tensor) -> bytes:
    size = min(tensor.nbytes, _SAMPLE)
    return _read(tensor, (tensor.nbytes - size) // 2, size)


def _whole(tensor: Tensor) -> bytes:
    digest = hashlib.sha256()
    for begin in range(0, tensor.nbytes, _PART):
        digest.update(_read(tensor, begin, min(_PART, tensor.nbytes - begin)))
    return digest.digest()


def _read(tensor: Tensor, begin: int, size: int) -> bytes:
    def read() -> bytes:
        with open_file(tensor.file) as file:
            return os.pread(file.fileno(), size, tensor.offset + begin)

    try:
        return patiently(read, tensor.file)
    except OSError as error:
        raise DiskError(describe(error, tensor.file)) from error
