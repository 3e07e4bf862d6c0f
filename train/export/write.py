"""Writing an export: the tensors come from a checkpoint, piece by piece, whatever mesh it was saved on.

So an export needs neither the run's devices nor the memory for its model, and a run that trains is not disturbed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from ..checkpoint.pieces import Span
from ..weights.load import ROUTER_BIAS
from ..weights.names import Source, tensors_of
from ..weights.origin import DESCRIPTION
from ..weights.safetensors import DTYPES
from ..weights.writing import Piece, write_folder
from .form import Form
from .model import SavedModel

EXPORTED: Mapping[str, np.dtype] = {"f32": DTYPES["F32"], "bf16": DTYPES["BF16"]}
_TORCH = {"f32": "float32", "bf16": "bfloat16"}


def write_export(
    form: Form,
    model: SavedModel,
    folder: Path,
    *,
    dtype: str,
    max_file_bytes: int,
    check: Callable[[], None] = lambda: None,
    last: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Writes the model of a checkpoint as a new folder. Returns the number of its tensors.

    check: called before each piece; an error of it ends the export. last: as in `write_folder`. Raises InputError if there is
    something at the path or the checkpoint cannot be used, DiskError if it cannot be read, and OSError.
    """
    shapes = model.shapes
    sources = form.sources(shapes)
    # A rounding of the biases may change which experts are chosen.
    types = {path: EXPORTED["f32" if path.endswith(ROUTER_BIAS) else dtype] for path in shapes}
    tensors = {name: (types[path], shape) for path in shapes for name, shape in tensors_of({path: sources[path]}, shapes).items()}

    def parts() -> Iterator[Piece]:
        for path, source in sources.items():
            for place, value in model.pieces(path):
                check()
                part = value.astype(types[path], copy=False)
                # Otherwise it would stay while the next one is read.
                del value
                yield from _tensor_parts(source, place, part)
                del part

    text = json.dumps({**form.config, "torch_dtype": _TORCH[dtype]}, indent=2)
    files: dict[str, bytes | Path] = {DESCRIPTION: text.encode() + b"\n", **form.files}
    write_folder(folder, tensors, parts(), files=files, max_file_bytes=max_file_bytes, last=last)
    return len(tensors)


def _tensor_parts(source: Source, place: Span, value: np.ndarray) -> Iterator[Piece]:
    """The parts of tensors that a part of a parameter is. place: the part's place in the parameter."""
    stacked, inner = place[: source.num_stacked], place[source.num_stacked :]
    runs = list(source.runs(range(inner[-1].start, inner[-1].stop)))
    for index in np.ndindex(*value.shape[: source.num_stacked]):
        name = source.at([span.start + n for span, n in zip(stacked, index, strict=True)])
        for run, own in runs:
            slices, part = (*inner[:-1], run), value[index][..., own]
            yield name, tuple(source.turned(slices, slice(0, 1))), source.tensor_part(part)
