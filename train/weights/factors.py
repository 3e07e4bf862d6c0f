"""The factors of a run's adapters from an adapter of PEFT, laid out on the run's devices.

A [rank, in] of each layer is a part of `lora_a` [layers, in, rank], and B [out, rank] of `lora_b` [layers, rank, out]. A tensor that is
several matrices side by side has one A, which each of them gets, and of B each gets its own rows. Factors are small: those of all layers
are read whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgt import path_text
from jgt.document import InputError

from .adapters import BASE, FACTOR, TENSORS, Peft
from .contents import has_identity
from .foreign import first, inside, read_json
from .names import Shape, Source
from .safetensors import PARAMETERS, Folder, Tensor, check_finite, open_folder

_MOST_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Site:
    """A stack of matrices, and the modules of PEFT that they are.

    outputs: the places of a matrix's outputs among the `width` ones of its module, which may have others beside them.
    """

    source: Source
    stack: Shape
    inputs: int
    outputs: Sequence[int]
    width: int

    @staticmethod
    def of(source: Source, path: str, shape: Shape) -> Site:
        """The site of a parameter. Only kernels are [in, out]; heads are [out, in]."""
        stack = shape[: source.num_stacked]
        if path.endswith("/kernel"):
            return Site(source=source, stack=stack, inputs=shape[-2], outputs=source.outputs, width=source.width)
        return Site(source=source, stack=stack, inputs=shape[-1], outputs=range(shape[-2]), width=shape[-2])

    def modules(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Each place in the stack, with its module."""
        for place in np.ndindex(*self.stack):
            yield place, self.source.at(place).removesuffix(".weight")


def check_factors(peft: Peft, sites: Mapping[tuple[str, str], Site]) -> None:
    """Raises InputError with every module of an adapter that is not a matrix of the model, or has factors of other shapes.

    sites: by the paths of their A and B.
    """
    found = {module for site in sites.values() for _, module in site.modules()}
    problems = [f"{module}: the model has no such matrix" for module in peft.modules.keys() - found]
    for site in sites.values():
        for module in dict.fromkeys(module for _, module in site.modules() if module in peft.modules):
            rank = peft.modules[module][0]
            for factor, needed in (("A", (rank, site.inputs)), ("B", (site.width, rank))):
                if (shape := peft.shapes[FACTOR.format(module=module, factor=factor)]) != needed:
                    problems.append(f"{module}: {factor} has the shape {list(shape)}, but the model needs {list(needed)}")
    if problems:
        raise InputError(first(f"{peft.file}: {problem}. Is it an adapter of another model?" for problem in dict.fromkeys(problems)))


def load_factors(peft: Peft, sites: Mapping[tuple[str, str], Site], scale: float, places: Any) -> Any:
    """The factors of an adapter that `check_factors` allows, a tree of arrays for the shardings in `places`.

    scale: that of the `lora:` section. Raises InputError for damaged tensors, and DiskError.
    """
    folder = open_folder(peft.path, single=TENSORS)
    if odd := [f"{name}: has the type {x.dtype}, not {', '.join(PARAMETERS)}" for name, x in folder.tensors.items() if not _is_float(x)]:
        raise InputError(first(f"{peft.file}: {problem}" for problem in odd))
    arrays = {path: x for paths, site in sites.items() for path, x in zip(paths, _read(peft, folder, site, scale), strict=True)}

    def laid_out(path: Any, place: Any) -> jax.Array:
        array = arrays[path_text(path)]
        return jax.make_array_from_callback(array.shape, place, array.__getitem__)

    return jax.tree.map_with_path(laid_out, places)


def check_base(peft: Peft, base: Path) -> None:
    """Raises InputError if jgt trained the adapter on other weights than those in a folder."""
    if not (peft.path / BASE).is_file():
        return
    if not has_identity(base, str(read_json(inside(peft.path, BASE), _MOST_BYTES).get("sha256"))):
        why = f"the adapter was trained on other weights than those in {base}"
        raise InputError([f"{peft.path / BASE}: {why}. Name the folder of its model in model.hf"])


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype in PARAMETERS.values()


def _read(peft: Peft, folder: Folder, site: Site, scale: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A [*stack, in, rank] and B [*stack, rank, out] of a site. A module that the adapter lacks has zeros."""
    a = np.zeros((*site.stack, site.inputs, peft.rank), np.float32)
    b = np.zeros((*site.stack, peft.rank, len(site.outputs)), np.float32)
    for place, module in site.modules():
        if module in peft.modules:
            rank, factor = peft.modules[module]
            parts = {name: folder.read(name) for name in (FACTOR.format(module=module, factor=one) for one in "AB")}
            for name, part in parts.items():
                check_finite(part, peft.file, name)
            into, out = parts.values()
            a[place][:, :rank] = into.T
            b[place][:rank] = out[list(site.outputs)].T * np.float32(factor / scale)
    return a, b
