"""One call of a sharded function, planned: where its parameters and inputs go, and the program to run.

The function is traced, and the trace answers the questions that the rules need: under which signals each parameter is
used and with how many dims. Parameters and inputs are placed first, because their places are pinned in the program;
then the rewriter adds constraints and save policies inside. Each step returns its results together with the problems it
found. No step looks at the problems of another, so every mistake is reported at once, and a value whose rule is wrong
is simply left without a constraint.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jgt.document import InputError
from jgt.program import jaxpr as jx
from jgt.program.constraints import pinned_dims
from jgt.program.dims import Dims, partition_spec
from jgt.program.jaxpr import Program
from jgt.program.reads import narrow_reads
from jgt.program.tracing import evaluate
from jgt.replacements.replacement import Inserted, Replacement
from jgt.rules import Match, Rules, Seen, SpecRule, unreached
from jgt.sharding.answers import RuleAnswers
from jgt.sharding.argument_specs import ArgumentSpecs, check_aliases, input_specs, parameter_specs, uneven_sizes
from jgt.sharding.arguments import Arguments, Traced
from jgt.sharding.placement import CallContext, Placement
from jgt.sharding.rewrite import rewrite
from jgt.sharding.staged import Run, StagedCall, Staging, StoredCall
from jgt.sharding.storage import Form, Storage, form_of


@dataclass(frozen=True, kw_only=True)
class PlannedCall:
    """A call that is ready to run.

    run: a function from the argument arrays, in order, to the leaves of the result, then the new values of the arrays numbered `changed`.
    out_tree: the tree of the result. program: the traced program. rewritten: the program with every rule applied; None in a pipeline,
    which rewrites parts. storage: the stored forms of parameters that are not stored as the model has them. run_stored: `run` for stacks
    that are stored on their stages. is_reusable: whether other calls with the same key may use it, too; not if the function closed over
    values of a trace around it. inserted: the constraints that rules have put into the program. answers: the rule of each argument.
    """

    placement: Placement
    run: Run
    out_tree: Any
    changed: tuple[int, ...]
    program: Program
    rewritten: Program | None
    is_reusable: bool
    inserted: Sequence[Inserted] = ()
    answers: Sequence[Match[SpecRule]] = ()
    storage: Storage | None = None
    run_stored: Run | None = None

    @property
    def result_specs(self) -> list[PartitionSpec]:
        """The spec of each result as the rules leave it: whole where they say nothing."""
        count = self.out_tree.num_leaves + len(self.changed)
        dims = [None if self.rewritten is None else pinned_dims(self.rewritten, n) for n in range(count)]
        return [PartitionSpec() if one is None else partition_spec(one) for one in dims]


def plan_call(
    arguments: Arguments,
    rules: Rules,
    mesh: Mesh | AbstractMesh,
    replacements_of: Callable[[Rules], Sequence[Replacement]] = lambda rules: (),
    *,
    partial: bool = False,
    pipeline: Staging | None = None,
    pad: bool = False,
) -> PlannedCall:
    """Traces a call, places its parameters and inputs, and rewrites its program. Replacements are applied in their order.

    Rules with `otherwise` that do not fit the program are replaced by those that are chosen for it (`Placement.rules`).

    Raises InputError with every misfit, and with every rule that matches nothing (not with `partial`). Raises
    ValueError for arguments that a sharded function cannot take.
    """
    tree, numbers = arguments.parameter_tree()
    traced = arguments.trace()
    program = traced.program
    site = CallContext.here(mesh, None if pipeline is None else (pipeline.signal, pipeline.axis))

    def apply(rules: Rules) -> _Applied:
        # A pipeline runs parts of the program and rewrites each where it runs; here the whole is only checked.
        return _apply_rules(arguments, program, rules, site, replacements_of(rules), pad=pad, applies=pipeline is None)

    applied, problems = _choose_rules(rules, traced, site, apply, partial=partial, pad=pad)
    rules = applied.rules
    problems += applied.problems(partial=partial)
    staged = StagedCall(parameters=applied.params.places, run=lambda arrays: evaluate(applied.program, arrays))
    # Staged even after problems, so that problems of the rules and of the pipeline are reported together.
    if pipeline is not None:
        with InputError.collect(problems):
            staged = pipeline.stage(arguments, traced, rules, applied.site, replacements_of(rules), applied.params.places)
    if problems:
        raise InputError(problems)
    # Last, because it raises an error itself.
    check_aliases(arguments.parameters, staged.parameters, rules)
    # State has no read; it follows the parameters.
    places = tuple(replace(place, read=read) for place, read in zip(staged.parameters, narrow_reads(program), strict=False))
    placement = Placement(
        rules=rules,
        mesh=mesh,
        parameters=places,
        tree=tree,
        others=_others(numbers, len(arguments.parameters), applied.inputs.dims),
        signature=arguments.signature,
        tensors=tuple(applied.answers.tensors),
        layouts=traced.layouts,
    )

    def pinned(run: Run) -> Run:
        return _with_state_pinned(run, traced, {n: dims for n, (dims, _) in applied.inputs.pins.items()}, applied.site)

    forms = _forms(placement, staged.stored, finely=pipeline is None)
    return PlannedCall(
        placement=placement,
        run=pinned(staged.run),
        storage=Storage(model=placement, forms=forms) if forms else None,
        run_stored=None if staged.stored is None else pinned(staged.stored.run),
        out_tree=traced.out_tree,
        changed=traced.changed,
        program=program,
        rewritten=applied.program if pipeline is None else None,
        is_reusable=not jx.closes_over_tracers(program),
        inserted=applied.answers.inserted,
        # The answer about a parameter is followed by the one about its optimizer's state.
        answers=(*applied.params.matches[::2], *applied.inputs.matches),
    )


def _choose_rules(
    rules: Rules, traced: Traced, site: CallContext, apply: Callable[[Rules], _Applied], *, partial: bool, pad: bool
) -> tuple[_Applied, list[str]]:
    """Applies the given rules, or those chosen for the program, with its own layouts. Returns also what is wrong with the latter."""
    applied = apply(rules)
    if rules.otherwise is not None and not applied.fits(partial=partial):
        chosen = importlib.import_module("jgt.sharding.chosen")
        rules = chosen.chosen_rules(rules, rules.otherwise, traced.program, applied.params.places, site.sizes, pads=pad)
    problems: list[str] = []
    if traced.layouts:
        kept = importlib.import_module("jgt.sharding.own.kept")
        rules, problems = kept.with_own(rules, traced.layouts)
        problems += kept.manual_problems(traced.program, site.mesh)
    return applied if rules is applied.rules else apply(rules), problems


def _others(numbers: Sequence[int | None], num_params: int, dims: Sequence[Dims]) -> dict[int, Dims | None]:
    """By leaf, the dims of what the first argument contains beside parameters; None for a value that is not an array."""
    others = {leaf: number for leaf, number in enumerate(numbers) if number is None or number >= num_params}
    return {leaf: None if number is None else dims[number - num_params] for leaf, number in others.items()}


@dataclass(frozen=True, kw_only=True)
class _Applied:
    """The rules applied to one call: the specs of its arguments, and its program with constraints.

    site: the surroundings of the call, with the sizes of dims of parameters that are split unevenly. answers: what the rules said about the
    values of the program.
    """

    rules: Rules
    site: CallContext
    params: ArgumentSpecs
    inputs: ArgumentSpecs
    program: Program
    answers: RuleAnswers

    def problems(self, *, partial: bool) -> list[str]:
        """Everything that is wrong with the rules in this call; with `partial`, rules may match nothing."""
        matches = (*self.params.matches, *self.inputs.matches, *self.answers.matches)
        problems = [
            *self.rules.axis_problems(self.site.mesh.axis_names),
            *(problem for match in matches for problem in match.problems),
            *self.params.problems,
            *self.inputs.problems,
            *self.answers.problems,
        ]
        return problems if partial else [*problems, *self._unreached(self.rules)]

    def fits(self, *, partial: bool) -> bool:
        """Whether the rules are about this program: some decide, each of them does (not with `partial`), and each has the right rank."""
        # What matches nothing in a file of the user's own is a mistake, and will be reported.
        if not self.rules.is_shipped:
            return bool(self.rules.signals or self.rules.params or self.rules.optimizer)
        matches = (*self.params.matches, *self.answers.matches)
        if any(match.problems for match in matches) or not any(match.decided for match in matches):
            return False
        return partial or not any(self._unreached(replace(self.rules, inputs=())))

    def _unreached(self, rules: Rules) -> Iterator[str]:
        answers, matches = self.answers, (*self.params.matches, *self.inputs.matches, *self.answers.matches)
        used = {place.path: place.signals for place in self.params.places}
        seen = Seen(signals=answers.signals, params=used, tensors=answers.tensors, out_ranks=answers.out_ranks, matches=matches)
        return unreached(rules, seen)


def _apply_rules(
    arguments: Arguments,
    program: Program,
    rules: Rules,
    site: CallContext,
    replacements: Sequence[Replacement],
    *,
    pad: bool,
    applies: bool,
) -> _Applied:
    """Applies the rules to the arguments, and then, with these pinned, to the program. Without `applies` the program is only checked."""
    params = parameter_specs(arguments.parameters, program, rules, replace(site, pads=pad))
    site = replace(site, uneven=uneven_sizes(params.places, site) if pad else frozenset())
    inputs = input_specs(arguments.inputs, len(arguments.parameters), rules, site)
    pins = {**params.pins, **inputs.pins}
    program, answers = rewrite(program, pins, rules, site, replacements, parameters=params.places, applies=applies)
    return _Applied(rules=rules, site=site, params=params, inputs=inputs, program=program, answers=answers)


def _forms(placement: Placement, stored: StoredCall | None, *, finely: bool) -> dict[str, Form]:
    """The stored forms of the parameters that have one, by path. finely: whether parameters are split like their optimizer state."""
    sizes, forms = dict(placement.mesh.shape), dict[str, Form]()
    for place in placement.parameters:
        # A pipeline gathers its weights itself, from where the rules have them.
        form = (None if stored is None else stored.form_of(place)) or form_of(place, sizes, finely=finely)
        if form is not None:
            forms[place.path] = form
    return forms


def _with_state_pinned(run: Run, traced: Traced, pins: Mapping[int, Dims], site: CallContext) -> Run:
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
