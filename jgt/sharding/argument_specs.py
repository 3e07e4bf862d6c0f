"""The specs of a call's arguments: what the rules say about its parameters, the state of their optimizer, and its inputs.

A parameter gets the spec that the rules of its signals have for its path. Its gradient and its optimizer state may be split more finely. An
input gets the spec of the rule that names it. The dims that come out are pinned in the program, and a `Placement` makes shardings of
them.

The spec of a parameter has one entry for each dim that the model uses, which may be fewer than the parameter has: a
kernel [layers, embed, ffn] that a scan over layers reads as [embed, ffn] is matched by [null, tensor], and its first
dim stays unsharded. `jgt.program.uses` finds these dims, and the signals around the use, in the traced program.

An argument whose rule is wrong is not pinned. Problems are only collected here, so that the caller can raise all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import jax

from jgt.document import InputError
from jgt.program.dims import Dims, even_dims
from jgt.program.jaxpr import Program
from jgt.program.uses import Use, parameter_uses
from jgt.replacements.replacement import ParameterPlace
from jgt.rules import Match, Rules, SpecRule, match_optimizer, match_param, misfits
from jgt.sharding.inputs import Input, Named, path_text
from jgt.sharding.placement import CallContext


@dataclass(frozen=True, kw_only=True)
class ArgumentSpecs:
    """The places of the parameters or the inputs of a call by the rules, and what is wrong with the rules.

    places: one for each parameter, in order. dims: one for each input. pins: by argument number, the dims of the value and of its gradient,
    for arguments without problems.
    """

    places: tuple[ParameterPlace, ...] = ()
    dims: tuple[Dims, ...] = ()
    pins: Mapping[int, tuple[Dims, Dims]]
    matches: tuple[Match[SpecRule], ...]
    problems: tuple[str, ...]


def parameter_specs(params: Sequence[Named], program: Program, rules: Rules, site: CallContext) -> ArgumentSpecs:
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
        dims = ((),) * len(x.shape) if match.rule is None else match.rule.dims(len(x.shape), use.sliced)
        state = match_optimizer(rules, name, use.signals, partial(_fits, shape=x.shape, use=use, site=site))
        if state.rule is None and pads:
            state = match_optimizer(rules, name, use.signals, partial(SpecRule.fits, rank=len(x.shape) - len(use.sliced)))
        state_dims = dims if state.rule is None else state.rule.dims(len(x.shape), use.sliced)
        if pads and state_dims != dims:
            state_dims = _of_state(state_dims, x.shape, use, site)
        place = ParameterPlace(
            path=name, shape=x.shape, dtype=x.dtype, signals=use.signals, dims=dims, optimizer_dims=state_dims, sliced=use.sliced
        )
        places.append(place)
        matches += [match, state]
        # The caller collects the problems of all matches.
        problems += own[len(match.problems) :]
        if not own:
            # The gradient has the layout of the optimizer state. With ZeRO-1 that turns its all-reduce into a
            # reduce-scatter.
            pins[index] = (dims, state_dims)
    return ArgumentSpecs(places=tuple(places), pins=pins, matches=tuple(matches), problems=tuple(problems))


def input_specs(inputs: Sequence[Input], first: int, rules: Rules, site: CallContext) -> ArgumentSpecs:
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
            # An input without a rule is left to the partitioner. State is not: it is the same on all devices, in every step.
            if one.is_state and not one.is_key:
                whole: Dims = ((),) * len(one.x.shape)
                pins[index] = (whole, whole)
            continue
        dims = site.free_dims(dims)
        misfits_of_input = match.rule.misfit_problems(dims, one.x.shape, site.sizes, f"input {one.name}", label="inputs").values()
        # Inputs often come in dozens of one shape: the first one is enough.
        if (match.rule, one.x.shape) not in reported:
            problems |= dict.fromkeys(misfits_of_input)
        reported.add((match.rule, one.x.shape))
        if not misfits_of_input:
            pins[index] = (dims, dims)
    return ArgumentSpecs(dims=tuple(all_dims), pins=pins, matches=tuple(matches), problems=tuple(problems))


def uneven_sizes(places: Iterable[ParameterPlace], site: CallContext) -> frozenset[int]:
    """The sizes of the dims of parameters and of their optimizer states that their axes do not divide."""
    layouts = ((p.shape, dims) for p in places for dims in (p.dims, p.optimizer_dims))
    return frozenset(misfit.size for shape, dims in layouts for misfit in misfits(site.free_dims(dims), shape, site.sizes))


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


def _of_state(dims: Dims, shape: tuple[int, ...], use: Use, site: CallContext) -> Dims:
    """The dims of an optimizer state, on other dims than the rule says if those divide and these do not."""
    even = even_dims(dims, shape, site.sizes, use.sliced)
    # A gradient is reduce-scattered over a dim that divides, but all-reduced where XLA has to pad it.
    return even if {a for axes in even for a in axes} == {a for axes in dims for a in axes} else dims


def _parameter_problems(
    match: Match[SpecRule], name: str, shape: tuple[int, ...], use: Use, rules: Rules, site: CallContext
) -> Iterable[str]:
    if match.rule is not None:
        dims = match.rule.dims(len(shape), use.sliced)
        if not site.pads:
            yield from match.rule.misfit_problems(site.free_dims(dims), shape, site.sizes, f"parameter {name}").values()
        yield from site.stage_problems(match.rule, dims, use.signals, f"parameter {name}")
    elif not match.problems and rules.default is None:
        used = f"used under {', '.join(use.signals)}" if use.signals else "used under no signal"
        yield (
            f"{rules.where}: {name}: no rule matches this parameter of shape {list(shape)}, {used}. "
            "Add a pattern under params: of that signal, or `default: replicate`"
        )


def _fits(rule: SpecRule, shape: tuple[int, ...], use: Use, site: CallContext) -> bool:
    """Whether a spec has the right number of dims and its axes divide them."""
    if not rule.fits(len(shape) - len(use.sliced)):
        return False
    dims = site.free_dims(rule.dims(len(shape), use.sliced))
    return not any(misfits(dims, shape, site.sizes))
