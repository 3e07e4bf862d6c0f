"""Results of the layer scan that come from neither parameters nor the batch, taken out of it.

A scan over layers may return more than activations: the next random key of each layer, or the count of a random stream. Such values
cannot be added up over microbatches, and need not be: no microbatch knows more about them than the whole batch does. So the
scan is divided. A second scan, of only the steps that these results need, computes them beside the pipeline, once a step and from the keys
as they were passed in. The layer scan keeps its own copies, because the layers may read them.

    (x, key), counts = scan(layer, (x, key), (weights, counts))
    becomes
    key, counts = scan(the key's and the counts' own steps, key, counts)
    (x, _), _   = scan(layer, (x, key), (weights, counts))
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from jgt.program import jaxpr as jx
from jgt.program.dataflow import live
from jgt.program.equations import subprograms
from jgt.program.jaxpr import Equation, Var
from jgt.program.parts import Flat, dependency_bits


def peeled(flat: Flat, layers: int, sources: Collection[int]) -> tuple[Flat, int]:
    """The program whose equation number `layers` is its layer scan, divided, and the number of that scan in it.

    sources: the numbers of the program's arguments that are parameters or have rows.
    """
    scan = flat.eqns[layers]
    bound = dependency_bits(flat, {flat.invars[n]: 1 for n in sources})

    def is_free(result: Var) -> bool:
        return not any(jx.is_var(a) and bound.get(a) for a in _scan_for(scan, [result]).invars)

    wanted = [result for result in scan.outvars if not jx.is_dropped(result) and is_free(result)]
    if not wanted:
        return flat, layers
    own = _scan_for(scan, wanted)
    # What the second scan carries, it computes too.
    rest = scan.replace(outvars=[jx.new_var_like(v) if v in own.outvars else v for v in scan.outvars])
    return replace(flat, eqns=(*flat.eqns[:layers], own, rest, *flat.eqns[layers + 1 :])), layers + 1


def _scan_for(scan: Equation, results: Sequence[Var]) -> Equation:
    """The scan with only the steps that these results need, in this turn of the loop or in later ones."""
    operands = dict.fromkeys(a for a in scan.invars if jx.is_var(a))
    (body,) = subprograms(scan)
    (needed,) = jx.body(live(jx.program_of(body, [*operands], [scan], results))).eqns
    return needed
