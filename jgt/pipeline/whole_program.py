"""The program of the whole batch, which shows where its layers are, and what its microbatches must read and bring out.

Whatever depends on the whole batch has to cross the border of the pipeline as numbers without rows. The *frontier* is what the results need
and only the pipeline can compute, for example the sum of token losses: each must be a sum or mean over the batch, so that the microbatches'
values can be added up. The *statistics* are sums of inputs that rows are combined with again, for example the number of tokens in `losses /
num_tokens`: they are computed beforehand and handed to every microbatch. `jgt.pipeline.batch` says what is a sum or a mean (`Growth`). What
is neither is refused here, with the line of the user's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax

from jgt.pipeline.batch import Extent, Growth, needed_variables
from jgt.program import jaxpr as jx
from jgt.program.dataflow import random_draws
from jgt.program.equations import is_call, is_remat, is_scan, part_for, scan_sizes, subprograms
from jgt.program.jaxpr import Atom, Equation, Program, Var
from jgt.program.parts import Flat, Part, dependency_bits
from jgt.program.places import Place, place_of, source_of
from jgt.program.tracing import trace


class SplitError(Exception):
    """A pipeline cannot run the program. The message says why, without the file and line of the `pipeline:` section."""


def dissolves(signal: str) -> Callable[[Equation], bool]:
    """Which equations `flatten` replaces by their content, so that the layer scan is among the program's own equations."""

    def dissolve(equation: Equation) -> bool:
        # A checkpoint around the layers would recompute the whole pipeline: the pipeline has its own.
        return is_call(equation) or (is_remat(equation) and any(_scans(p, signal, equation) for p in subprograms(equation)))

    return dissolve


def _scans(program: Program, signal: str, within: Equation) -> bool:
    around = place_of(within, Place())
    for equation in jx.body(program).eqns:
        if is_scan(equation) and place_of(equation, around).path == signal:
            return True
        # A jit means the same as its content. A scan inside any other region cannot be reached by flattening.
        if any(_scans(p, signal, equation) for p in subprograms(equation) if is_call(equation)):
            return True
    return False


_REPEATED = "To run the same layers again, scan once over their stack repeated: jax.tree.map(lambda a: jnp.concatenate([a, a]), stack)"


def layer_scan(flat: Flat, signal: str) -> int:
    """The index of the longest scan under a signal. Raises SplitError if there is none, or several.

    Shorter ones are layers of another kind, such as the first ones of a mixture of experts, and run with the embedding or the head.
    """
    scans = [(i, place_of(e, Place()).path) for i, e in enumerate(flat.eqns) if is_scan(e)]
    lengths = {i: flat.eqns[i].params["length"] for i, path in scans if path == signal}
    found = [i for i, length in lengths.items() if length == max(lengths.values())]
    if len(found) == 1:
        return found[0]
    if len(found) > 1:
        raise SplitError(
            f"the signal {signal!r} contains {len(found)} scans of {lengths[found[0]]} layers, but a pipeline runs one. "
            f"Give each scan a signal of its own. {_REPEATED}"
        )
    if any(_scans(p, signal, e) for e in flat.eqns for p in subprograms(e)):
        raise SplitError(f"the layer scan under {signal!r} is in a loop or a branch, but a pipeline runs it once. {_REPEATED}")
    seen = sorted({place_of(e, Place()).path for e in flat.eqns} - {""})
    if any(path == signal or path.startswith(f"{signal}/") for path in seen):
        raise SplitError(
            f"the signal {signal!r} contains no layer scan. Stack the layers' parameters and run them with jax.lax.scan, "
            "nnx.scan or nn.scan directly under this signal"
        )
    others = ", ".join(repr(path) for _, path in scans) or "none"
    raise SplitError(f"no signal of the program is {signal!r}. Layer scans are under: {others}")


def forward(flat: Flat, layers: int) -> tuple[Flat, int]:
    """The program whose layer scan, equation number `layers`, runs forward, and its number.

    A scan in reverse is one forward over what it scans turned around, and what it stacks is turned around afterwards.
    """
    scan = flat.eqns[layers]
    if not scan.params["reverse"]:
        return flat, layers
    num_consts, num_carry = scan_sizes(scan)
    end = num_consts + num_carry
    before = [_turned(atom, scan) for atom in scan.invars[end:]]
    stacked = {var: jx.new_var_like(var) for var in scan.outvars[num_carry:] if not jx.is_dropped(var)}
    after = [_turned(inner, scan).replace(outvars=[var]) for var, inner in stacked.items()]
    new = scan.replace(
        invars=[*scan.invars[:end], *(equation.outvars[0] for equation in before)],
        outvars=[stacked.get(var, var) for var in scan.outvars],
        params=scan.params | {"reverse": False},
    )
    return replace(flat, eqns=(*flat.eqns[:layers], *before, new, *after, *flat.eqns[layers + 1 :])), layers + len(before)


def _turned(atom: Atom, scan: Equation) -> Equation:
    """The equation that turns an array [layers, ...] of a scan around."""
    program, _ = trace(partial(jax.lax.rev, dimensions=(0,)), atom.aval)
    (equation,) = jx.body(program).eqns
    return equation.replace(invars=[atom], outvars=[jx.new_var_like(equation.outvars[0])], source_info=scan.source_info)


PARAMS, DATA, LAYERS = 1, 2, 4
"""Bits that say on what a value depends: parameters, inputs of the batch, the layer scan."""


def argument_marks(flat: Flat, num_params: int) -> dict[Var, int]:
    """The bits of a program's arguments: parameters first, then inputs."""
    return dict.fromkeys(flat.invars[:num_params], PARAMS) | dict.fromkeys(flat.invars[num_params:], DATA)


class WholeProgram:
    """A program of parameters and inputs, with how its values grow with the batch; equation number `layers` is its layer scan."""

    def __init__(self, flat: Flat, growth: Growth, layers: int, num_params: int):
        self.flat, self.growth = flat, growth
        self.maker = {var: index for index, e in enumerate(flat.eqns) for var in e.outvars}
        """The index of the equation that makes each variable."""
        self._scan = flat.eqns[layers]
        self._marks = dependency_bits(flat, argument_marks(flat, num_params), {layers: LAYERS})

    def frontier(self) -> tuple[Var, ...]:
        """The values without rows that the results need and that only the pipeline can compute, in the whole program."""
        found: dict[Var, None] = {}
        pending = [a for a in self.flat.outvars if jx.is_var(a)]
        seen = set(pending)
        for index, atom in enumerate(self.flat.outvars):
            if self.growth.of(atom).rows:
                raise SplitError(
                    f"result {index} of the function has a row for each sequence of the batch. "
                    "A pipelined function returns sums and means over the batch"
                )
        while pending:
            var = pending.pop()
            bits = self._marks.get(var, 0)
            # Without parameters it is a value of inputs, and without inputs or layers one of parameters: both are computed outside.
            if not (bits & PARAMS and bits & (DATA | LAYERS)):
                continue
            equation = part_for(self.flat.eqns[self.maker[var]], {var})
            assert equation
            extent = self.growth.of(var)
            # Here rows end: the equation reads values with rows, or is the scan, and its result has none.
            if equation is self._scan or any(self.growth.of(a).rows for a in equation.invars):
                self._check(var, extent)
                found[var] = None
                continue
            for atom in equation.invars:
                if jx.is_var(atom) and atom not in seen:
                    seen.add(atom)
                    pending.append(atom)
        if not any(self._marks[v] & LAYERS for v in found):
            raise SplitError("no result of the function depends on its layers")
        # In the order of the program: the search meets the values in an order that means nothing.
        return tuple(sorted(found, key=lambda var: self.maker[var]))

    def _check(self, var: Var, extent: Extent) -> None:
        problem = extent.problem
        if not problem and extent.degree not in (0, 1):
            problem = f"it grows like the batch to the power of {extent.degree}"
        elif not problem and not extent.exact:
            problem = "it is a product, quotient or function of sums over the batch, taken inside a region or the layers"
        if problem:
            where = source_of(self.flat.eqns[self.maker[var]])
            place = f" at {where}" if where and not problem.startswith(where) else ""
            raise SplitError(
                f"a result depends on a value{place} that cannot be added up from microbatches: {problem}. "
                "If it is meant for one microbatch, name its signal under pipeline.per_microbatch"
            )

    def statistics(self, frontier: Sequence[Var]) -> tuple[Var, ...]:
        """Sums of inputs over the whole batch that rows are combined with: they must be known before microbatches run."""
        reached = needed_variables(self.flat, frontier)
        # A feed is a place where a number of the whole batch meets rows. It matters only if some result depends on it.
        found: dict[Var, None] = {}
        for feed in self.growth.feeds:
            if not any(var in reached for var in feed.equation.outvars):
                continue
            if feed.var not in self.maker or self._marks.get(feed.var, 0) & (PARAMS | LAYERS):
                raise SplitError(
                    f"{feed.source}: a value that is computed from the whole batch and the parameters is used for each of its rows again "
                    "(batch statistics), or decides what is done with them. "
                    "A microbatch does not have the whole batch; if the value is meant for one microbatch, "
                    "name its signal under pipeline.per_microbatch"
                )
            found[feed.var] = None
        return tuple(found)

    def check_draws(self, frontier: Sequence[Var], keys: Sequence[int]) -> None:
        """Raises SplitError if rows of random numbers are drawn from a constant key: each microbatch would draw the same."""
        reached = needed_variables(self.flat, frontier)
        # Draws that depend on a key among the arguments are fine: each microbatch folds its number into that key.
        from_keys = dependency_bits(self.flat, {self.flat.invars[index]: 1 for index in keys})
        for equation in self.flat.eqns:
            if not any(v in reached and not from_keys.get(v, 0) for v in equation.outvars):
                continue
            if any(self.growth.of(var).rows for var in random_draws(equation)):
                raise SplitError(
                    f"{source_of(equation)}: random numbers with a row for each sequence are drawn "
                    "from a key that is not an argument of the function: every microbatch would draw the same. "
                    "Pass the key as an argument, besides the parameters"
                )

    def check_parts(self, *parts: Part) -> None:
        """Raises SplitError if parts outside of the pipeline draw rows of random numbers: microbatches would draw others."""
        for part in parts:
            for equation in jx.body(part.program).eqns:
                if any(self.growth.of(var).rows for var in random_draws(equation)):
                    raise SplitError(
                        f"{source_of(equation)}: a sum of random numbers over the whole batch is needed "
                        "besides those that the microbatches draw, which differ. Draw them outside and pass them as an input"
                    )
