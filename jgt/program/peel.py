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

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Equation, Var
from jgt.program.parts import Flat, Part, dependency_bits, extract_part, flatten, inlined


@dataclass(frozen=True, kw_only=True)
class _Loop:
    """The body of a scan, flat. Its arguments are constants, then what it carries, then what it scans over."""

    flat: Flat
    num_consts: int
    num_carry: int

    @property
    def carried(self) -> tuple[Var, ...]:
        return self.flat.invars[self.num_consts : self.num_consts + self.num_carry]


def peeled(flat: Flat, layers: int, sources: Collection[int]) -> tuple[Flat, int]:
    """The program whose equation number `layers` is its layer scan, divided, and the number of that scan in it.

    sources: the numbers of the program's arguments that are parameters or have rows.
    """
    scan = flat.eqns[layers]
    (program,) = jx.subprograms(scan)
    num_consts, num_carry = jx.scan_sizes(scan)
    loop = _Loop(flat=flatten(program, lambda e: jx.is_call(e) or jx.is_remat(e)), num_consts=num_consts, num_carry=num_carry)
    outside = dependency_bits(flat, {flat.invars[n]: 1 for n in sources})
    free = _free_results(loop, [jx.is_var(a) and bool(outside.get(a)) for a in scan.invars])
    wanted = [n for n in free if not jx.is_dropped(scan.outvars[n])]
    if not wanted:
        return flat, layers
    own, results = _own_scan(scan, loop, wanted)
    rest = scan.replace(outvars=[jx.new_var_like(v) if n in results else v for n, v in enumerate(scan.outvars)])
    return replace(flat, eqns=(*flat.eqns[:layers], *own, rest, *flat.eqns[layers + 1 :])), layers + len(own)


def _free_results(loop: _Loop, is_bound: Sequence[bool]) -> list[int]:
    """The numbers of the body's results that no bound argument reaches, also not by way of the next turns of the loop."""
    bound = {var for var, is_source in zip(loop.flat.invars, is_bound, strict=True) if is_source}
    while True:
        reached = dependency_bits(loop.flat, dict.fromkeys(bound, 1))
        results = [jx.is_var(a) and bool(reached.get(a)) for a in loop.flat.outvars]
        carried = {var for var, is_reached in zip(loop.carried, results, strict=False) if is_reached}
        if carried <= bound:
            return [n for n, is_reached in enumerate(results) if not is_reached]
        bound |= carried


def _own_scan(scan: Equation, loop: _Loop, wanted: Sequence[int]) -> tuple[list[Equation], set[int]]:
    """The equations of a scan that computes these results, and the numbers of all results that it computes."""
    flat, first, last = loop.flat, loop.num_consts, loop.num_consts + loop.num_carry
    results = sorted(wanted)
    while True:
        part = extract_part(flat, [flat.outvars[n] for n in results])
        # The part has to compute what it carries, too.
        carried = [n for n, var in enumerate(loop.carried) if var in part.inputs or n in results]
        more = sorted({*results, *carried})
        if more == results:
            break
        results = more
    positions = {var: n for n, var in enumerate(flat.invars)}
    reads = [positions[var] for var in part.inputs]
    constants, scanned = [n for n in reads if n < first], [n for n in reads if n >= last]
    operands = [scan.invars[n] for n in (*constants, *(first + n for n in carried), *scanned)]
    run = _runner(scan, part, reads, constants, [first + n for n in carried], scanned)
    program = jx.trace(run, *[a.aval for a in operands])[0]
    outvars = [scan.outvars[n] for n in results]
    return inlined(program, scan, operands, outvars), set(results)


def _runner(
    scan: Equation, part: Part, reads: Sequence[int], constants: Sequence[int], carried: Sequence[int], scanned: Sequence[int]
) -> Callable[..., Any]:
    def run(*operands: jax.Array) -> list[jax.Array]:
        fixed = dict(zip(constants, operands, strict=False))
        start, end = len(constants), len(constants) + len(carried)

        def step(carry: list[jax.Array], xs: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            known: Mapping[int, jax.Array] = {**fixed, **dict(zip(carried, carry, strict=True)), **dict(zip(scanned, xs, strict=True))}
            after = part([known[n] for n in reads])
            return after[: len(carry)], after[len(carry) :]

        carry, ys = jax.lax.scan(step, list(operands[start:end]), list(operands[end:]), length=scan.params["length"])
        return [*carry, *ys]

    return run
