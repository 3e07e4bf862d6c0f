"""The two programs of a comparison: plain on one device, and rewritten on a mesh, with the same arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jgt.api.taps import TapSite, sites_of, tapped
from jgt.document import InputError
from jgt.program import jaxpr as jx
from jgt.rules import match_out, match_tensor
from jgt.sharding.arguments import Arguments
from jgt.sharding.call import PlannedCall
from jgt.sharding.inputs import named_leaves, path_text

_SMALLEST = 1e-3
"""An array whose numbers are below this share of the largest array's is compared with that share: it may be zero but for rounding."""

_Arrays = Sequence[Any]
_Named = dict[str, Any]
"""Arrays by their names in messages."""


def errors_of(expected: _Named, found: _Named) -> dict[str, float]:
    """The largest difference of each array, as a share of its largest number; infinite where one has NaN and the other has none."""
    sizes = {name: float(np.max(np.abs(x), initial=0.0)) for name, x in expected.items()}
    smallest = _SMALLEST * max((size for size in sizes.values() if np.isfinite(size)), default=0.0)
    errors: dict[str, float] = {}
    for name, size in sizes.items():
        a, b = (np.asarray(arrays[name], np.float64) for arrays in (expected, found))
        finite = np.isfinite(a)
        difference = np.max(np.abs(a[finite] - b[finite]), initial=0.0) / (max(size, smallest) or 1.0)
        errors[name] = float(difference) if np.array_equal(finite, np.isfinite(b)) else float("inf")
    return errors


def _in_order(sites: Sequence[TapSite], values: Mapping[TapSite, Any]) -> list[tuple[TapSite, Any]]:
    """The sites in the order of a forward pass, each with an index into its values: all of a loop's first step, then of its second."""
    first = {site.loop: position for position, site in reversed(list(enumerate(sites)))}
    places: list[tuple[tuple[int, int, int], TapSite, Any]] = []
    for position, site in enumerate(sites):
        if site.loop:
            places += [((first[site.loop], step, position), site, step) for step in range(len(values[site]))]
        else:
            places.append(((position, 0, position), site, ...))
    return [(site, step) for _, site, step in sorted(places, key=lambda place: place[0])]


class Comparison:
    """Two programs on the same arrays: plain on the first device of a mesh, and rewritten on all of it."""

    def __init__(self, arguments: Arguments, planned: PlannedCall, mesh: Mesh):
        self._planned, self._rules = planned, planned.placement.rules
        self._arrays = [_filled(x, n) for n, x in enumerate(arguments.arrays)]
        self._parameters = planned.placement.parameters
        self._real = [n for n in range(len(self._parameters)) if _is_real(self._arrays[n])]
        self._device, self._whole = SingleDeviceSharding(mesh.devices.flat[0]), NamedSharding(mesh, PartitionSpec())
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
        places = self._planned.placement
        if len(self._real) != places.tree.num_leaves:
            raise InputError(["verify: an update needs parameters that are all floating-point arrays. Leave out the optimizer"])
        gradients = jax.tree.unflatten(places.tree, [np.asarray(expected[self._gradient_of(n)]) for n in self._real])
        params = jax.tree.unflatten(places.tree, [np.asarray(x) for x in self._arrays[: len(self._real)]])

        def update(optimizer: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
            def run(params: Any, gradients: Any) -> tuple[Any, Any]:
                updates, state = optimizer.update(gradients, optimizer.init(params), params)
                return jax.tree.map(operator.add, params, updates), state

            return run

        plain = cast(Any, jax.jit(update(plain_optimizer)))(*jax.device_put((params, gradients), self._device))
        # A step has these layouts: parameters as they are stored, gradients like the optimizer state.
        state = jax.eval_shape(update(optimizer), params, gradients)[1]
        into, out = (places.params, places.gradients), (places.params, places.optimizer(state))
        sharded = cast(Any, jax.jit(update(optimizer), in_shardings=into, out_shardings=out))(params, gradients)
        new, old = ({f"after an update: {path_text(path)}": x for path, x in named_leaves(tree)[0]} for tree in (sharded, plain))
        return old, new

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
        _, values = self._on(where, partial(tapped, program, sites))
        return {site: values[site] for site in sites.values() if site in values}

    def _cotangents(self, program: Any, where: Any) -> dict[TapSite, Any]:
        """The cotangents at the sites of a program, in order."""
        sites = sites_of(program)

        def run(arrays: _Arrays) -> dict[TapSite, Any]:
            shapes = jax.eval_shape(partial(tapped, program, sites), arrays)[1]
            probes = {site: jnp.zeros(x.shape, x.dtype) for site, x in shapes.items()}
            return self._gradients(lambda probes: tapped(program, sites, arrays, probes)[0], probes)[0]

        cotangents = self._on(where, run)
        return {site: cotangents[site] for site in sites.values() if site in cotangents}

    def _with_gradients(self, program: Callable[[_Arrays], _Arrays], layouts: Any = None) -> Callable[[_Arrays], _Named]:
        """A program and the gradients by its parameters. layouts: the layouts that gradients have in a step."""

        def run(arrays: _Arrays) -> _Named:
            def of_parameters(real: _Arrays) -> _Arrays:
                new = dict(zip(self._real, real, strict=True))
                return program([new.get(n, x) for n, x in enumerate(arrays)])

            gradients, results = self._gradients(of_parameters, [arrays[n] for n in self._real])
            if layouts is not None:
                gradients = jax.lax.with_sharding_constraint(gradients, layouts)
            named = {name: x for name, x in zip(self._names, results, strict=True) if not jnp.issubdtype(x.dtype, jax.dtypes.extended)}
            return named | {self._gradient_of(n): x for n, x in zip(self._real, gradients, strict=True)}

        return run

    def _gradients(self, fn: Callable[[Any], _Arrays], at: Any) -> tuple[Any, _Arrays]:
        """The gradient of the floating results of a function, weighed with random numbers; and the results."""

        def floating(at: Any) -> tuple[_Arrays, _Arrays]:
            results = fn(at)
            real = [x for x in results if _is_real(x)]
            # In a pipeline, only the first result has a gradient.
            return real if self._planned.rewritten is not None else real[:1], results

        outputs, pull, results = cast(Any, jax.vjp(floating, at, has_aux=True))
        return pull([_noise(x.shape, x.dtype, n) for n, x in enumerate(outputs)])[0], results

    def _gradient_of(self, number: int) -> str:
        place = self._parameters[number]
        used = f", used in {', '.join(place.signals)}" if place.signals else ""
        return f"gradient of {place.path or 'the parameter'} {list(place.shape)} {place.spec}{used}"

    def _rule_of(self, site: TapSite, rank: int, *, backward: bool) -> str:
        match = partial(match_tensor, self._rules, site.tensor) if site.tensor else partial(match_out, self._rules)
        # A scan has stacked the values of its layers.
        tried = [match(site.signal, r, backward=back) for back in (backward, False) for r in (rank, rank - 1)]
        return next((f" ({found.rule.where})" for found in tried if found.rule is not None), "")

    def _on(self, where: Any, run: Callable[[_Arrays], Any]) -> Any:
        return cast(Any, jax.jit(run)(jax.device_put(self._arrays, where)))


def _filled(x: Any, number: int) -> Any:
    """An array; for a shape, random numbers."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(number), x.shape) if x.shape else jax.random.key(number)
    return _noise(x.shape, x.dtype, number) if _is_real(x) else jnp.zeros(x.shape, x.dtype)


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _noise(shape: Sequence[int], dtype: Any, number: int) -> Any:
    return jnp.asarray(np.random.default_rng(number).standard_normal(shape, np.float32), dtype)
