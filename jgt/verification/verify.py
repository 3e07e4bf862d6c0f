"""`verify`: does a layout change the numbers? The rewritten program on a mesh against the plain function on one device.

A layout says where numbers are computed, never which. That rests on the rules' rewriting, on schedules and exchanges, and on XLA's
partitioner, which has had faults (docs/partitioner.md). `verify` trusts none of them: it runs both programs on the same arrays and
compares every result, every gradient and, with an optimizer, the parameters and the state after an update.

Results and gradients come from the program as it would run. Only if one differs, both programs run again with taps (`taps.py`), which find
the first value that differs, or else the first cotangent.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgt.document import InputError
from jgt.partitioner import Avoided, avoided_faults
from jgt.pipeline.config import Pipeline
from jgt.program import jaxpr as jx
from jgt.rules import match_out, match_tensor
from jgt.sharding.arguments import Arguments
from jgt.sharding.call import PlannedCall
from jgt.sharding.checks import RulesLike
from jgt.sharding.inputs import StateArguments
from jgt.sharding.paths import named_leaves, path_text
from jgt.sharding.shard import Sharded
from jgt.verification.taps import Site, sites_of, tapped

TOLERANCE = 1e-4
"""Of the largest number of an array. Sums in another order differ by less, wrong layouts by half of it and more."""
_SMALLEST = 1e-3
"""An array whose numbers are below this share of the largest array's is compared with that share: it may be zero but for rounding."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An array that the layout changes. what: its name; error: the largest difference, as a share of its largest number."""

    what: str
    error: float


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What a comparison found.

    first: the first value or cotangent that differs, with the line of its rule; empty if there is none or a pipeline runs the program.
    num_compared: results, gradients and arrays of an update. largest: the largest error. avoided: operations that XLA would have computed
    wrongly.
    """

    differences: tuple[Difference, ...]
    first: str
    num_compared: int
    largest: float
    avoided: tuple[Avoided, ...]
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether the layout changes no number."""
        return not self.differences

    def __str__(self) -> str:
        if self.is_right:
            more = f". {len(self.avoided)} operations have another layout, because XLA would compute them wrongly" if self.avoided else ""
            return f"The layout changes no number: {self.num_compared} arrays are equal to {self.largest:.0e}{more}"
        lines = [f"The layout changes the numbers: {len(self.differences)} of {self.num_compared} arrays differ"]
        lines += [
            f"  {difference.what}: off by {difference.error:.2g} of its largest number" for difference in self.differences[:_MOST_SHOWN]
        ]
        if len(self.differences) > _MOST_SHOWN:
            lines.append(f"  and {len(self.differences) - _MOST_SHOWN} more")
        return "\n".join([*lines, *([f"The first difference: {self.first}"] if self.first else [])])


_MOST_SHOWN = 8


def verify(
    fn: Callable[..., Any],
    rules: RulesLike,
    mesh: Mesh,
    *args: Any,
    optimizer: Any = None,
    tolerance: float = TOLERANCE,
    partial: bool = False,
    pipeline: Pipeline | None = None,
    state: StateArguments = None,
    pad: bool = False,
    **kwargs: Any,
) -> Verification:
    """Compares `jgt.shard(fn, rules, mesh)` with `fn`: results, gradients, and an update by `optimizer` (of optax) if there is one.

    The arguments are those of a call, preferably small; random numbers stand for ShapeDtypeStructs. mesh: of real devices; virtual CPU
    devices will do. tolerance: the largest difference, as a share of an array's largest number. A function that draws random numbers in a
    pipeline cannot be compared, because each microbatch has a key of its own there.

    Raises InputError as a call does, and for a mesh without devices.
    """
    sharded = Sharded(fn, rules, mesh, partial=partial, pipeline=pipeline, state=state, pad=pad)
    return verify_sharded(sharded, *args, optimizer=optimizer, tolerance=tolerance, **kwargs)


def verify_sharded(
    sharded: Sharded[..., Any], *args: Any, optimizer: Any = None, tolerance: float = TOLERANCE, **kwargs: Any
) -> Verification:
    """`verify` for a function that is sharded already. Raises InputError."""
    started = time.perf_counter()
    arguments, planned = sharded.planned(*args, **kwargs)
    mesh = planned.placement.mesh
    if not isinstance(mesh, Mesh):
        raise InputError(["verify: the mesh has no devices to compute on. Make it with jgt.make_mesh"])
    comparison = _Comparison(arguments, planned, mesh)
    with avoided_faults() as avoided:
        expected, found = comparison.results()
        if optimizer is not None:
            new = comparison.updates(optimizer, expected)
            expected, found = expected | new[0], found | new[1]
    errors = _errors(expected, found)
    differences = tuple(Difference(what=what, error=error) for what, error in errors.items() if not error <= tolerance)
    return Verification(
        differences=differences,
        first=comparison.first_difference(tolerance) if differences else "",
        num_compared=len(errors),
        largest=max(errors.values(), default=0.0),
        avoided=tuple(dict.fromkeys(avoided)),
        seconds=time.perf_counter() - started,
    )


_Arrays = Sequence[Any]
_Named = Mapping[str, Any]


def _errors(expected: _Named, found: _Named) -> dict[str, float]:
    """The largest difference of each array, as a share of its largest number; infinite where one has NaN and the other has none."""
    sizes = {name: float(np.max(np.abs(x), initial=0.0)) for name, x in expected.items()}
    finite = [size for size in sizes.values() if np.isfinite(size)]
    smallest = _SMALLEST * max(finite, default=0.0)

    def error(name: str) -> float:
        a, b = (np.asarray(arrays[name], np.float64) for arrays in (expected, found))
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return float("inf")
        finite = np.isfinite(a)
        difference = np.max(np.abs(a[finite] - b[finite]), initial=0.0)
        return float(difference / (max(sizes[name], smallest) or 1.0))

    return {name: error(name) for name in expected}


def _in_order(sites: Sequence[Site], values: Mapping[Site, Any]) -> list[tuple[Site, Any]]:
    """The sites in the order of a forward pass, each with an index into its values: all of a loop's first step, then of its second."""
    first = {site.loop: position for position, site in reversed(list(enumerate(sites)))}
    found: list[tuple[tuple[int, int, int], Site, Any]] = []
    for position, site in enumerate(sites):
        steps = range(len(values[site])) if site.loop else (...,)
        found += [((first[site.loop] if site.loop else position, step if site.loop else 0, position), site, step) for step in steps]
    return [(site, step) for _, site, step in sorted(found, key=lambda entry: entry[0])]


class _Comparison:
    """Two programs on the same arrays: plain on the first device of a mesh, and rewritten on all of it."""

    def __init__(self, arguments: Arguments, planned: PlannedCall, mesh: Mesh):
        self._planned, self._mesh, self._rules = planned, mesh, planned.placement.rules
        self._arrays = [_filled(x, n) for n, x in enumerate(arguments.arrays)]
        self._parameters = planned.placement.parameters
        self._real = [n for n in range(len(self._parameters)) if jnp.issubdtype(self._arrays[n].dtype, jnp.floating)]
        paths = [path_text(path) for path, _ in named_leaves(jax.tree.unflatten(planned.out_tree, range(planned.out_tree.num_leaves)))[0]]
        self._names = [f"result {path}".rstrip() for path in paths] + [f"new value of argument {n}" for n in planned.changed]

    def results(self) -> tuple[_Named, _Named]:
        """The results and gradients of both programs, by name."""
        plain = self._on(self._device, lambda arrays: self._with_gradients(lambda x: jx.evaluate(self._planned.program, x), arrays))
        sharded = self._on(self._whole, lambda arrays: self._with_gradients(self._planned.run, arrays))
        return plain, sharded

    def updates(self, optimizer: Any, expected: _Named) -> tuple[_Named, _Named]:
        """The parameters and the optimizer state after an update by the gradients of the plain program."""
        tree, places = self._planned.placement.tree, self._planned.placement
        if len(self._real) != tree.num_leaves:
            raise InputError(["verify: an update needs parameters that are all floating-point arrays. Leave out the optimizer"])
        gradients = jax.tree.unflatten(tree, [np.asarray(expected[self._gradient_of(n)]) for n in self._real])
        params = jax.tree.unflatten(tree, [np.asarray(x) for x in self._arrays[: len(self._real)]])

        def run(params: Any, gradients: Any) -> tuple[Any, Any]:
            updates, state = optimizer.update(gradients, optimizer.init(params), params)
            return jax.tree.map(lambda p, u: p + u, params, updates), state

        shapes = jax.eval_shape(run, params, gradients)
        layout = places.params, places.optimizer(shapes[1])
        plain = jax.jit(run)(*jax.device_put((params, gradients), self._device))
        # With the layouts of a step: parameters as they are stored, gradients like the optimizer state.
        sharded = jax.jit(run, in_shardings=(places.params, places.gradients), out_shardings=layout)(params, gradients)
        both = [{f"after an update: {path_text(path)}": x for path, x in named_leaves(one)[0]} for one in (plain, sharded)]
        return both[0], both[1]

    def first_difference(self, tolerance: float) -> str:
        """The first site whose value differs, or else the first of the backward pass whose cotangent does. In a pipeline there are none."""
        if self._planned.rewritten is None:
            return ""
        plain, sharded = self._taps(self._planned.program, self._device), self._taps(self._planned.rewritten, self._whole)
        for n, what in ((0, "value"), (1, "cotangent")):
            common = [site for site in plain[n] if site in sharded[n] and plain[n][site].shape == sharded[n][site].shape]
            steps = _in_order(common, plain[n])
            names = {f"{number}": (site, step) for number, (site, step) in enumerate(steps)}
            errors = _errors(*({name: one[n][site][step] for name, (site, step) in names.items()} for one in (plain, sharded)))
            wrong = [name for name in (errors if n == 0 else reversed(errors)) if not errors[name] <= tolerance]
            if wrong:
                site, step = names[wrong[0]]
                rule = self._rule_of(site, plain[n][site].ndim, backward=n == 1)
                where = f", step {step} of its loop," if site.loop else ""
                return f"the {what} of {site}{rule}{where} is off by {errors[wrong[0]]:.2g}"
        return ""

    def _taps(self, program: Any, where: Any) -> tuple[dict[Site, Any], dict[Site, Any]]:
        """The values and the cotangents at the sites of a program, in order."""
        sites = sites_of(program)
        shapes = jax.eval_shape(lambda arrays: tapped(program, sites, arrays)[1], self._arrays)

        def run(arrays: _Arrays) -> tuple[dict[Site, Any], dict[Site, Any]]:
            def results(probes: Mapping[Site, Any]) -> tuple[list[Any], dict[Site, Any]]:
                results, taps = tapped(program, sites, arrays, probes)
                return [results[n] for n in self._weighed(results)], taps

            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            outputs, pull, taps = jax.vjp(results, zeros, has_aux=True)
            return taps, pull([_noise(x.shape, x.dtype, n) for n, x in enumerate(outputs)])[0]

        values, cotangents = self._on(where, run)
        order = [site for site in sites.values() if site in values]
        return {site: values[site] for site in order}, {site: cotangents[site] for site in order}

    def _with_gradients(self, run: Callable[[_Arrays], Sequence[Any]], arrays: _Arrays) -> dict[str, Any]:
        def of_parameters(real: _Arrays) -> tuple[list[Any], Sequence[Any]]:
            given = list(arrays)
            for n, x in zip(self._real, real, strict=True):
                given[n] = x
            results = run(given)
            return [results[n] for n in self._weighed(results)], results

        outputs, pull, results = jax.vjp(of_parameters, [arrays[n] for n in self._real], has_aux=True)
        gradients = pull([_noise(x.shape, x.dtype, n) for n, x in enumerate(outputs)])[0]
        named = {name: x for name, x in zip(self._names, results, strict=True) if not jnp.issubdtype(x.dtype, jax.dtypes.extended)}
        return named | {self._gradient_of(n): x for n, x in zip(self._real, gradients, strict=True)}

    def _weighed(self, results: Sequence[Any]) -> list[int]:
        """The numbers of the results that are differentiated."""
        real = [n for n, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.floating)]
        # In a pipeline, only the first result has a gradient.
        return real if self._planned.rewritten is not None else real[:1]

    def _gradient_of(self, number: int) -> str:
        place = self._parameters[number]
        used = f", used in {', '.join(place.signals)}" if place.signals else ""
        return f"gradient of {place.path or 'the parameter'} {list(place.shape)} {place.spec}{used}"

    def _rule_of(self, site: Site, rank: int, *, backward: bool) -> str:
        # A scan has stacked the values of its layers.
        for back, r in itertools.product(dict.fromkeys((backward, False)), (rank, rank - 1)):
            if site.tensor:
                match = match_tensor(self._rules, site.tensor, site.signal, r, backward=back)
            else:
                match = match_out(self._rules, site.signal, r, backward=back)
            if match.rule is not None:
                return f" ({match.rule.where})"
        return ""

    @property
    def _device(self) -> Any:
        return jax.sharding.SingleDeviceSharding(self._mesh.devices.flat[0])

    @property
    def _whole(self) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec())

    def _on(self, where: Any, run: Callable[[_Arrays], Any]) -> Any:
        return jax.jit(run)(jax.device_put(self._arrays, where))


def _filled(x: Any, number: int) -> Any:
    """An array; for a shape, random numbers."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.full((*x.shape, 2), number, jnp.uint32)) if x.shape else jax.random.key(number)
    return _noise(x.shape, x.dtype, number) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(x.shape, x.dtype)


def _noise(shape: tuple[int, ...], dtype: Any, number: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(number).standard_normal(shape, np.float32), dtype)
