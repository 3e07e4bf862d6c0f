"""The parameters of a published model, read from its files straight into shards, one shard at a time.

Each process reads what its devices hold, and each distinct shard once, however many devices hold it. Memory beyond the result is that of
one shard. An array is read in the layout of the model; the run then converts it to the layout of its state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jgt import Packing, path_text
from jgt.document import InputError

from ..models.config import ModelConfig
from .described import Described
from .family import LLAMA
from .foreign import first
from .names import Shape, Source, folder_names, misfits, sources_of, tensors_of
from .safetensors import Folder, open_folder

# The elements that are compared at once.
_PART = 1 << 22


@dataclass(frozen=True)
class Files:
    """The files of a published model whose tensors are those of the model, with the sources of its parameters.

    names: the tensors' names in the folder, by the family's. packing: how matrices of uint8 are packed, which is done shard by shard.
    """

    folder: Folder
    sources: Mapping[str, Source]
    names: Mapping[str, str]
    packing: Packing | None = None

    def load(self, shapes: Any, shardings: Any) -> Any:
        """The parameters, laid out by `shardings`. shapes: their tree of shapes, nested dicts."""
        return jax.tree.map_with_path(lambda path, x, sharding: self._load(path_text(path), x, sharding), shapes, shardings)

    def pieces(self, path: str, shape: Shape, dtype: Any, most: int) -> Iterator[tuple[tuple[slice, ...], np.ndarray[Any, Any]]]:
        """All parts of a parameter, each with its place. A part has at most `most` bytes, or it is a row of a tensor."""
        source = self.sources[path]
        cut = len(shape) - 1 if source.is_transposed else source.num_stacked
        row = max(math.prod(shape[source.num_stacked :]) // max(shape[cut], 1), 1) * np.dtype(dtype).itemsize
        step = max(most // row, 1)
        if self.packing is not None:
            step = self.packing.whole(step)
        for stacked in np.ndindex(*shape[: source.num_stacked]):
            for begin in range(0, shape[cut], step):
                spans = [range(n, n + 1) for n in stacked] + [range(size) for size in shape[source.num_stacked :]]
                spans[cut] = range(begin, min(begin + step, shape[cut]))
                yield tuple(slice(span.start, span.stop) for span in spans), _read(self.folder, source, self.names, tuple(spans), dtype)

    def _load(self, path: str, x: Any, sharding: Any) -> jax.Array:
        def read(spans: tuple[range, ...]) -> Any:
            return _read(self.folder, self.sources[path], self.names, spans, x.dtype)

        def read_packed(spans: tuple[range, ...]) -> Any:
            assert self.packing is not None
            whole, inner = self.packing.blocks(spans[-1])
            matrix = _read(self.folder, self.sources[path], self.names, (*spans[:-1], whole), np.dtype(np.float32))
            return np.asarray(_pack(self.packing, matrix))[..., inner]

        return _sharded(tuple(x.shape), sharding, read_packed if x.dtype == np.uint8 else read)


def open_files(described: Described, config: ModelConfig, shapes: Any) -> Files:
    """The files of a published model with parameters of these shapes, nested dicts.

    Raises InputError with every tensor that is missing, has another shape or is not part of the model. No tensor is read, but
    the head of a tied model, which is compared.
    """
    packing = Packing.named(config.base_dtype)
    leaves = jax.tree.leaves_with_path(shapes)
    flat = {path_text(path): tuple(x.shape) if packing is None else packing.shape_of(x) for path, x in leaves}
    sources = sources_of(described.family, flat, (config.heads, config.num_kv_heads))
    wanted = tensors_of(sources, flat)
    # Some folders have a few tensors more, which are skipped.
    folder = open_folder(described.path, 2 * len(wanted) + 1_000)
    names = folder_names(wanted, folder.tensors)
    table, head = (f"{described.family.names.get(module, LLAMA[module])}.weight" for module in ("embed", "head"))
    if config.tied and names[table] not in folder.tensors:
        names[table] = head
    skipped = (*described.family.skipped, *([head] if config.tied else []))
    if problems := first(f"{described.path}: {problem}" for problem in misfits(wanted, names, folder.tensors, skipped)):
        raise InputError(problems)
    # Some files of tied models have a head, which is the embedding once more.
    if config.tied and head in folder.tensors and not _is_equal(folder, names[table], head):
        untied = "but config.json ties the two (tie_word_embeddings, or the family's default). If the model has both, set it to false there"
        raise InputError([f"{described.path}: {head} differs from {names[table]}, {untied}"])
    return Files(folder, sources, names, packing)


def _is_equal(folder: Folder, one: str, other: str) -> bool:
    """Whether two tensors have the same numbers. Reads them by parts."""
    shape = folder.tensors[one].shape
    if folder.tensors[other].shape != shape:
        return False
    step = max(_PART // math.prod(shape[1:]), 1)
    parts = ([slice(begin, min(begin + step, shape[0]))] for begin in range(0, shape[0], step))
    return all(np.array_equal(folder.read(one, part), folder.read(other, part)) for part in parts)


@partial(jax.jit, static_argnums=0)
def _pack(packing: Packing, matrix: Any) -> jax.Array:
    return packing.pack(matrix)


def _sharded(shape: Shape, sharding: Any, read: Callable[[tuple[range, ...]], Any]) -> jax.Array:
    """An array of shards. read: reads the elements in these ranges of its dims."""
    parts: dict[Any, jax.Array] = {}
    by_index: dict[Any, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        spans = tuple(range(*one.indices(size)) for one, size in zip(index, shape, strict=True))
        by_index.setdefault(spans, []).append(device)
    for spans, devices in by_index.items():
        part = read(spans)
        for device in devices:
            parts[device] = jax.device_put(part, device)
        jax.block_until_ready([parts[device] for device in devices])
    return jax.make_array_from_single_device_arrays(shape, sharding, [parts[device] for device in sharding.addressable_devices])


def _read(folder: Folder, source: Source, names: Mapping[str, str], spans: tuple[range, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """One shard: the elements of a parameter in these ranges of its dims."""
    stacked, inner = spans[: source.num_stacked], spans[source.num_stacked :]
    outputs = np.array([source.outputs[n] for n in inner[-1]])
    # Outputs of one parameter need not be neighbours in the tensor; no byte between them is read.
    runs = np.split(outputs, np.flatnonzero(np.diff(outputs) != 1) + 1)
    cuts = [[*(slice(one.start, one.stop) for one in inner[:-1]), slice(run[0], run[-1] + 1)] for run in runs]
    made = np.empty([len(span) for span in spans], dtype)
    for place in np.ndindex(*(len(span) for span in stacked)):
        name = names[source.at([span[n] for span, n in zip(stacked, place, strict=True)])]
        parts = [folder.read(name, cut[::-1] if source.is_transposed else cut) for cut in cuts]
        parts = [part.T if source.is_transposed else part for part in parts]
        made[place] = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
    return made
