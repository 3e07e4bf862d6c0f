"""The tensors that hold a model's parameters: which tensor, and which part of it, each parameter is, and the parameters of each tensor.

A parameter of the layers is one array [layers, ...], a tensor belongs to one layer, and to one expert where there are experts. A kernel
[in, out] is usually stored as [out, in]. Some tensors hold several parameters side by side, along their outputs: q, k and v, for example.
Those of a convolution have a dim of 1 in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from jgt.document import InputError

from ..models.config import ModelConfig
from ..models.stacks import LayerStack, stacks_of
from .families.family import LLAMA, Family
from .families.unsupported import UNQUANTISED
from .safetensors import PARAMETERS, Tensor

Shape = tuple[int, ...]
_T = TypeVar("_T")
_OF_TEXT = (("language_model.model.", "language_model."), ("model.language_model.", ""))
"""The words that stand for `model.` in the names of a text part's tensors, and before those of its head."""


@dataclass(frozen=True, kw_only=True)
class Structure:
    """How a decoder's layers and heads are arranged. heads: of queries. key_heads: of linear attention."""

    stacks: tuple[LayerStack, ...] = ()
    heads: int = 1
    key_heads: int = 1

    @staticmethod
    def of(config: ModelConfig) -> Structure:
        """The structure of a decoder."""
        linear = config.linear
        return Structure(stacks=stacks_of(config), heads=config.heads, key_heads=1 if linear is None else linear.num_key_heads)

    def place(self, path: str) -> tuple[str, str, range]:
        """The name of a parameter within its layer, the kind of the layer and the numbers of its layers; the path itself for others."""
        for stack in self.stacks:
            for n, prefix in enumerate(stack.paths):
                if path.startswith(f"{prefix}/"):
                    return path.removeprefix(f"{prefix}/"), stack.kinds[n], stack.layers(n)
        return path, "", range(0)


@dataclass(frozen=True)
class Source:
    """The tensors of one parameter.

    name: with {l} and {e} for the numbers of a layer and of an expert, which are the first `num_stacked` dims of the parameter.
    outputs: the places of the parameter's outputs among those of the tensor. width: the outputs of the tensor. layers: the numbers of
    its layers. is_convolution: its tensors have a dim of 1 before the last one.
    """

    name: str
    num_stacked: int
    is_transposed: bool
    outputs: range | Sequence[int]
    width: int
    layers: range = range(0)
    is_convolution: bool = False

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
        return tuple(self.turned(inner, 1))

    def turned(self, dims: Sequence[_T], one: _T) -> list[_T]:
        """Dims of a parameter in the order of the tensor's: inputs and outputs are the last two of each. one: for a dim of size 1."""
        turned = [*dims[:-2], dims[-1], dims[-2]] if self.is_transposed else [*dims]
        return [*turned[:-1], one, turned[-1]] if self.is_convolution else turned

    def tensor_part(self, part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A part of the parameter as the tensor has it."""
        part = part.swapaxes(-1, -2) if self.is_transposed else part
        return part[..., None, :] if self.is_convolution else part

    def parameter_part(self, part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A part of the tensor as the parameter has it."""
        part = part[..., 0, :] if self.is_convolution else part
        return part.swapaxes(-1, -2) if self.is_transposed else part

    def at(self, place: Sequence[int]) -> str:
        """The name of the tensor of a layer, and of an expert."""
        numbers = (self.layers[n] if dim == 0 and self.layers else n for dim, n in enumerate(place))
        return self.name.format(**dict(zip("le", numbers, strict=False)))


def sources_of(family: Family, shapes: Mapping[str, Shape], structure: Structure) -> dict[str, Source]:
    """The sources of parameters, by path. Raises InputError for parameters that the family has no tensors for."""
    places = {path: structure.place(path) for path in shapes}
    found = {path: _name(family, path, *places[path][:2]) for path in shapes}
    if lacking := [path for path, name in found.items() if name is None]:
        raise InputError([f"model: the family has no tensor for the parameter {path}" for path in lacking])
    names = {path: name for path, name in found.items() if name is not None}
    sources: dict[str, Source] = {}

    def key(path: str) -> tuple[str, int]:
        return names[path], places[path][2].start

    for (name, _), paths in itertools.groupby(sorted(shapes, key=lambda path: (*key(path), _order(path))), key=key):
        group = list(paths)
        inner, kind, layers = places[group[0]]
        sizes = [shapes[path][-1] for path in group]
        heads = structure.key_heads if kind == "linear" else structure.heads
        by_head = name.removeprefix(family.layer).removesuffix(".weight").removesuffix(".bias") in family.by_head
        for number, path in enumerate(group):
            # A stack of the matrices of all experts is as they are multiplied in most families.
            is_kernel = "/kernel" in path or ("/experts/" in path and ("{e}" in name or family.are_stacks_transposed))
            sources[path] = Source(
                name,
                name.count("{"),
                (is_kernel and family.are_kernels_transposed) or inner.endswith("_conv"),
                _outputs(sizes, number, heads if by_head else 1, is_interleaved=family.is_interleaved and len(group) == 2),
                sum(sizes),
                layers,
                is_convolution=inner.endswith("_conv"),
            )
    return sources


def _outputs(sizes: Sequence[int], number: int, heads: int, *, is_interleaved: bool) -> range | list[int]:
    """The places of a parameter's outputs in a tensor of several, of these sizes. heads: each has the outputs of all of them together."""
    if is_interleaved:
        return range(number, sum(sizes), 2)
    first, width, whole = (size // heads for size in (sum(sizes[:number]), sizes[number], sum(sizes)))
    # [heads, 3, h] and not [3, heads, h].
    return range(first, first + width) if heads == 1 else [whole * n + first + i for n in range(heads) for i in range(width)]


def _name(family: Family, path: str, inner: str, kind: str) -> str | None:
    if path in family.names:
        return family.names[path]
    found = {**LLAMA, **family.names}
    found |= {name.removeprefix(f"{kind}/"): tensor for name, tensor in family.names.items() if name.startswith(f"{kind}/")}
    module, _, last = inner.rpartition("/")
    name = found.get(inner) or (f"{found[module]}.{'bias' if last == 'bias' else 'weight'}" if module in found else None)
    return name if name is None or not kind else family.layer + name


def _order(path: str) -> int:
    """The place of a parameter among those that share a tensor."""
    order = (
        "q_proj",
        "k_proj",
        "v_proj",
        "q_conv",
        "k_conv",
        "v_conv",
        "gate_proj",
        "up_proj",
        "beta_proj",
        "decay_proj",
        "experts/gate",
        "experts/up",
        "biases/gate",
        "biases/up",
    )
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
