"""Results of a sharded function, joined from parts of its batch."""

from __future__ import annotations

from typing import Any

import jax

from jgt.batch import joined_results
from jgt.sharding.sharded import Sharded


def joined_results_of(function: Sharded[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The way in which each result, in the result's tree, is joined from parts of the batch. Raises InputError as a call does.

    The batch is the first dim of the first input that has dims.
    """
    arguments, planned = function.planned(*args, **kwargs)
    num_params = len(arguments.parameters)
    shapes = [() if one.is_state or one.is_key else one.x.shape for one in arguments.inputs]
    rows = next((shape[0] for shape in shapes if shape), 0)
    batched = [False] * num_params + [bool(shape) and shape[0] == rows for shape in shapes]
    larger = arguments.trace_rows(batched, 2 * rows, planned.changed)
    results = joined_results(planned.program, larger, ratio=2.0, num_params=num_params)
    return jax.tree.unflatten(planned.out_tree, results[: planned.out_tree.num_leaves])
