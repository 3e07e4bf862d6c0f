"""One call of a sharded function, planned: where its parameters and inputs go, and the program to run.

The function is traced, and the trace answers the questions that the rules need: under which signals each parameter is
used and with how many dims. Parameters and inputs are placed first, because their places are pinned in the program;
then the rewriter adds constraints and save policies inside. Each step returns its results together with the problems it
found. No step looks at the problems of another, so every mistake is reported at once, and a value whose rule is wrong
is simply left without a constraint.

The spec of a parameter has one entry for each dim that the model uses, which may be fewer than the parameter has: a
kernel [layers, embed, ffn] that a scan over layers reads as [embed, ffn] is matched by [null, tensor], and its first
dim stays unsharded. `jgt.program.uses` finds these dims, and the signals around the use, in the traced program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jgt.document import InputError
from jgt.pipeline.config import Pipeline
from jgt.program import jaxpr as jx
from jgt.program.dims import Dims, even_dims, partition_spec
from jgt.program.jaxpr import Program
from jgt.program.reads import narrow_reads
from jgt.program.uses import Use, parameter_uses
from jgt.rules import (
    Match,
    Rules,
    Seen,
    SpecRule,
    expand,
    fits_rank,
    match_experts,
    match_optimizer,
    match_param,
    misfit_problems,
    misfits,
    unreached,
)
from jgt.sharding.arguments import Arguments, Traced
from jgt.sharding.inputs import Input
from jgt.sharding.paths import Named, path_text
from jgt.sharding.placement import ParameterPlace, Placement, Surroundings
from jgt.sharding.rewrite import rewrite
from jgt.sharding.staging import Run, StagedCall, StoredCall, stage
from jgt.sharding.storage import Form, Storage, form_of, form_of_stack


@dataclass(frozen=True, kw_only=True)
class PlannedCall:
    """What a call of these shapes needs.

    run: from the argument arrays, in order, to the leaves of the result, then the new values of the arrays numbered `changed`. storage:
    the stored forms of parameters, where these are not the model's. run_stored: the same where stacks are stored on their stages.
    out_tree: the tree of the result.
    is_reusable: whether it serves other calls with the same key too; not if the function closed over values of a trace
    around it.
    """

    placement: Placement
    run: Run
    out_tree: Any
    changed: tuple[int, ...]
    is_reusable: bool
    storage: Storage | None = None
    run_stored: Run | None = None


def plan_call(
    arguments: Arguments,
    rules: Rules,
    mesh: Mesh | AbstractMesh,
    *,
    partial: bool = False,
    pipeline: Pipeline | None = None,
    pad: bool = False,
) -> PlannedCall:
    """Traces a call, places its parameters and inputs, and rewrites its program.

    Raises InputError with every misfit, and with every rule that matches nothing (not with `partial`). Raises
    ValueError for arguments that a sharded function cannot take.
    """
    tree, numbers = arguments.parameter_tree()
    traced = arguments.trace()
    program = traced.program
    site = Surroundings.here(mesh, None if pipeline is None else (pipeline.signal, pipeline.axis))
    num_params = len(arguments.parameters)
    params = _place_parameters(arguments.parameters, program, rules, replace(site, pads=pad))
    site = replace(site, uneven=_uneven_sizes(params.places, site) if pad else frozenset())
    inputs = _place_inputs(arguments.inputs, num_params, rules, site)
    # A pipeline runs parts of the program and rewrites each where it runs; here the whole is only checked.
    whole = rewrite(program, {**params.pins, **inputs.pins}, rules, site, applies=pipeline is None)
    matches = (*params.matches, *inputs.matches, *whole.matches)
    found = [
        *rules.axis_problems(mesh.axis_names),
        *(problem for match in matches for problem in match.problems),
        *params.problems,
        *inputs.problems,
        *whole.problems,
        *_experts_problems(params.places, whole.experts, rules),
    ]
    if not partial:
        used = {place.path: place.signals for place in params.places}
        seen = Seen(signals=whole.signals, params=used, tensors=whole.tensors, out_ranks=whole.out_ranks, matches=matches)
        found += unreached(rules, seen)

    def evaluate(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return jx.evaluate(whole.program, arrays)

    first_argument = {leaf: number for leaf, number in enumerate(numbers) if number is None or number >= num_params}

    staged = StagedCall(parameters=params.places, run=evaluate)
    # Staged even after problems, so that problems of the rules and of the pipeline are reported together.
    if pipeline is not None:
        staged = stage(arguments, traced, pipeline, rules, site, params.places)
        found += staged.problems
    if found:
        raise InputError(found)
    # Last, because it raises an error of its own instead of adding to `found`.
    check_aliases(arguments.parameters, staged.parameters, rules)
    placement = Placement(
        rules=rules,
        mesh=mesh,
        parameters=staged.parameters,
        tree=tree,
        others={leaf: None if number is None else inputs.dims[number - num_params] for leaf, number in first_argument.items()},
        signature=arguments.signature,
        tensors=tuple(whole.tensors),
    )

    def pinned(run: Run) -> Run:
        return _with_state_pinned(run, traced, {n: dims for n, (dims, _) in inputs.pins.items()}, site)

    forms = _forms(placement, program, pipeline, staged.stored)
    return PlannedCall(
        placement=placement,
        run=pinned(staged.run),
        storage=Storage(model=placement, forms=forms) if forms else None,
        run_stored=None if staged.stored is None else pinned(staged.stored.run),
        out_tree=traced.out_tree,
        changed=traced.changed,
        is_reusable=not jx.closes_over_tracers(program),
    )


def _forms(placement: Placement, program: Program, pipeline: Pipeline | None, stacks: StoredCall | None) -> dict[str, Form]:
    """The stored forms of the parameters that have one, by path."""
    sizes, forms = dict(placement.mesh.shape), dict[str, Form]()
    reads = narrow_reads(program)
    for place, read in zip(placement.parameters, reads, strict=False):
        if pipeline is not None and stacks is not None and place.path in stacks.stacks:
            forms[place.path] = form_of_stack(place, stacks.chunks, pipeline.axis)
        # A pipeline gathers its weights by itself, from where the rules have them.
        elif form := form_of(place, sizes, read, finely=pipeline is None):
            forms[place.path] = form
    return forms


def _uneven_sizes(places: Iterable[ParameterPlace], site: Surroundings) -> frozenset[int]:
    found = ((p.shape, dims) for p in places for dims in (p.dims, p.optimizer_dims))
    return frozenset(misfit.size for shape, dims in found for misfit in misfits(site.free_dims(dims), shape, site.sizes))


def _with_state_pinned(run: Run, traced: Traced, pins: Mapping[int, Dims], site: Surroundings) -> Run:
    """The run whose new values of state have the layout of the old ones, so that the next step is the same program."""
    if site.mesh.size == 1 or not any(number in pins for number in traced.changed):
        return run
    mesh = site.mesh if site.around is None else site.around

    def pinned(number: int, x: jax.Array) -> jax.Array:
        if number not in pins or x.ndim != len(pins[number]):
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition_spec(site.free_dims(pins[number]))))

    def run_and_pin(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        results, num_results = run(arrays), traced.out_tree.num_leaves
        new = [pinned(number, x) for number, x in zip(traced.changed, results[num_results:], strict=True)]
        return [*results[:num_results], *new]

    return run_and_pin


@dataclass(frozen=True, kw_only=True)
class _Placed:
    """Arguments placed by the rules, with the answers of the rules and what is wrong with them.

    places: one for each parameter, in order. dims: one for each input. pins: by argument number, the dims of the value and of its gradient,
    for arguments without problems.
    """

    places: tuple[ParameterPlace, ...] = ()
    dims: tuple[Dims, ...] = ()
    pins: Mapping[int, tuple[Dims, Dims]]
    matches: tuple[Match[SpecRule], ...]
    problems: tuple[str, ...]


def _place_parameters(params: Sequence[Named], program: Program, rules: Rules, site: Surroundings) -> _Placed:
    """The place of each parameter by the rules of the signals that use it, and of its optimizer state."""
    places: list[ParameterPlace] = []
    pins: dict[int, tuple[Dims, Dims]] = {}
    matches: list[Match[SpecRule]] = []
    problems: list[str] = []
    for index, ((path, x), use) in enumerate(zip(params, parameter_uses(program, len(params)), strict=True)):
        name = path_text(path[2:])
        match = match_param(rules, name, use.signals, len(x.shape) - len(use.sliced))
        pads = site.pads and not any(map(site.is_in_stage, use.signals)) and all(isinstance(cast(object, size), int) for size in x.shape)
        own = [*match.problems, *_parameter_problems(match, name, x.shape, use, rules, replace(site, pads=pads))]
        dims = ((),) * len(x.shape) if match.rule is None else expand(match.rule.spec, len(x.shape), use.sliced)

        def fits(rule: SpecRule, shape: tuple[int, ...] = x.shape, use: Use = use) -> bool:
            return _fits(rule, shape, use, site)

        def fits_padded(rule: SpecRule, shape: tuple[int, ...] = x.shape, use: Use = use) -> bool:
            return fits_rank(rule.spec, len(shape) - len(use.sliced))

        state = match_optimizer(rules, name, use.signals, fits)
        if state.rule is None and pads:
            state = match_optimizer(rules, name, use.signals, fits_padded)
        state_dims = dims if state.rule is None else expand(state.rule.spec, len(x.shape), use.sliced)
        if pads and state_dims != dims:
            state_dims = _of_state(state_dims, x.shape, use, site)
        place = ParameterPlace(
            path=name, shape=x.shape, dtype=x.dtype, signals=use.signals, dims=dims, optimizer_dims=state_dims, sliced=use.sliced
        )
        places.append(place)
        matches += [match, state]
        # The problems of the match itself are collected with those of all matches.
        problems += own[len(match.problems) :]
        if not own:
            # The gradient has the layout of the optimizer state. With ZeRO-1 that turns its all-reduce into a
            # reduce-scatter.
            pins[index] = (dims, state_dims)
    return _Placed(places=tuple(places), pins=pins, matches=tuple(matches), problems=tuple(problems))


def _place_inputs(inputs: Sequence[Input], first: int, rules: Rules, site: Surroundings) -> _Placed:
    """The dims of each argument that is not a parameter and that a rule under `inputs:` matches; `first` is the number of the first."""
    pins: dict[int, tuple[Dims, Dims]] = {}
    matches: list[Match[SpecRule]] = []
    all_dims: list[Dims] = []
    problems: dict[str, None] = {}
    reported: set[tuple[SpecRule, tuple[int, ...]]] = set()
    for index, one in enumerate(inputs, start=first):
        match, dims = one.match(rules)
        matches.append(match)
        all_dims.append(dims)
        if match.rule is None:
            # What nobody names is left to the partitioner, except state: it is the same on all devices, in every step.
            if one.is_state and not one.is_key:
                whole: Dims = ((),) * len(one.x.shape)
                pins[index] = (whole, whole)
            continue
        dims = site.free_dims(dims)
        found = list(misfit_problems(match.rule, dims, one.x.shape, site.sizes, f"input {one.name}", label="inputs"))
        # Inputs often come in dozens of one shape: the first one is enough.
        if (match.rule, one.x.shape) not in reported:
            problems |= dict.fromkeys(found)
        reported.add((match.rule, one.x.shape))
        if not found:
            pins[index] = (dims, dims)
    return _Placed(dims=tuple(all_dims), pins=pins, matches=tuple(matches), problems=tuple(problems))


def check_aliases(params: Sequence[Named], places: Sequence[ParameterPlace], rules: Rules) -> None:
    """Raises InputError if one array is passed as two parameters that the rules lay out differently."""
    first: dict[int, ParameterPlace] = {}
    problems: list[str] = []
    for (_, x), place in zip(params, places, strict=False):
        # Two parameters may share a ShapeDtypeStruct without being one array.
        other = place if isinstance(x, jax.ShapeDtypeStruct) else first.setdefault(id(x), place)
        if other.dims != place.dims:
            problems.append(
                f"{rules.where}: {place.path}: this array is {other.path} too, and the rules lay the two out differently: {place.spec} and "
                f"{other.spec}. Pass it once (nnx.split), or give both the same spec under params: at the top of the file"
            )
    if problems:
        raise InputError(problems)


def _experts_problems(places: Sequence[ParameterPlace], experts: Mapping[str, int], rules: Rules) -> Iterator[str]:
    """The problem of weights of experts that the axis of the experts splits along another dim. experts: their number, by signal."""
    for place in places:
        inner = [(size, axes) for dim, (size, axes) in enumerate(zip(place.shape, place.dims, strict=True)) if dim not in place.sliced]
        for signal in place.signals:
            rule = match_experts(rules, signal).rule
            # By its shape: a router [d, experts] is not one of the weights.
            if rule is None or len(inner) < 2 or inner[0][0] != experts.get(signal):
                continue
            if any(rule.axis in axes for _, axes in inner[1:]):
                shape = [size for size, _ in inner]
                yield (
                    f"{rule.where}: experts: {rule.axis} holds the experts, so it can split dim 0 of {place.path} {shape} only. "
                    f"Write {rule.axis} first in its spec, and take it out of the other dims"
                )


def _of_state(dims: Dims, shape: tuple[int, ...], use: Use, site: Surroundings) -> Dims:
    """The dims of an optimizer state, on other dims than the rule says if those divide and these do not."""
    even = even_dims(dims, shape, site.sizes, use.sliced)
    # A gradient is reduce-scattered over a dim that divides, but all-reduced where XLA has to pad it.
    return even if {a for axes in even for a in axes} == {a for axes in dims for a in axes} else dims


def _parameter_problems(
    match: Match[SpecRule], name: str, shape: tuple[int, ...], use: Use, rules: Rules, site: Surroundings
) -> Iterable[str]:
    if match.rule is not None:
        dims = expand(match.rule.spec, len(shape), use.sliced)
        if not site.pads:
            yield from misfit_problems(match.rule, site.free_dims(dims), shape, site.sizes, f"parameter {name}")
        yield from site.stage_problems(match.rule, dims, use.signals, f"parameter {name}")
    elif not match.problems and rules.default is None:
        used = f"used under {', '.join(use.signals)}" if use.signals else "used under no signal"
        yield (
            f"{rules.where}: {name}: no rule matches this parameter of shape {list(shape)}, {used}. "
            "Add a pattern under params: of that signal, or `default: replicate`"
        )


def _fits(rule: SpecRule, shape: tuple[int, ...], use: Use, site: Surroundings) -> bool:
    """Whether a spec has the right number of dims and its axes divide them."""
    if not fits_rank(rule.spec, len(shape) - len(use.sliced)):
        return False
    dims = site.free_dims(expand(rule.spec, len(shape), use.sliced))
    return not any(misfits(dims, shape, site.sizes))
