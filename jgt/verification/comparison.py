"""The two programs of a comparison: plain on one device, and rewritten on a mesh, with the same arrays."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgt.document import InputError
from jgt.program import jaxpr as jx
from jgt.rules import match_out, match_tensor
from jgt.sharding.arguments import Arguments
from jgt.sharding.call import PlannedCall
from jgt.sharding.paths import named_leaves, path_text
from jgt.verification.taps import TapSite, sites_of, tapped

_SMALLEST = 1e-3
"""An array whose numbers are below this share of the largest array's is compared with that share: it may be zero but for rounding."""

_Arrays = Sequence[Any]
_Named = dict[str, Any]
"""_Arrays by what they are."""


def errors_of(expected: _Named, found: _Named) -> dict[str, float]:
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


def _in_order(sites: Sequence[TapSite], values: Mapping[TapSite, Any]) -> list[tuple[TapSite, Any]]:
    """The sites in the order of a forward pass, each with an index into its values: all of a loop's first step, then of its second."""
    first = {site.loop: position for position, site in reversed(list(enumerate(sites)))}
    found: list[tuple[tuple[int, int, int], TapSite, Any]] = []
    for position, site in enumerate(sites):
        if site.loop:
            found += [((first[site.loop], step, position), site, step) for step in range(len(values[site]))]
        else:
            found.append(((position, 0, position), site, ...))
    return [(site, step) for _, site, step in sorted(found, key=lambda entry: entry[0])]


class Comparison:
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
        plain = partial(jx.evaluate, self._planned.program)
        layouts = jax.tree.leaves(self._planned.placement.gradients)
        sharded = self._with_gradients(self._planned.run, [layouts[n] for n in self._real])
        return self._on(self._device, self._with_gradients(plain)), self._on(self._whole, sharded)

    def updates(self, optimizer: Any, plain_optimizer: Any, expected: _Named) -> tuple[_Named, _Named]:
        """The parameters and the optimizer state after an update by the gradients of the plain program."""
        tree, places = self._planned.placement.tree, self._planned.placement
        if len(self._real) != tree.num_leaves:
            raise InputError(["verify: an update needs parameters that are all floating-point arrays. Leave out the optimizer"])
        gradients = jax.tree.unflatten(tree, [np.asarray(expected[self._gradient_of(n)]) for n in self._real])
        params = jax.tree.unflatten(tree, [np.asarray(x) for x in self._arrays[: len(self._real)]])

        def update(optimizer: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
            def run(params: Any, gradients: Any) -> tuple[Any, Any]:
                updates, state = optimizer.update(gradients, optimizer.init(params), params)
                return jax.tree.map(operator.add, params, updates), state

            return run

        shapes = jax.eval_shape(update(optimizer), params, gradients)
        layout = places.params, places.optimizer(shapes[1])
        plain = cast(Any, jax.jit(update(plain_optimizer)))(*jax.device_put((params, gradients), self._device))
        # With the layouts of a step: parameters as they are stored, gradients like the optimizer state.
        into = places.params, places.gradients
        sharded = cast(Any, jax.jit(update(optimizer), in_shardings=into, out_shardings=layout))(params, gradients)

        def named(tree: Any) -> _Named:
            return {f"after an update: {path_text(path)}": x for path, x in named_leaves(tree)[0]}

        return named(plain), named(sharded)

    def first_difference(self, tolerance: float) -> str:
        """The first site whose value differs, or else the first of the backward pass whose cotangent does. In a pipeline there are none."""
        if self._planned.rewritten is None:
            return ""
        programs = (self._planned.program, self._device), (self._planned.rewritten, self._whole)
        for what, taps in (("value", self._values), ("cotangent", self._cotangents)):
            plain, sharded = (taps(*program) for program in programs)
            common = [site for site in plain if site in sharded and plain[site].shape == sharded[site].shape]
            names = {f"{number}": place for number, place in enumerate(_in_order(common, plain))}
            errors = errors_of(*({name: one[site][step] for name, (site, step) in names.items()} for one in (plain, sharded)))
            wrong = [name for name in (errors if what == "value" else reversed(errors)) if not errors[name] <= tolerance]
            if wrong:
                site, step = names[wrong[0]]
                rule = self._rule_of(site, plain[site].ndim, backward=what == "cotangent")
                where = f", step {step} of its loop," if site.loop else ""
                return f"the {what} of {site}{rule}{where} is off by {errors[wrong[0]]:.2g}"
        return ""

    def _values(self, program: Any, where: Any) -> dict[TapSite, Any]:
        """The values at the sites of a program, in order."""
        sites = sites_of(program)

        def run(arrays: _Arrays) -> tuple[list[Any], dict[TapSite, Any]]:
            return tapped(program, sites, arrays)

        _, values = self._on(where, run)
        return {site: values[site] for site in sites.values() if site in values}

    def _cotangents(self, program: Any, where: Any) -> dict[TapSite, Any]:
        """The cotangents at the sites of a program, in order."""
        sites = sites_of(program)

        def run(arrays: _Arrays) -> dict[TapSite, Any]:
            def results(probes: Mapping[TapSite, Any]) -> list[Any]:
                results, _ = tapped(program, sites, arrays, probes)
                return [results[n] for n in self._weighed(results)]

            outputs, pull = cast(Any, jax.vjp(results, {site: jnp.zeros(x.shape, x.dtype) for site, x in shapes.items()}))
            return pull([_noise(x.shape, x.dtype, n) for n, x in enumerate(outputs)])[0]

        def values(arrays: _Arrays) -> dict[TapSite, Any]:
            return tapped(program, sites, arrays)[1]

        shapes = jax.eval_shape(values, self._arrays)
        cotangents = self._on(where, run)
        return {site: cotangents[site] for site in sites.values() if site in cotangents}

    def _with_gradients(self, program: Callable[[_Arrays], _Arrays], layouts: Any = None) -> Callable[[_Arrays], _Named]:
        """A program and the gradients by its parameters. layouts: those of the gradients in a step."""

        def run(arrays: _Arrays) -> _Named:
            def of_parameters(real: _Arrays) -> tuple[_Arrays, _Arrays]:
                given = list(arrays)
                for n, x in zip(self._real, real, strict=True):
                    given[n] = x
                results = program(given)
                return [results[n] for n in self._weighed(results)], results

            outputs, pull, results = cast(Any, jax.vjp(of_parameters, [arrays[n] for n in self._real], has_aux=True))
            gradients = pull([_noise(x.shape, x.dtype, n) for n, x in enumerate(outputs)])[0]
            if layouts is not None:
                gradients = jax.lax.with_sharding_constraint(gradients, layouts)
            named = {name: x for name, x in zip(self._names, results, strict=True) if not jnp.issubdtype(x.dtype, jax.dtypes.extended)}
            return named | {self._gradient_of(n): x for n, x in zip(self._real, gradients, strict=True)}

        return run

    def _weighed(self, results: Sequence[Any]) -> list[int]:
        """The numbers of the results that are differentiated."""
        real = [n for n, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.floating)]
        # In a pipeline, only the first result has a gradient.
        return real if self._planned.rewritten is not None else real[:1]

    def _gradient_of(self, number: int) -> str:
        place = self._parameters[number]
        used = f", used in {', '.join(place.signals)}" if place.signals else ""
        return f"gradient of {place.path or 'the parameter'} {list(place.shape)} {place.spec}{used}"

    def _rule_of(self, site: TapSite, rank: int, *, backward: bool) -> str:
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
        return cast(Any, jax.jit(run)(jax.device_put(self._arrays, where)))


def _filled(x: Any, number: int) -> Any:
    """An array; for a shape, random numbers."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(number), x.shape) if x.shape else jax.random.key(number)
    return _noise(x.shape, x.dtype, number) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(x.shape, x.dtype)


def _noise(shape: Sequence[int], dtype: Any, number: int) -> Any:
    return jnp.asarray(np.random.default_rng(number).standard_normal(shape, np.float32), dtype)
