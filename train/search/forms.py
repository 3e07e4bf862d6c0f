"""What a step holds in memory, and what its kernels read and write: sizes of arrays, each times a number.

The sizes follow from the model's step and the layout. The numbers differ from model to model, and plans correct them (`parts.Sum`). Those
here are a guess for a model that nobody has planned: `benchmarks/fit.py` fits them to plans of twelve models on 8 to 768 GPUs.

Rows are those of the batch. With tensor parallelism a device has only a part of most arrays that a layer computes. A few are whole on each
device: those between two blocks of matmuls, or, if the rules split the sequence there, the copies that a block gathers.
"""

from __future__ import annotations

import numpy as np

from .columns import BYTES, KEPT, WIDE, Columns
from .parts import Numbers
from .step import Step

MEMORY = {
    "constant": 1.66,
    "weights": 8.25,
    "gradients": 1.21,
    "added": 0.75,
    "whole weights": 0.6,
    "whole gradients": 2.25,
    "input": 1.2,
    "input of stages": 0.88,
    "kept matmuls": 1.28,
    "kept whole": 0.77,
    "kept gathered": 0.07,
    "all kept gathered": 1.27,
    "kept for zb": 0.67,
    "again for zb": 0.34,
    "whole for zb": 0.14,
    "work": 51.0,
    "whole work": 1.21,
    "logits": 3.3,
}
"""How often a device holds arrays of the sizes of `held`; once where a name is missing."""
TRAFFIC = {
    "rows": 330.0,
    "whole rows": 26.0,
    "gathered rows": 38.0,
    "gathered rows of stages": 32.0,
    "kept rows": 123.0,
    "all kept": 67.0,
    "zb rows": 120.0,
    "zb whole rows": 56.0,
    "weights": 15.0,
    "weights of stages": 6.36,
    "update": 7.23,
}
"""How often memory-bound kernels read or write arrays of the sizes of `moved`."""
ROWS = {"rows", "kept rows", "all kept", "zb rows"}
"""What a model's kernels do with rows is the model's: attention without a fused kernel reads more of them than matmuls do."""
_WHOLE = 2.0
"""Of what a layer keeps, arrays of the input's size that tensor parallelism alone does not split (Korthikanti et al., arXiv 2205.05198)."""
_LOGITS = 2**30
"""The trainer computes logits in as many parts as make one of them at most this large."""


def state(step: Step, c: Columns) -> Numbers:
    """Bytes of parameters and optimizer state on a device."""
    return step.state_bytes / c.split / c.zero1 * c.uneven


def held(step: Step, c: Columns) -> dict[str, Numbers]:
    """Bytes of the kinds of arrays that a device has beside its state."""
    local, whole = step.parameters / c.split, step.parameters / c.model_split
    inputs, unit = step.layer_bytes * c.rows * c.in_flight / c.stages, step.layer_bytes / step.layers * c.rows
    rest = _WHOLE * inputs * (1 - 1 / c.tensor)
    kept = {f"kept {name}": np.where(c.remat == i, KEPT.get(name, 10.0) * inputs / c.tensor, 0) for i, name in enumerate(c.names)}
    kept |= {"kept whole": np.where(c.keeps & ~c.sequence, rest, 0), "kept gathered": np.where(c.keeps & c.sequence, rest, 0)}
    # The inputs of matmuls are copies that were gathered.
    kept["all kept gathered"] = np.where(c.all_kept & c.sequence, rest, 0)
    # A pass of its own for the gradients of weights reads what the layer has kept, and what was computed again must be kept for it.
    kept["kept for zb"] = np.where(c.zb, KEPT["none"] * inputs / c.tensor, 0)
    kept["again for zb"] = np.where(c.all_kept, 0, kept["kept for zb"])
    kept["whole for zb"] = np.where(c.zb, rest, 0)
    entering = np.where(c.sequence, inputs / c.tensor, inputs)
    return {
        "constant": np.full(len(inputs), 3e8),
        "weights": whole * c.stages / step.layers * BYTES,
        "gradients": np.where(c.whole, 0, local * WIDE),
        # Sums over the parts of a batch are there beside the gradients of a part.
        "added": np.where(c.whole | (c.parts == 1), 0, local * WIDE),
        "whole weights": np.where(c.whole, whole * BYTES, 0),
        "whole gradients": np.where(c.whole, whole * WIDE, 0),
        "input": np.where(c.stages == 1, entering, 0),
        "input of stages": np.where(c.stages > 1, entering, 0),
        "work": unit / c.tensor,
        "whole work": unit * (1 - 1 / c.tensor),
        "logits": np.minimum(step.model.logits_bytes * c.rows / c.tensor / c.stages, _LOGITS),
        **{name: sizes for name, sizes in kept.items() if sizes.any()},
    }


def moved(step: Step, c: Columns) -> dict[str, Numbers]:
    """Bytes of arrays that memory-bound kernels read and write in a step."""
    rows = step.layer_bytes * c.rows * c.parts / c.stages
    split, rest = rows / c.tensor, rows * (1 - 1 / c.tensor)
    # A loop over parts of the batch reads all weights in each, and adds to all gradients.
    weights = np.where(c.parts > 1, step.parameters * BYTES / c.model_split * c.parts, 0)
    return {
        "rows": split,
        "whole rows": np.where(c.sequence, 0, rest),
        "gathered rows": np.where(c.sequence & (c.stages == 1), rest, 0),
        "gathered rows of stages": np.where(c.sequence & (c.stages > 1), rest, 0),
        "kept rows": np.where(c.keeps & ~c.all_kept, split, 0),
        "all kept": np.where(c.all_kept, split, 0),
        "zb rows": np.where(c.zb, split, 0),
        "zb whole rows": np.where(c.zb, rest, 0),
        "weights": np.where(c.stages > 1, 0, weights),
        "weights of stages": np.where(c.stages > 1, weights, 0),
        "update": state(step, c),
    }
