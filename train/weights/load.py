"""The parameters of a published model, read from its files straight into shards, one shard at a time.

Each process reads what its devices hold, and each distinct shard once, however many devices hold it. Memory beyond the result is that of
one shard. An array is read in the layout of the model; the run then converts it to the layout of its state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jgt import Packing, path_text
from jgt.document import InputError

from ..models.config import ModelConfig
from ..models.stacks import stacks_of
from ..step.trained import divided
from .described import Described
from .eight_bits import EightBits
from .families.family import LLAMA
from .foreign import first
from .four_bits import FourBits
from .names import Shape, Source, Structure, folder_names, misfits, sources_of, tensors_of
from .safetensors import Folder, check_finite, open_folder

# The elements that are compared at once.
_PART = 1 << 22
ROUTER_BIAS = "moe/bias"
"""The end of the paths of routers' biases among the variables of a model."""


@dataclass(frozen=True)
class Files:
    """The files of a published model whose tensors are those of the model, with the sources of its parameters.

    names: the tensors' names in the folder, by the family's. stored: reads tensors, also those with scales. packing: how matrices of uint8
    are packed, which is done shard by shard. left_out: a sentence about tensors that are not part of the model; None if there are none.
    """

    folder: Folder
    sources: Mapping[str, Source]
    names: Mapping[str, str]
    stored: EightBits | FourBits
    packing: Packing | None = None
    left_out: str | None = None

    def load(self, shapes: Any, shardings: Any) -> Any:
        """The parameters, laid out by `shardings`. shapes: their tree of shapes, nested dicts."""
        return jax.tree.map_with_path(lambda path, x, sharding: self._load(path_text(path), x, sharding), shapes, shardings)

    def variables(self, shapes: Any, shardings: Any) -> Any:
        """Those of a model's variables that the files have. shapes, shardings: of all, nested dicts."""
        kept, places = (divided(tree, self.sources.__contains__)[0] for tree in (shapes, shardings))
        return self.load(kept, places)

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
                yield tuple(slice(span.start, span.stop) for span in spans), self._read(source, tuple(spans), dtype)

    def _load(self, path: str, x: Any, sharding: Any) -> jax.Array:
        def read(spans: tuple[range, ...]) -> Any:
            return self._read(self.sources[path], spans, x.dtype)

        def read_packed(spans: tuple[range, ...]) -> Any:
            assert self.packing is not None
            whole, inner = self.packing.blocks(spans[-1])
            matrix = self._read(self.sources[path], (*spans[:-1], whole), np.dtype(np.float32))
            return np.asarray(_pack(self.packing, matrix))[..., inner]

        return _sharded(tuple(x.shape), sharding, read_packed if x.dtype == np.uint8 else read)

    def _read(self, source: Source, spans: tuple[range, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """One shard: the elements of a parameter in these ranges of its dims. Raises InputError for NaN and infinite ones."""
        stacked, inner = spans[: source.num_stacked], spans[source.num_stacked :]
        cuts = [[*(slice(one.start, one.stop) for one in inner[:-1]), run] for run, _ in source.runs(inner[-1])]
        made = np.empty([len(span) for span in spans], dtype)
        for place in np.ndindex(*(len(span) for span in stacked)):
            name = self.names[source.at([span[n] for span, n in zip(stacked, place, strict=True)])]
            # A product with a damaged scale may be none.
            with np.errstate(over="ignore", invalid="ignore"):
                parts = [source.parameter_part(self.stored.read(name, source.turned(cut, slice(0, 1)))) for cut in cuts]
            made[place] = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
            check_finite(made[place], self.folder.path, name)
        return made


def open_files(described: Described, config: ModelConfig, shapes: Any) -> Files:
    """The files of a published model with parameters of these shapes, nested dicts.

    Raises InputError with every tensor that is missing, has another shape or is not part of the model. No tensor is read, but
    the head of a tied model, which is compared.
    """
    packing = Packing.named(config.base_dtype)
    leaves = jax.tree.leaves_with_path(shapes)
    flat = {path_text(path): tuple(x.shape) if packing is None else packing.shape_of(x) for path, x in leaves}
    family = replace(described.family, names={**described.family.names, **described.names})
    flat |= kept_variables(config)
    sources = sources_of(family, flat, Structure.of(config))
    wanted = tensors_of(sources, flat)
    # Some folders have a few tensors more, which are skipped, and some have scales, or the tensors of other parts.
    folder = open_folder(described.path, (2 if described.block is None else 4) * len(wanted) + (10_000 if described.others else 1_000))
    table, head = (f"{family.names.get(module, LLAMA[module])}.weight" for module in ("embed", "head"))
    names = folder_names([*wanted, head], folder.tensors)
    head = names[head]
    if config.tied and names[table] not in folder.tensors:
        names[table] = head
    skipped = (*family.skipped, *([head] if config.tied else []))
    others = {name: parts[0] for name in folder.tensors if (parts := [part for part in described.others if _is_of(part, name)])}
    found = {name: tensor for name, tensor in folder.tensors.items() if name not in others}
    stored = FourBits.of(folder) if described.is_mxfp4 else EightBits.of(folder, described.block)
    wrong = itertools.chain(stored.problems(), misfits(wanted, names, stored.without(found), skipped))
    if problems := first(f"{described.path}: {problem}" for problem in wrong):
        raise InputError(problems)
    # Some files of tied models have a head, which is the embedding once more.
    if config.tied and head in folder.tensors and not _is_equal(stored, names[table], head):
        untied = "but config.json ties the two (tie_word_embeddings, or the family's default). If the model has both, set it to false there"
        raise InputError([f"{described.path}: {head} differs from {names[table]}, {untied}"])
    kinds = sorted({*others.values()})
    left_out = f"{len(others):,} tensors of other parts are left out ({', '.join(kinds)})" if others else None
    return Files(folder, sources, names, stored, packing, left_out)


def _is_of(part: str, name: str) -> bool:
    """Whether a tensor is of another part, by the beginning of its name or, with a point, by what is in it."""
    return part in name if part.startswith(".") else name.startswith(part)


def kept_variables(config: ModelConfig) -> dict[str, Shape]:
    """The variables of a model that published files have, by path: the biases of its routers."""
    experts = config.experts
    if experts is None or experts.balance != "bias":
        return {}
    return {
        f"{path}/{ROUTER_BIAS}": (stack.count, experts.count) for stack in stacks_of(config) if not stack.is_dense for path in stack.paths
    }


def _is_equal(files: EightBits | FourBits, one: str, other: str) -> bool:
    """Whether two tensors have the same numbers. Reads them by parts."""
    shape = files.folder.tensors[one].shape
    if files.folder.tensors[other].shape != shape:
        return False
    step = max(_PART // math.prod(shape[1:]), 1)
    parts = ([slice(begin, min(begin + step, shape[0]))] for begin in range(0, shape[0], step))
    return all(np.array_equal(files.read(one, part), files.read(other, part)) for part in parts)


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
