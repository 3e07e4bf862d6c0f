"""`verify`: does a layout change the numbers? The rewritten program on a mesh against the plain function on one device.

A layout says where numbers are computed, never which. That rests on the rules' rewriting, on schedules and exchanges, and on XLA's
partitioner, which has had faults (docs/partitioner.md). `verify` trusts none of them: it runs both programs on the same arrays and
compares every result, every gradient and, with an optimizer, the parameters and the state after an update.

Results and gradients come from the program as it would run. The plain program is compiled, which is quick, and may be wrong itself. So a
difference counts only if the plain program differs operation by operation, too (`reference.py`). That both compiled programs are
wrong and equal is not noticed: `verify_jit` compares with operations alone. If something differs, both programs run again and return
the values at their sites (`taps.py`). The message names the first value that differs, or else the first cotangent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax
from jax.sharding import Mesh

from jgt.api.comparison import Comparison
from jgt.api.reference import NamedArrays, errors_of, numbers_of
from jgt.api.shard import shard
from jgt.document import InputError
from jgt.program.places import no_mesh_set
from jgt.sharding.checks import RulesLike
from jgt.sharding.inputs import StateArguments
from jgt.sharding.partitioner import Avoided, avoided_faults
from jgt.sharding.sharded import Sharded
from jgt.sharding.staged import Staging

TOLERANCE = 1e-4
"""The largest difference, as a share of an array's largest number. Sums in another order differ by less, wrong layouts by half and more."""
_MOST_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An array that the layout changes.

    what: the array's name. error: the largest difference, as a share of its largest number. expected, found: the two numbers there.
    """

    what: str
    error: float
    expected: float
    found: float

    @classmethod
    def of(cls, what: str, error: float, expected: jax.Array, found: jax.Array) -> Self:
        """A difference between two arrays."""
        numbers = numbers_of(expected, found)
        return cls(what=what, error=error, expected=numbers[0], found=numbers[1])

    def __str__(self) -> str:
        return f"{self.what}: off by {self.error:.2g} of its largest number: {self.found:.4g} instead of {self.expected:.4g}"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of a comparison, by `verify` or `verify_jit`.

    differences: the arrays that differ by more than the tolerance.
    first: the first value or cotangent that differs, with the line of its rule; empty if there is none or a pipeline runs the program.
    num_compared: the number of results, gradients and arrays of an update.
    largest: the largest error.
    avoided: the operations that XLA would have computed wrongly.
    seconds: the time that the comparison took.
    left_out: what was not compared, and why.
    """

    differences: tuple[Difference, ...]
    first: str
    num_compared: int
    largest: float
    avoided: tuple[Avoided, ...]
    seconds: float
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        sharded: Sharded[..., Any],
        *args: object,
        optimizer: Any = None,
        plain_optimizer: Any = None,
        tolerance: float = TOLERANCE,
        **kwargs: object,
    ) -> Self:
        """`verify` for a function that is sharded already. plain_optimizer: `optimizer` without a mesh. Raises InputError."""
        started = time.perf_counter()
        arguments, planned = sharded.planned(*args, **kwargs)
        mesh = planned.placement.mesh
        if not isinstance(mesh, Mesh):
            raise InputError(["verify: the mesh has no devices to compute on. Make it with jgt.make_mesh"])
        comparison = Comparison(arguments, planned, mesh)
        errors, wrong, first = dict[str, float](), list[str](), ""
        expected, found = NamedArrays(), NamedArrays()
        # The plain program runs on one device, whatever mesh is set.
        with no_mesh_set(), avoided_faults() as avoided:
            for draw in comparison.draws:
                expected, found = comparison.results(draw)
                new, wrong = errors_of(expected, found), list[str]()
                if not all(error <= tolerance for error in new.values()):
                    expected, new, wrong = comparison.confirmed(found, tolerance)
                errors |= {name: max(error, errors.get(name, 0.0)) for name, error in new.items()}
                if wrong:
                    break
            if optimizer is not None:
                one, many = comparison.updates(optimizer, plain_optimizer or optimizer, expected)
                expected, found, new = expected | one, found | many, errors_of(one, many)
                errors, wrong = errors | new, [*wrong, *(name for name, error in new.items() if not error <= tolerance)]
            if wrong:
                first = comparison.first_difference(tolerance)
        return cls(
            differences=tuple(Difference.of(what, errors[what], expected[what], found[what]) for what in wrong),
            first=first,
            num_compared=len(errors),
            largest=max(errors.values(), default=0.0),
            avoided=tuple(dict.fromkeys(avoided)),
            seconds=time.perf_counter() - started,
        )

    @property
    def is_right(self) -> bool:
        """Whether the layout changes no number."""
        return not self.differences

    def __str__(self) -> str:
        left_out = "".join(f"\nNot compared: {what}" for what in self.left_out)
        if self.is_right:
            more = f". {len(self.avoided)} operations have another layout or form, as XLA computes them wrongly" if self.avoided else ""
            return f"The layout changes no number: {self.num_compared} arrays are equal to {self.largest:.0e}{more}{left_out}"
        lines = [f"  {difference}" for difference in self.differences]
        if (num_hidden := len(lines) - _MOST_SHOWN) > 0:
            lines[_MOST_SHOWN:] = [f"  and {num_hidden} more"]
        lines += [f"The first difference: {self.first}"] if self.first else []
        return (
            "\n".join([f"The layout changes the numbers: {len(self.differences)} of {self.num_compared} arrays differ", *lines]) + left_out
        )


def verify(
    fn: Callable[..., object],
    rules: RulesLike,
    mesh: Mesh,
    *args: object,
    optimizer: Any = None,
    tolerance: float = TOLERANCE,
    partial: bool = False,
    pipeline: Staging | None = None,
    state: StateArguments = None,
    pad: bool = False,
    **kwargs: object,
) -> Verification:
    """Compares `jgt.shard(fn, rules, mesh)` with `fn`: results, gradients, and an update by `optimizer` if there is one.

        found = jgt.verify(loss, rules, mesh, params, batch, optimizer=optax.adam(1e-3))
        assert found.is_right, str(found)

    mesh: a mesh of real devices; virtual CPU devices will do.
    args, kwargs: as for a call, preferably small; random numbers replace ShapeDtypeStructs.
    optimizer: one of optax.
    tolerance: the largest difference, as a share of an array's largest number.
    rules, partial, pipeline, state, pad: as for `shard`. A function that draws random numbers in a pipeline cannot be compared, because
    each microbatch has its own key there.

    Raises InputError as a call does, and for a mesh without devices.
    """
    sharded = shard(fn, rules, mesh, partial=partial, pipeline=pipeline, state=state, pad=pad)
    return Verification.of(sharded, *args, optimizer=optimizer, tolerance=tolerance, **kwargs)
