"""The rewriter: a traced program and rules in, the same program with constraints and save policies out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jgt import jaxpr as jx
from jgt.jaxpr import Equation, Place, Program, Var
from jgt.problems import misfit_problems
from jgt.rules import Action, Matcher, SaveRule, SpecRule, expand, prefixes

Dims = tuple[tuple[str, ...], ...]


def partition_spec(dims: Dims, *, free: int = 0) -> PartitionSpec:
    """Expanded dims as JAX's PartitionSpec; the first `free` dims are left to the partitioner."""
    named = [axes[0] if len(axes) == 1 else axes or None for axes in dims[free:]]
    return PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * free, *named)


@dataclass(frozen=True)
class SavePolicy:
    """A remat policy by tensor name, over the policy that the model's own jax.checkpoint has.

    With `named` (a region that jgt made) a name without an action is kept; what has no name is recomputed.
    """

    actions: tuple[tuple[str, Action], ...]
    around: Any = None
    named: bool = False

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if jx.is_name(primitive, params):
            for name, action in self.actions:
                if name == params["name"]:
                    return _decide(action, name)(primitive, *avals, **params)
            if self.named:
                return _decide("keep", params["name"])(primitive, *avals, **params)
        return self.around(primitive, *avals, **params) if self.around is not None else False


def _decide(action: Action, name: str) -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name] if action == "keep" else [],
        names_which_can_be_offloaded=[name] if action == "offload" else [],
        offload_src="device",
        offload_dst="pinned_host",
    )


class Rewriter:
    """Rewrites programs by one set of rules on one mesh; `problems` and the matcher say what did not fit.

    stage: the signal whose layers a pipeline runs and its mesh axis, which no rule inside may name.
    """

    def __init__(self, matcher: Matcher, mesh: Mesh | AbstractMesh, stage: tuple[str, str] | None = None):
        self.matcher = matcher
        self.mesh = mesh
        self._stage = stage
        self._around = jx.mesh_around()
        self._claimed = jx.vmapped_axes()
        self.problems: list[str] = []

    def rewrite(self, program: Program, arguments: Mapping[int, tuple[Dims, Dims]]) -> Program:
        """The program with the given arguments pinned (index → dims forward, backward) and every rule applied."""
        pinned: dict[Var, Var] = {}
        eqns: list[Equation] = []
        invars = jx.body(program).invars
        for index, (forward, backward) in arguments.items():
            var = invars[index]
            ahead, behind = (self._sharding(self.unclaimed(dims), self._around) for dims in (forward, backward))
            new, pinned[var] = jx.constrained(var, ahead, behind, None)
            eqns += new
        new_program, saves = self._program(program, Place(), pinned, eqns)
        if saves:
            new_program = jx.checkpointed(new_program, _region(saves), in_scan=False)
        return new_program

    def rewrite_part(self, program: Program, place: Place) -> Program:
        """A part of a program that stands at a place, with every rule applied. Misfits were reported for the whole."""
        new, saves = self._program(program, place)
        return jx.checkpointed(new, _region(saves), in_scan=True) if saves else new

    def reserved(self, rule: SpecRule, dims: Dims, signals: Sequence[str], what: str) -> Iterator[str]:
        """The problem of a spec that names the pipeline's axis inside the pipeline."""
        if self._stage is None:
            return
        signal, axis = self._stage
        if any(map(self._in_stage, signals)) and any(axis in axes for axes in dims):
            yield (
                f"{rule.where}: {rule.pattern}: the {what} lies in the pipeline of {signal!r}, which has the axis {axis} for itself. "
                f"Take {axis} out of this spec; the pipeline splits the layers over it"
            )

    def _in_stage(self, path: str) -> bool:
        """Whether a signal lies in the one that a pipeline runs."""
        return self._stage is not None and f"{path}/".startswith(f"{self._stage[0]}/")

    def _program(
        self,
        program: Program,
        around: Place,
        pinned: dict[Var, Var] | None = None,
        eqns: list[Equation] | None = None,
        *,
        guarded: bool = False,
    ) -> tuple[Program, dict[str, SaveRule]]:
        """The rewritten program, and the save rules inside it that no checkpoint region has taken yet.

        guarded: it stands inside a checkpoint region of the model's own, which will take them.
        """
        renamed = dict(pinned or {})
        new_eqns = list(eqns or ())
        saves: dict[str, SaveRule] = {}
        consumers = _consumers(program, around)
        for equation in jx.body(program).eqns:
            place = jx.place_of(equation, around)
            self.matcher.see(place.path)
            rewritten, inner_saves = self._equation(equation, place, renamed, guarded=guarded)
            new_eqns.append(rewritten)
            self._add_saves(saves, inner_saves)
            self._add_saves(saves, self._save_of(equation, place))
            for var in equation.outvars:
                extra, new = self._pin(equation, var, place, consumers.get(var, ()))
                if extra:
                    new_eqns += extra
                    renamed[var] = new
        old = jx.body(program)
        if len(new_eqns) == len(old.eqns) and all(a is b for a, b in zip(new_eqns, old.eqns, strict=True)):
            return program, saves
        outvars = [renamed.get(v, v) if jx.is_var(v) else v for v in old.outvars]
        return jx.with_body(program, eqns=new_eqns, outvars=outvars), saves

    def _equation(
        self, equation: Equation, place: Place, renamed: Mapping[Var, Var], *, guarded: bool
    ) -> tuple[Equation, dict[str, SaveRule]]:
        saves: dict[str, SaveRule] = {}

        def change(inner: Program) -> Program:
            new, found = self._program(inner, place, guarded=guarded or jx.is_remat(equation))
            if found and jx.is_scan(equation) and not guarded:
                return jx.checkpointed(new, _region(found), in_scan=True)
            self._add_saves(saves, found)
            return new

        params = jx.map_subprograms(equation, change)
        if saves and jx.is_remat(equation):
            params = params or dict(equation.params)
            params["policy"] = SavePolicy(_actions(saves), around=params["policy"])
            saves = {}
        invars = [renamed.get(a, a) if jx.is_var(a) else a for a in equation.invars]
        if any(a is not b for a, b in zip(invars, equation.invars, strict=True)):
            equation = equation.replace(invars=invars)
        return (equation if params is None else equation.replace(params=params)), saves

    def _save_of(self, equation: Equation, place: Place) -> dict[str, SaveRule]:
        name = jx.tensor_name(equation)
        rule = None if name is None else self.matcher.save(name, place.path)
        if rule is not None and rule.action == "offload" and self._stage is not None and self._in_stage(place.path):
            self.problems.append(
                f"{rule.where}: save: {name}: offload is not possible inside a pipeline, whose buffers stay on the device. Use keep or recompute, or "
                "pipeline.remat"
            )
        return {} if rule is None or name is None else {name: rule}

    def _add_saves(self, saves: dict[str, SaveRule], more: Mapping[str, SaveRule]) -> None:
        for name, rule in more.items():
            other = saves.setdefault(name, rule)
            if other.action != rule.action:
                self.problems.append(
                    f"{rule.where}: save: {name}: {rule.action} here, but {other.action} at {other.where}, in one region that is recomputed. "
                    "A region tells values apart by name only: give the two tensors different names"
                )

    def _pin(self, equation: Equation, var: Var, place: Place, consumers: Sequence[Place]) -> tuple[list[Equation], Var]:
        shape = getattr(var.aval, "shape", None)
        if jx.is_dropped(var) or shape is None or len(shape) <= place.num_vmaps:
            return [], var
        rank = len(shape) - place.num_vmaps
        forward, backward, what = self._rules_of(equation, var, place, consumers, rank)
        manual = jx.manual_mesh(equation) or self._around
        ahead = self._checked(forward, var, place, manual, what)
        behind = self._checked(backward, var, place, manual, f"{what} (backward)")
        last = behind or ahead
        if last is None or self.problems:
            return [], var
        return jx.constrained(var, ahead, last, equation)

    def _rules_of(
        self, equation: Equation, var: Var, place: Place, consumers: Sequence[Place], rank: int
    ) -> tuple[SpecRule | None, SpecRule | None, str]:
        name = jx.tensor_name(equation)
        if name is not None:
            forward = self.matcher.tensor(name, place.path, rank)
            backward = self.matcher.tensor(name, place.path, rank, backward=True)
            if forward or backward:
                return forward, backward, f"tensor {name} at {place.path or 'the top'}"
        if not jnp.issubdtype(var.aval.dtype, jnp.floating):
            return None, None, ""
        forward, backward, left = None, None, ""
        for signal in reversed(prefixes(place.path)):
            region = tuple(signal.split("/")) if signal else ()
            if signal and any(not consumer.inside(region) for consumer in consumers):
                outer = self.matcher.out(signal, rank)
                outer_backward = self.matcher.out(signal, rank, backward=True)
                if forward is None and backward is None and (outer or outer_backward):
                    forward, backward, left = outer, outer_backward, signal
        return forward, backward, f"value that leaves {left}"

    def _dims(self, rule: SpecRule, var: Var, place: Place, manual: AbstractMesh | None) -> Dims:
        shape = var.aval.shape
        dims = expand(rule.spec, len(shape), range(place.num_vmaps))
        # A dim of size 1 broadcasts: there is nothing to shard. Manual axes are the shard_map's own business.
        wide = tuple(axes if size > 1 else () for axes, size in zip(dims, shape, strict=True))
        return self.unclaimed(wide, () if manual is None else manual.manual_axes)

    def unclaimed(self, dims: Dims, manual: Sequence[str] = ()) -> Dims:
        """Dims without the axes that a vmap or shard_map around has taken."""
        taken = self._claimed.union(manual, () if self._around is None else self._around.manual_axes)
        return tuple(tuple(axis for axis in axes if axis not in taken) for axes in dims) if taken else dims

    def _checked(self, rule: SpecRule | None, var: Var, place: Place, manual: AbstractMesh | None, what: str) -> NamedSharding | None:
        """The sharding that a rule gives a value, None where no axis is left to shard by; misfits are noted."""
        if rule is None:
            return None
        dims = self._dims(rule, var, place, manual)
        found = [
            *misfit_problems(rule, dims, var.aval.shape, dict((manual or self.mesh).shape), what),
            *self.reserved(rule, dims, [place.path], what),
        ]
        self.problems += found
        if self.problems or (manual is not None and set(manual.axis_names) == set(manual.manual_axes)):
            return None
        return self._sharding(dims, manual, place.num_vmaps)

    def _sharding(self, dims: Dims, manual: AbstractMesh | None = None, free: int = 0) -> NamedSharding:
        return NamedSharding(self.mesh if manual is None else manual, partition_spec(dims, free=free))


def _region(saves: Mapping[str, SaveRule]) -> SavePolicy:
    return SavePolicy(_actions(saves), named=True)


def _actions(saves: Mapping[str, SaveRule]) -> tuple[tuple[str, Action], ...]:
    return tuple(sorted((name, rule.action) for name, rule in saves.items()))


def _consumers(program: Program, around: Place) -> dict[Var, list[Place]]:
    """The places that read each variable of a program; what it returns is read where the program stands."""
    consumers: dict[Var, list[Place]] = {}
    for equation in jx.body(program).eqns:
        place = jx.place_of(equation, around)
        for atom in equation.invars:
            if jx.is_var(atom):
                consumers.setdefault(atom, []).append(place)
    for atom in jx.body(program).outvars:
        if jx.is_var(atom):
            consumers.setdefault(atom, []).append(around)
    return consumers
