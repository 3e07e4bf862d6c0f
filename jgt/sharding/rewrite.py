"""The rewriter: from a traced program and rules to the same program with constraints and save policies.

jgt edits the program as data and evaluates it once; nothing is traced again. The rewriter walks through the equations
and through every program inside them (scan, cond, jit, remat, custom derivatives), asks the rules about each result,
and puts `with_sharding_constraint` equations behind those that a rule names. A forward spec constrains the value, a
backward spec its cotangent. Every other equation stays as it is, so the rewritten program computes the same numbers.

`RuleAnswers` says which rule a value has and which dims the rule gives it, and collects the problems and what the walk has met.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from jgt.program import jaxpr as jx
from jgt.program.constraints import constraint_equations, with_policy, wrap_in_checkpoint
from jgt.program.dims import Dims, coarse_dims, partition_spec
from jgt.program.equations import is_remat, is_scan, map_subprograms, policy_of
from jgt.program.jaxpr import Equation, Program, Var
from jgt.program.places import Place, manual_mesh, place_of
from jgt.replacements.replacement import ParameterPlace, Policy, Replacement, Site
from jgt.rules import Rules, SaveRule
from jgt.sharding.answers import RuleAnswers
from jgt.sharding.placement import CallContext
from jgt.sharding.saves import SavePolicy


def rewrite(
    program: Program,
    arguments: Mapping[int, tuple[Dims, Dims]],
    rules: Rules,
    site: CallContext,
    replacements: Sequence[Replacement],
    *,
    parameters: Sequence[ParameterPlace] = (),
    applies: bool = True,
) -> tuple[Program, RuleAnswers]:
    """The program with these arguments pinned (number → dims of the value and of its cotangent) and every rule applied, and the answers.

    Without `applies` nothing is changed: the rules are only checked against the program.
    """
    rewriter = _Rewriter(rules, site, replacements, parameters, applies=applies)
    pinned: dict[Var, Var] = {}
    eqns: list[Equation] = []
    # Arguments have no equation behind which a constraint could be put, so theirs come first.
    for index, (forward, backward) in arguments.items() if rewriter.constrains else ():
        var = jx.body(program).invars[index]
        shape = jx.shape_of(var)
        free = (coarse_dims(site.free_dims(dims), shape, site.sizes) for dims in (forward, backward))
        value, cotangent = (rewriter.sharding(dims, site.around) for dims in free)
        new, pinned[var] = constraint_equations(var, value, cotangent, None)
        eqns += new
        rewriter.layouts[var] = value, cotangent
        rewriter.answers.inserted.append(("", "", "", index, var, value, cotangent))
    new_program, saves = rewriter.program(program, Place(), pinned, eqns)
    # Names that no scan and no checkpoint contains make the whole function one region.
    if saves and applies:
        new_program = wrap_in_checkpoint(new_program, SavePolicy.of(saves), in_scan=False)
    return new_program, rewriter.answers


def rewrite_part(
    program: Program,
    place: Place,
    rules: Rules,
    site: CallContext,
    replacements: Sequence[Replacement],
    arguments: Mapping[int, Dims] | None = None,
) -> Program:
    """A part of a program that lies at this place, with every rule applied. Nothing is reported: the whole was checked before.

    site: the surroundings of the whole. arguments: the dims of the arguments that are pinned outside, by number.
    """
    rewriter = _Rewriter(rules, replace(CallContext.here(site.mesh), uneven=site.uneven), replacements, (), applies=True, is_part=True)
    for index, dims in (arguments or {}).items():
        sharding = rewriter.sharding(dims)
        rewriter.layouts[jx.body(program).invars[index]] = sharding, sharding
    new, saves = rewriter.program(program, place)
    return wrap_in_checkpoint(new, SavePolicy.of(saves), in_scan=True) if saves else new


class _Rewriter:
    """One walk through a program. The answers of the rules are collected on the way, and read at the end."""

    def __init__(
        self,
        rules: Rules,
        site: CallContext,
        replacements: Sequence[Replacement],
        parameters: Sequence[ParameterPlace],
        *,
        applies: bool,
        is_part: bool = False,
    ):
        self._site, self._replacements, self._applies = site, replacements, applies
        self._where = Site(mesh=site.mesh, free=site.free_dims, parameters=parameters, is_part=is_part)
        # On one device there is nothing to lay out.
        self.constrains = applies and site.mesh.size > 1
        self.layouts: dict[Var, tuple[NamedSharding, NamedSharding]] = {}
        """The shardings of pinned arguments and of their cotangents."""
        self.answers = RuleAnswers(rules, site)
        # Tensors that a rule makes whole and that a replacement takes in parts.
        self._split: set[Var] = set()

    def sharding(self, dims: Dims, manual: AbstractMesh | None = None, free: int = 0) -> NamedSharding:
        """The sharding of these dims, on the mesh of a shard_map around if there is one."""
        return NamedSharding(self._site.mesh if manual is None else manual, partition_spec(dims, free=free))

    def program(
        self,
        program: Program,
        around: Place,
        pinned: dict[Var, Var] | None = None,
        eqns: list[Equation] | None = None,
        *,
        guarded: bool = False,
        policies: tuple[Policy | None, ...] = (),
    ) -> tuple[Program, dict[str, SaveRule]]:
        """The rewritten program, and the save rules inside it that no checkpoint region has taken yet.

        guarded: whether the program is inside a jax.checkpoint of the model's own, which will take them. policies: the policies of the
        checkpoints around the program.
        """
        for replacement in self._replacements:
            replaced = replacement.apply(program, around, replace(self._where, policies=policies, is_whole=eqns is not None))
            self.answers.add(replaced.matches, replaced.problems)
            if self._applies:
                program = replaced.program
                self._split |= replaced.split
                self.answers.inserted += replaced.inserted
        renamed = dict(pinned or {})
        new_eqns = list(eqns or ())
        saves: dict[str, SaveRule] = {}
        # Found before the walk, because the equations that read a value decide whether it leaves a signal.
        consumers = _consumers(program, around)
        for equation in jx.body(program).eqns:
            place = place_of(equation, around)
            self.answers.signals.add(place.path)
            rewritten, inner_saves = self._equation(equation, place, renamed, guarded=guarded, policies=policies)
            new_eqns.append(rewritten)
            self.answers.add_saves(saves, inner_saves)
            self.answers.add_saves(saves, self.answers.save_of(equation, place))
            for var in equation.outvars:
                extra, new = self._pin(equation, var, place, consumers.get(var, ()))
                if extra:
                    new_eqns += extra
                    renamed[var] = new
        old = jx.body(program)
        # The same object if nothing changed: `map_subprograms` compares by identity, and an equation around then stays
        # as it is.
        if len(new_eqns) == len(old.eqns) and all(a is b for a, b in zip(new_eqns, old.eqns, strict=True)):
            return program, saves
        outvars = [renamed.get(v, v) if jx.is_var(v) else v for v in old.outvars]
        return jx.with_body(program, eqns=new_eqns, outvars=outvars), saves

    def _equation(
        self, equation: Equation, place: Place, renamed: Mapping[Var, Var], *, guarded: bool, policies: tuple[Policy | None, ...]
    ) -> tuple[Equation, dict[str, SaveRule]]:
        saves: dict[str, SaveRule] = {}
        inside = (*policies, policy_of(equation)) if is_remat(equation) else policies

        def change(inner: Program) -> Program:
            new, inner_saves = self.program(inner, place, guarded=guarded or is_remat(equation), policies=inside)
            if inner_saves and is_scan(equation) and not guarded:
                # The body of a layer scan becomes one region: what it saves is saved once per layer.
                return wrap_in_checkpoint(new, SavePolicy.of(inner_saves), in_scan=True) if self._applies else new
            self.answers.add_saves(saves, inner_saves)
            return new

        new = map_subprograms(equation, change)
        # A checkpoint of the model takes the rules of all names inside it, so none are left for a region around it.
        if saves and is_remat(equation):
            new, saves = with_policy(new, SavePolicy.of(saves, policy_of(equation), named=False)), {}
        invars = [renamed.get(a, a) if jx.is_var(a) else a for a in equation.invars]
        return (new.replace(invars=invars) if any(a is not b for a, b in zip(invars, new.invars, strict=True)) else new), saves

    def _pin(self, equation: Equation, var: Var, place: Place, consumers: Sequence[Place]) -> tuple[list[Equation], Var]:
        """The constraints that follow an equation for one of its results, and the variable to read in its stead."""
        rank = len(jx.shape_of(var)) - place.num_vmaps
        # A scalar has nothing to shard, and a result that is dropped has no variable that a constraint could read.
        if jx.is_dropped(var) or rank <= 0:
            return [], var
        forward, backward, what = self.answers.of_value(equation, var, place, consumers, rank)
        # The shard_map may be inside the function, where the equation knows it, or around the call.
        manual = manual_mesh(equation) or self._site.around
        dims = self.answers.dims_of(forward, var, place, manual, what)
        dims_back = self.answers.dims_of(backward, var, place, manual, f"{what} (backward)")
        value, cotangent = (None if d is None else self.sharding(d, manual, place.num_vmaps) for d in (dims, dims_back))
        # Without a backward rule the cotangent gets the forward spec, as under JAX's own constraint.
        cotangent = cotangent or value
        if cotangent is None and _is_narrowing(equation) and equation.invars[0] in self.layouts:
            # An argument travels after the cast. Without the constraint, the partitioner may gather first and cast then.
            value, cotangent = self.layouts[equation.invars[0]]
            what = "cast of an argument"
        value = cotangent if var in self._split else value
        if cotangent is None or self._site.mesh.size == 1:
            return [], var
        # In a pipeline, too, whose parts get the same constraints where they run.
        where = " and ".join(dict.fromkeys(rule.where for rule in (forward, backward) if rule is not None))
        self.answers.inserted.append((where, what, place.path, equation, var, value, cotangent))
        if not self._applies:
            return [], var
        return constraint_equations(var, value, cotangent, equation)


def _is_narrowing(equation: Equation) -> bool:
    """Whether an equation casts a float to a narrower type."""
    if equation.primitive.name != "convert_element_type" or not jx.is_var(equation.invars[0]):
        return False
    old, new = jx.dtype_of(equation.invars[0]), jx.dtype_of(equation.outvars[0])
    return jnp.issubdtype(new, jnp.floating) and new.itemsize < old.itemsize


def _consumers(program: Program, around: Place) -> dict[Var, list[Place]]:
    """The places that read each variable of a program; what it returns is read where the program stands."""
    consumers: dict[Var, list[Place]] = {}
    for equation in jx.body(program).eqns:
        place = place_of(equation, around)
        for atom in equation.invars:
            if jx.is_var(atom):
                consumers.setdefault(atom, []).append(place)
    for atom in jx.body(program).outvars:
        if jx.is_var(atom):
            consumers.setdefault(atom, []).append(around)
    return consumers
