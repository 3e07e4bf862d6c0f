"""The two programs of a comparison: plain on one device, and rewritten on a mesh, with the same arrays."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import EllipsisType
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jgt.api.draws import draws, noise
from jgt.api.reference import NamedArrays, Reference, errors_of
from jgt.api.stepwise import Evaluation, Path, Result, values_inside
from jgt.api.taps import TapSite, sites_of
from jgt.document import InputError
from jgt.program import jaxpr as jx
from jgt.program.tracing import evaluate, trace
from jgt.rules import match_out, match_tensor
from jgt.sharding.arguments import Arguments
from jgt.sharding.call import PlannedCall
from jgt.sharding.inputs import named_leaves, path_text

_Arrays = Sequence[jax.Array]
_At = TypeVar("_At")
_Made = TypeVar("_Made")


def _at_sites(program: jx.Program, values: Mapping[Path, _Arrays]) -> dict[TapSite, jax.Array]:
    return {site: values[path][number] for site, (path, number) in sites_of(program).items()}


def _in_order(sites: Sequence[TapSite], values: Mapping[TapSite, jax.Array]) -> list[tuple[TapSite, int | EllipsisType]]:
    """The sites in the order of a forward pass, each with an index into its values: all of a loop's first step, then of its second."""
    first = {site.loop: position for position, site in reversed(list(enumerate(sites)))}
    places: list[tuple[tuple[int, int, int], TapSite, int | EllipsisType]] = []
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
        self.draws = draws(planned.program, arguments.arrays)
        self._arrays = self.draws[0]
        self._parameters = planned.placement.parameters
        self._real = [n for n in range(len(self._parameters)) if _is_real(self._arrays[n])]
        self._first = mesh.devices.flat[0]
        self._device, self._whole = SingleDeviceSharding(self._first), NamedSharding(mesh, PartitionSpec())
        paths = [path_text(path) for path, _ in named_leaves(jax.tree.unflatten(planned.out_tree, range(planned.out_tree.num_leaves)))[0]]
        self._names = [f"result {path}".rstrip() for path in paths] + [f"new value of argument {n}" for n in planned.changed]

    @functools.cached_property
    def _programs(self) -> list[tuple[Callable[[_Arrays], NamedArrays], jax.sharding.Sharding]]:
        """Both programs with their gradients, compiled, and where their arguments are."""
        layouts = jax.tree.leaves(self._planned.placement.gradients)
        sharded = self._with_gradients(self._planned.run, [layouts[n] for n in self._real])
        return [(jax.jit(self._plain), self._device), (jax.jit(sharded), self._whole)]

    @property
    def _plain(self) -> Callable[[_Arrays], NamedArrays]:
        return self._with_gradients(partial(evaluate, self._planned.program))

    def results(self, draw: _Arrays) -> tuple[NamedArrays, NamedArrays]:
        """The results and gradients of both programs, by name, for these arguments."""
        self._arrays = draw
        expected, found = (program(jax.device_put(draw, where)) for program, where in self._programs)
        return expected, found

    def confirmed(self, found: NamedArrays, tolerance: float) -> tuple[NamedArrays, dict[str, float], list[str]]:
        """Returns what the plain program computes operation by operation, the errors beside it, and the names of what is wrong.

        The compiled plain program cannot decide, because XLA computes some programs wrongly on one device, too.
        """
        program, tree = trace(self._plain, self._arrays)
        names = [*jax.tree.unflatten(tree, range(tree.num_leaves))]
        reference = Reference(program, self._arrays, self._first, names)
        return reference.results, *reference.judge(found, tolerance)

    def updates(self, optimizer: Any, plain_optimizer: Any, expected: NamedArrays) -> tuple[NamedArrays, NamedArrays]:
        """The parameters and the optimizer state after an update by the gradients of the plain program."""
        places = self._planned.placement
        if len(self._real) != places.tree.num_leaves:
            raise InputError(["verify: an update needs parameters that are all floating-point arrays. Leave out the optimizer"])
        gradients = jax.tree.unflatten(places.tree, [np.asarray(expected[self._gradient_of(n)]) for n in self._real])
        params = jax.tree.unflatten(places.tree, [np.asarray(x) for x in self._arrays[: len(self._real)]])

        def update(optimizer: Any) -> Callable[[object, object], tuple[object, object]]:
            def run(params: object, gradients: object) -> tuple[object, object]:
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
        """The first site whose value differs, or else the first of the backward pass whose cotangent does, and the first operation.

        In a pipeline there are none.
        """
        if (rewritten := self._planned.rewritten) is None:
            return ""
        return "; ".join(filter(None, [self._first_site(rewritten, tolerance), self._first_operation(rewritten, tolerance)]))

    def _first_site(self, rewritten: jx.Program, tolerance: float) -> str:
        programs = (self._planned.program, self._device), (rewritten, self._whole)
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

    def _first_operation(self, rewritten: jx.Program, tolerance: float) -> str:
        """The first operation of the rewritten program that its layout changes. A program without signals has no sites."""
        program, _ = trace(self._with_gradients(partial(evaluate, rewritten)), self._arrays)
        found = self._on(self._whole, partial(values_inside, program))
        return Reference(program, self._arrays, self._first).first_wrong(found, tolerance)

    def _values(self, program: jx.Program, where: jax.sharding.Sharding) -> dict[TapSite, jax.Array]:
        """The values at the sites of a program, in order."""
        return _at_sites(program, self._on(where, partial(values_inside, program)))

    def _cotangents(self, program: jx.Program, where: jax.sharding.Sharding) -> dict[TapSite, jax.Array]:
        """The cotangents at the sites of a program, in order."""

        def run(arrays: _Arrays) -> dict[Result, jax.Array]:
            shapes = _at_sites(program, jax.eval_shape(partial(values_inside, program), arrays))
            probes = {result: jnp.zeros(shapes[site].shape, shapes[site].dtype) for site, result in sites_of(program).items()}
            return self._gradients(lambda probes: Evaluation(is_eager=False, probes=probes).run(program, arrays), probes)[0]

        cotangents = self._on(where, run)
        return {site: cotangents[result] for site, result in sites_of(program).items()}

    def _with_gradients(
        self, program: Callable[[_Arrays], _Arrays], layouts: Sequence[NamedSharding] | None = None
    ) -> Callable[[_Arrays], NamedArrays]:
        """A program and the gradients by its parameters. layouts: the layouts that gradients have in a step."""

        def run(arrays: _Arrays) -> NamedArrays:
            def of_parameters(real: _Arrays) -> _Arrays:
                new = dict(zip(self._real, real, strict=True))
                return program([new.get(n, x) for n, x in enumerate(arrays)])

            gradients, results = self._gradients(of_parameters, [arrays[n] for n in self._real])
            if layouts is not None:
                gradients = jax.lax.with_sharding_constraint(gradients, layouts)
            named = {name: x for name, x in zip(self._names, results, strict=True) if not jnp.issubdtype(x.dtype, jax.dtypes.extended)}
            return named | {self._gradient_of(n): x for n, x in zip(self._real, gradients, strict=True)}

        return run

    def _gradients(self, fn: Callable[[_At], _Arrays], at: _At) -> tuple[_At, _Arrays]:
        """The gradient of the floating results of a function, weighed with random numbers; and the results."""

        def floating(at: _At) -> tuple[_Arrays, _Arrays]:
            results = fn(at)
            real = [x for x in results if _is_real(x)]
            # In a pipeline, only the first result has a gradient.
            return real if self._planned.rewritten is not None else real[:1], results

        outputs, pull, results = cast(Any, jax.vjp(floating, at, has_aux=True))
        return pull([noise(x.shape, x.dtype, n) for n, x in enumerate(outputs)])[0], results

    def _gradient_of(self, number: int) -> str:
        place = self._parameters[number]
        used = f", used in {', '.join(place.signals)}" if place.signals else ""
        return f"gradient of {place.path or 'the parameter'} {list(place.shape)} {place.spec}{used}"

    def _rule_of(self, site: TapSite, rank: int, *, backward: bool) -> str:
        match = partial(match_tensor, self._rules, site.tensor) if site.tensor else partial(match_out, self._rules)
        # A scan has stacked the values of its layers.
        tried = [match(site.signal, r, backward=back) for back in (backward, False) for r in (rank, rank - 1)]
        return next((f" ({found.rule.where})" for found in tried if found.rule is not None), "")

    def _on(self, where: jax.sharding.Sharding, run: Callable[[_Arrays], _Made]) -> _Made:
        return cast(Any, jax.jit(run)(jax.device_put(self._arrays, where)))


def _is_real(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
