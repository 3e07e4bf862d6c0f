# pyright: basic
"""A program evaluated equation by equation, with the value of each.

Outside of a jit, each operation is compiled alone and runs on one device: no pass of XLA sees two of them, and nothing is partitioned. This
is the judge of what compiled programs compute, because a whole program that is compiled for one device may be wrong, too
(openxla/xla#49176). Inside a jit, the same evaluation returns what the compiled program has computed for each equation.

Calls, recomputed regions and scans are entered; outside of a jit also custom derivatives, the branches of a cond and the body of a while
loop. The equations of the last two have no values here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jgt.program import jaxpr as jx
from jgt.program.equations import is_call, is_remat, is_scan, scan_sizes, subprograms
from jgt.program.jaxpr import Equation, Program, Var
from jgt.program.places import Place, place_of, results_of

Path = tuple[int, ...]
"""The number of an equation in its program, behind the numbers of the equations around it."""

Result = tuple[Path, int]
"""The number of a result of an equation."""

_MOVING = (
    "abs argmax argmin broadcast_in_dim clamp concatenate convert_element_type copy copy_p cummax cummin dynamic_slice "
    "dynamic_update_slice expand_dims gather imag is_finite max min name neg optimization_barrier pad pmax pmin real reduce_max "
    "reduce_min reduce_precision reshape rev scatter select_and_gather_add select_n sign slice sort split squeeze stop_gradient "
    "tile top_k transpose"
)
_MOVES = frozenset(_MOVING.split())
"""Operations whose results are numbers of their operands, or that do not round."""
_LAYOUTS = ("sharding_constraint", "layout_constraint", "reshard")
_ENTERED = ("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


@dataclass(kw_only=True)
class Evaluation:
    """One evaluation of a program.

    is_eager: whether it is outside of a jit. keeps: whether `values` gets the results of all equations. noise: changes the result of each
    operation that rounds by a unit in its last place, up or down at random: what this changes is what rounding may change. probes: arrays
    that are added to results, inside a jit.
    """

    is_eager: bool
    keeps: bool = False
    noise: np.random.Generator | None = None
    probes: Mapping[Result, jax.Array] = field(default_factory=dict)
    values: dict[Path, list[jax.Array]] = field(default_factory=dict)

    def run(self, program: Program, args: Sequence[jax.Array], path: Path = ()) -> list[jax.Array]:
        """The results of a program. A value in a scan has a leading dim for each scan around it."""
        inner = jx.body(program)
        constants = {var: local(x) if self.is_eager else x for var, x in jx.constants(program).items()}
        known: dict[Var, Any] = {**constants, **dict(zip(inner.invars, args, strict=True))}
        made: dict[Var, tuple[Path, int]] = {}
        for number, equation in enumerate(inner.eqns):
            here = (*path, number)
            operands = [known[atom] if jx.is_var(atom) else atom.val for atom in equation.invars]
            results = self._probed(here, self._results(equation, operands, here))
            known.update(zip(equation.outvars, results, strict=True))
            if self.keeps and not is_layout(equation):
                self.values[here] = results
                made.update((var, (here, n)) for n, var in enumerate(equation.outvars))
            elif is_layout(equation) and jx.is_var(var := equation.invars[0]) and (origin := made.get(var)) is not None:
                # The value has the layout of its constraint only if nothing else reads what the constraint reads.
                self.values[origin[0]][origin[1]] = results[0]
                made[equation.outvars[0]] = origin
        return [known[atom] if jx.is_var(atom) else atom.val for atom in inner.outvars]

    def _results(self, equation: Equation, operands: Sequence[jax.Array], here: Path) -> Sequence[jax.Array]:
        if is_scan(equation) and equation.params["length"]:
            return self._scan(equation, operands, here)
        # Inside a jit, what has a derivative of its own keeps it.
        if is_call(equation) or is_remat(equation) or (self.is_eager and equation.primitive.name in _ENTERED):
            return self.run(next(iter(subprograms(equation))), operands, here)
        if not self.is_eager:
            return results_of(equation, operands)
        if is_layout(equation):
            return operands[:1]
        if equation.primitive.name in ("cond", "while"):
            return self._branch_or_loop(equation, operands)
        return [self._rounded(equation, x) for x in _alone(equation, operands)]

    def _probed(self, here: Path, results: Sequence[jax.Array]) -> list[jax.Array]:
        return [x + self.probes[here, n] if (here, n) in self.probes else x for n, x in enumerate(results)]

    def _scan(self, equation: Equation, operands: Sequence[jax.Array], here: Path) -> list[jax.Array]:
        body, (num_constants, num_carried) = equation.params["jaxpr"], scan_sizes(equation)
        first = num_constants + num_carried

        def step(carried: Any, items: Any) -> Any:
            scanned, probes = items
            inside = replace(self, values={}, probes=probes)
            results = inside.run(body, [*operands[:num_constants], *carried, *scanned], here)
            return results[:num_carried], (results[num_carried:], inside.values)

        loop: Callable[..., Any] = _steps if self.is_eager else jax.lax.scan
        options = {"length": equation.params["length"], "reverse": equation.params["reverse"]}
        probes = {result: x for result, x in self.probes.items() if result[0][: len(here)] == here and result[0] != here}
        carried, (scanned, values) = loop(step, list(operands[num_constants:first]), (list(operands[first:]), probes), **options)
        self.values |= values
        return [*carried, *scanned]

    def _branch_or_loop(self, equation: Equation, operands: Sequence[jax.Array]) -> list[jax.Array]:
        inside = replace(self, keeps=False)
        if equation.primitive.name == "cond":
            branches = equation.params["branches"]
            return inside.run(branches[min(max(int(operands[0]), 0), len(branches) - 1)], operands[1:])
        num_condition, num_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        condition, fixed = operands[:num_condition], operands[num_condition : num_condition + num_body]
        carried = list(operands[num_condition + num_body :])
        while inside.run(equation.params["cond_jaxpr"], [*condition, *carried])[0]:
            carried = inside.run(equation.params["body_jaxpr"], [*fixed, *carried])
        return carried

    def _rounded(self, equation: Equation, x: jax.Array) -> jax.Array:
        if self.noise is None or equation.primitive.name in _MOVES or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return with_noise(x, self.noise)


def values_inside(program: Program, args: Sequence[jax.Array]) -> dict[Path, list[jax.Array]]:
    """The values of all equations of a program inside a jit."""
    evaluation = Evaluation(is_eager=False, keeps=True)
    evaluation.run(program, args)
    return evaluation.values


def with_noise(x: jax.Array, noise: np.random.Generator) -> jax.Array:
    """A floating array with each number changed by a unit in its last place, up or down. Small whole numbers stay: they are exact."""
    info, old = jnp.finfo(x.dtype), np.asarray(x, np.float64)
    exact = (old == np.rint(old)) & (np.abs(old) < 2.0 ** (info.nmant - 3))
    # Infinite numbers stay infinite, and the largest may become so.
    with np.errstate(all="ignore"):
        new = np.where(exact, old, old * (1 + float(info.eps) * noise.choice([-1.0, 1.0], old.shape)))
        return jnp.asarray(new.astype(x.dtype))


def _steps(step: Callable[..., Any], carried: Any, scanned: Any, *, length: int, reverse: bool) -> Any:
    """lax.scan as a loop of Python."""
    results = [None] * length
    for number in reversed(range(length)) if reverse else range(length):
        carried, results[number] = step(carried, jax.tree.map(lambda x, number=number: x[number], scanned))
    return carried, jax.tree.map(lambda *xs: jnp.stack(xs), *results)


def _alone(equation: Equation, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The results of one operation on one device."""
    primitive = equation.primitive
    if primitive.name == "shard_map":
        # It is made of what each device does, so it runs on its mesh.
        return [local(x) for x in jax.jit(lambda xs: results_of(equation, xs))([np.asarray(x) for x in operands])]
    params = {key: None if key in ("sharding", "out_sharding") else value for key, value in equation.params.items()}
    # Without the equation's context, which names the mesh.
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return results if primitive.multiple_results else [results]


def local(x: ArrayLike) -> jax.Array:
    """An array on one device, JAX's default one, wherever it is."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(np.asarray(jax.random.key_data(x))), impl=jax.random.key_impl(x))
    return jnp.asarray(np.asarray(x))


def is_layout(equation: Equation) -> bool:
    """Whether an equation says where a value is, and changes no number."""
    return equation.primitive.name in _LAYOUTS


def all_equations(program: Program) -> Iterator[Equation]:
    """Every equation of a program and of those inside its equations."""
    for equation in jx.body(program).eqns:
        yield equation
        for part in subprograms(equation):
            yield from all_equations(part)


def equations_at(program: Program, path: Path) -> Iterator[tuple[Equation, Place]]:
    """The equations on the way to the one with this path, which is the last, each with its place."""
    around = Place()
    for number in path:
        equation = jx.body(program).eqns[number]
        around = place_of(equation, around)
        yield equation, around
        program = next(itertools.chain(subprograms(equation), [program]))


def whole_call(program: Program) -> tuple[Program, list[jax.sharding.Sharding | None], list[jax.sharding.Sharding | None]] | None:
    """The content of a program that is nothing but one call of a jit, with the shardings of its arguments and of its results."""
    inner = jx.body(program)
    equation = inner.eqns[0] if len(inner.eqns) == 1 else None
    if equation is None or not is_call(equation) or list(equation.invars) != list(inner.invars):
        return None
    if list(equation.outvars) != list(inner.outvars):
        return None
    given = (equation.params["in_shardings"], equation.params["out_shardings"])
    shardings = [[s if isinstance(s, jax.sharding.Sharding) else None for s in each] for each in given]
    return equation.params["jaxpr"], shardings[0], shardings[1]
