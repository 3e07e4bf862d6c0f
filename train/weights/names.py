"""The tensors that hold a model's parameters: which tensor, and which part of it, each parameter is, and the parameters of each tensor.

A parameter of the layers is one array [layers, ...], a tensor belongs to one layer, and to one expert where there are experts. A kernel
[in, out] is usually stored as [out, in]. Some tensors hold several parameters side by side, along their outputs: q, k and v, for example.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from jgt.document import InputError

from .families.family import LLAMA, Family
from .families.unsupported import UNQUANTISED
from .safetensors import PARAMETERS, Tensor

Shape = tuple[int, ...]
_T = TypeVar("_T")
_OF_TEXT = (("language_model.model.", "language_model."), ("model.language_model.", ""))
"""The words that stand for `model.` in the names of a text part's tensors, and before those of its head."""


@dataclass(frozen=True)
class Source:
    """The tensors of one parameter.

    name: with {l} and {e} for the numbers of a layer and of an expert, which are the first `num_stacked` dims of the parameter.
    outputs: the places of the parameter's outputs among those of the tensor. width: the outputs of the tensor. first_layer: the number of
    the first of its layers.
    """

    name: str
    num_stacked: int
    is_transposed: bool
    outputs: range | Sequence[int]
    width: int
    first_layer: int = 0

    def runs(self, span: range) -> Iterator[tuple[slice, slice]]:
        """The places in the tensor of a span of the parameter's outputs, in runs of equal steps, and the place of each run in the span."""
        outputs = self.outputs[span.start : span.stop]
        if isinstance(outputs, range):
            yield slice(outputs.start, outputs.stop, outputs.step), slice(0, len(outputs))
            return
        cuts = [0, *(np.flatnonzero(np.diff(outputs) != 1) + 1), len(outputs)]
        for begin, end in itertools.pairwise(map(int, cuts)):
            yield slice(outputs[begin], outputs[end - 1] + 1), slice(begin, end)

    def tensor_shape(self, shape: Shape) -> Shape:
        """The shape of each of its tensors, from the parameter's."""
        inner = (*shape[self.num_stacked : -1], self.width)
        return tuple(self.turned(inner))

    def turned(self, dims: Sequence[_T]) -> Sequence[_T]:
        """Dims of a tensor in the order of the parameter's, or the reverse: inputs and outputs are the last two of each."""
        return [*dims[:-2], dims[-1], dims[-2]] if self.is_transposed else dims

    def at(self, place: Sequence[int]) -> str:
        """The name of the tensor of a layer, and of an expert."""
        return self.name.format(**dict(zip("le", (self.first_layer + n if dim == 0 else n for dim, n in enumerate(place)), strict=False)))


def sources_of(family: Family, shapes: Mapping[str, Shape], num_heads: tuple[int, int]) -> dict[str, Source]:
    """The sources of parameters, by path. num_heads: of queries, and of keys.

    Raises InputError for parameters that the family has no tensors for.
    """
    found = {path: _name(family, path) for path in shapes}
    if lacking := [path for path, name in found.items() if name is None]:
        raise InputError([f"model: the family has no tensor for the parameter {path}" for path in lacking])
    names = {path: name for path, name in found.items() if name is not None}
    sources: dict[str, Source] = {}
    # The first layers, where they have a stack of their own.
    num_dense = next((shape[0] for path, shape in shapes.items() if path.startswith("dense/")), 0)

    def key(path: str) -> tuple[str, bool]:
        return names[path], path.startswith("layers/")

    for (name, is_later), paths in itertools.groupby(sorted(shapes, key=lambda path: (*key(path), _order(path))), key=key):
        group, first = list(paths), 0
        width = sum(shapes[path][-1] for path in group)
        for number, path in enumerate(group):
            size = shapes[path][-1]
            outputs: range | list[int] = range(first, first + size)
            if family.by_head and len(group) == 3:
                # [heads, 3, h] and not [3, heads, h].
                head = size // num_heads[0]
                outputs = [(3 * n + number) * head + i for n in range(num_heads[0]) for i in range(head)]
            elif family.is_interleaved and len(group) == 2:
                outputs = range(number, width, 2)
            # A stack of the matrices of all experts is as they are multiplied in most families.
            is_kernel = "/kernel" in path or ("/experts/" in path and ("{e}" in name or family.are_stacks_transposed))
            depth = name.count("{")
            is_transposed = is_kernel and family.are_kernels_transposed
            sources[path] = Source(name, depth, is_transposed, outputs, width, num_dense if is_later else 0)
            first += size
    return sources


def _name(family: Family, path: str) -> str | None:
    if path in family.names:
        return family.names[path]
    inner = re.sub(r"^(layers|dense)/", "", path)
    module, _, last = inner.rpartition("/")
    found = {**LLAMA, **family.names}
    name = found.get(inner) or (f"{found[module]}.{'bias' if last == 'bias' else 'weight'}" if module in found else None)
    return name if name is None or inner == path else family.layer + name


def _order(path: str) -> int:
    """The place of a parameter among those that share a tensor."""
    order = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "experts/gate", "experts/up", "biases/gate", "biases/up")
    return next((n for n, name in enumerate(order) if name in path), 0)


def tensors_of(sources: Mapping[str, Source], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """All tensors of a model by name, with their shapes."""
    return {name: source.tensor_shape(shapes[path]) for path, source in sources.items() for name in each_name(source, shapes[path])}


def each_name(source: Source, shape: Shape) -> Iterator[str]:
    """The tensors of a parameter of this shape."""
    return (source.at(place) for place in np.ndindex(*shape[: source.num_stacked]))


def folder_names(wanted: Iterable[str], found: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps our tensor names to those in the folder.

    Files of a bare decoder omit the first component, as in `h.0.ln_1.weight`. In files with other parts it has another name.
    """
    for decoder, head in _OF_TEXT:
        if any(name.startswith(decoder) for name in found):
            return {n: f"{decoder}{n.removeprefix('model.')}" if n.startswith("model.") else f"{head}{n}" for n in wanted}
    firsts = {name.partition(".")[0] for name in wanted if name.count(".") > 1}
    bare = {first for first in firsts if not any(name.startswith(f"{first}.") for name in found)}
    return {name: name.partition(".")[2] if name.partition(".")[0] in bare else name for name in wanted}


def misfits(wanted: Mapping[str, Shape], names: Mapping[str, str], found: Mapping[str, Tensor], skipped: Sequence[str]) -> Iterator[str]:
    """Everything in which the tensors of a folder differ from those of the model. names: those in the folder, by ours.

    Quantised tensors have other names, shapes and types, so that their types are all that is said of such a folder.
    """
    kinds = {tensor.dtype for name, tensor in found.items() if not name.endswith(tuple(skipped))} - set(PARAMETERS.values())
    if kinds:
        has = f"has tensors of the type {', '.join(sorted(map(str, kinds)))}, which is not one of {', '.join(PARAMETERS)}"
        yield f"{has}. If they are quantised, take {UNQUANTISED}"
        return
    for ours, shape in wanted.items():
        name = names[ours]
        if name not in found:
            yield f"the tensor {name} {list(shape)} is missing"
        elif found[name].shape != shape:
            yield f"the tensor {name} has the shape {list(found[name].shape)}, but the model needs {list(shape)}"
    for name in found.keys() - names.values():
        if not name.endswith(tuple(skipped)):
            yield f"the tensor {name} {list(found[name].shape)} is not part of the model that config.json describes"
