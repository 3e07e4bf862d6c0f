"""Which matmuls of a program wait for an axis, by the rules: found, proven to be nothing but matmuls, and replaced by rings.

A rule `overlap: tensor` names no matmul, because the other rules do already. With sequence parallelism a block reads a tensor that is whole
going forward, while its cotangent is split along the sequence: the matmuls that read it wait for an all-gather. And a block ends with a
matmul whose result is split along the sequence where it leaves the block: it waits for a reduce-scatter. So what is looked for is

    gather     tensors: {t: [batch, null, null]} with backward: {tensors: {t: [batch, tensor, null]}}, and all that reads t are matmuls
    scatter    a matmul whose result reaches, by elementwise steps, a value that out: or tensors: splits as [batch, tensor, null]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
from jax.sharding import AbstractMesh, Mesh

from jgt.program import jaxpr as jx
from jgt.program.constraints import with_policy
from jgt.program.dims import Dims
from jgt.program.equations import is_recomputed, policy_of
from jgt.program.jaxpr import Equation, Program, Var
from jgt.program.places import Place, line_of, manual_mesh, place_of
from jgt.program.tracing import tensor_name
from jgt.replacements.device_plan import MeaningPolicy
from jgt.replacements.proof import Matmul, equations_for, matmul_of
from jgt.replacements.replacement import Replaced, Site
from jgt.replacements.ring import Ring, gather_and_multiply, multiply_and_scatter
from jgt.rules import Match, OverlapRule, Rules, SpecRule, match_out, match_overlap, match_tensor, prefixes

_ELEMENTWISE = ("add", "add_any", "sub", "mul", "convert_element_type", "name", "copy")
"""A sum may pass through these operations before it is scattered: each of them treats every row on its own."""


@dataclass(frozen=True)
class Overlap:
    """The replacement that `overlap:` asks for."""

    rules: Rules

    def apply(self, program: Program, around: Place, site: Site) -> Replaced:
        """The program with rings in it. A checkpoint of the model treats a ring as it would treat the ring's matmuls."""
        search = _Search(program, around, self.rules, site)
        search.find()
        new = _with_rings(program, search.found) if search.found else program
        return Replaced(
            program=_with_policies(new), split=frozenset(search.split), matches=tuple(search.matches), problems=tuple(search.problems)
        )


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Matmuls that share a ring: `run(*operands)` returns their results."""

    matmuls: tuple[Matmul, ...]
    operands: tuple[Var, ...]
    run: Callable[..., list[jax.Array]]


@dataclass
class _Search:
    """One search through a program's equations. The lists are filled on the way."""

    program: Program
    around: Place
    rules: Rules
    site: Site
    found: list[_Group] = field(default_factory=list[_Group])
    split: list[Var] = field(default_factory=list[Var])
    matches: list[Match[OverlapRule]] = field(default_factory=list[Match[OverlapRule]])
    problems: list[str] = field(default_factory=list[str])

    def find(self) -> None:
        """Fills the lists."""
        for equation in jx.body(self.program).eqns:
            place = place_of(equation, self.around)
            match = match_overlap(self.rules, place.path)
            # Rows of a vmap have a dim that no spec names.
            if match.rule is None or match.rule.axis not in self.site.sizes or place.num_vmaps:
                continue
            if tensor_name(equation) is not None:
                self._gather(equation, place, match, match.rule)
            elif (matmul := matmul_of(equation)) is not None and not any(m.equation is equation for one in self.found for m in one.matmuls):
                self._scatter(matmul, match, match.rule)

    def _gather(self, equation: Equation, place: Place, match: Match[OverlapRule], rule: OverlapRule) -> None:
        """The matmuls that read a tensor which is whole going forward and split going backward."""
        name, var = tensor_name(equation) or "", equation.outvars[0]
        ahead = self._dims(match_tensor(self.rules, name, place.path, len(jx.shape_of(var))).rule, equation, var)
        behind = self._dims(match_tensor(self.rules, name, place.path, len(jx.shape_of(var)), backward=True).rule, equation, var)
        dim = _split_dim(behind, rule.axis)
        if ahead is None or behind is None or dim is None or any(rule.axis in axes for axes in ahead):
            return
        self.matches.append(match)
        readers, others = self._readers(var)
        if others or not readers:
            self.problems.append(_not_only_matmuls(rule, name, place, others))
            return
        if self._fits(readers, 1, rule):
            self.split.append(var)
            for same in _by_type(readers):
                ring = self._ring(rule.axis, dim, behind, same[0])
                run = gather_and_multiply(
                    ring, self._mesh(equation), keeps=any(is_recomputed(policy, same[0].dot) for policy in self.site.policies)
                )
                self._add(_Group(matmuls=same, operands=(same[0].rows, *(m.weights for m in same)), run=run), rule)

    def _scatter(self, matmul: Matmul, match: Match[OverlapRule], rule: OverlapRule) -> None:
        """A matmul whose result becomes a value that is split along another dim than its features."""
        for dims in self._reached(matmul):
            dim = _split_dim(dims, rule.axis)
            if dim is not None:
                self.matches.append(match)
                if self._fits([matmul], 0, rule):
                    run = multiply_and_scatter(self._ring(rule.axis, dim, dims, matmul), self._mesh(matmul.equation))
                    self._add(_Group(matmuls=(matmul,), operands=(matmul.rows, matmul.weights), run=run), rule)
                return

    def _add(self, one: _Group, rule: OverlapRule) -> None:
        # An axis of one device sends nothing.
        if self.site.sizes[rule.axis] > 1:
            self.found.append(one)

    def _ring(self, axis: str, dim: int, dims: Dims, matmul: Matmul) -> Ring:
        rows = tuple(tuple(a for a in axes if a != axis) for axes in dims)
        params = matmul.dot.params
        return Ring(axis=axis, dim=dim, rows=rows, precision=params["precision"], result=params["preferred_element_type"], sums=matmul.sums)

    def _mesh(self, equation: Equation) -> Mesh | AbstractMesh:
        return manual_mesh(equation) or self.site.mesh

    def _fits(self, matmuls: Sequence[Matmul], dim: int, rule: OverlapRule) -> bool:
        size = self.site.sizes[rule.axis]
        for m in matmuls:
            shape = jx.shape_of(m.weights)
            if shape[dim] % size:
                self.problems.append(
                    f"{rule.where}: overlap: dim {dim} of the weights {list(shape)} of the matmul at {line_of(m.equation)} has size "
                    f"{shape[dim]}, which {rule.axis}={size} does not divide"
                )
                return False
        return True

    def _dims(self, rule: SpecRule | None, equation: Equation, var: Var) -> Dims | None:
        """The axes of each dim of a value that a rule constrains."""
        if rule is None:
            return None
        manual = manual_mesh(equation)
        return self.site.free(rule.dims(len(jx.shape_of(var))), () if manual is None else manual.manual_axes)

    @functools.cached_property
    def _consumers(self) -> Mapping[Var, list[Equation | None]]:
        """The equations that read each variable; None for the end of the program."""
        consumers: dict[Var, list[Equation | None]] = {}
        for equation in jx.body(self.program).eqns:
            for atom in dict.fromkeys(a for a in equation.invars if jx.is_var(a)):
                consumers.setdefault(atom, []).append(equation)
        for atom in jx.body(self.program).outvars:
            if jx.is_var(atom):
                consumers.setdefault(atom, []).append(None)
        return consumers

    def _readers(self, var: Var) -> tuple[list[Matmul], list[str]]:
        """The matmuls that read a value or a cast of it as their rows, and the lines of everything else that reads it."""
        matmuls: list[Matmul] = []
        others: list[str] = []
        for equation in self._consumers.get(var, ()):
            matmul = None if equation is None else matmul_of(equation)
            if equation is not None and equation.primitive.name == "convert_element_type":
                more, rest = self._readers(equation.outvars[0])
                matmuls += more
                others += rest
            elif matmul is not None and matmul.rows is var and matmul.weights is not var:
                matmuls.append(matmul)
            else:
                others.append("the end of the function" if equation is None else line_of(equation) or equation.primitive.name)
        return matmuls, others

    def _reached(self, matmul: Matmul) -> Iterator[Dims]:
        """The dims that rules give to the values that a result becomes, step by step and in order."""
        var, equation = matmul.result, matmul.equation
        while True:
            if (dims := self._dims(self._rule_of(equation, var), equation, var)) is not None:
                yield dims
            consumers = [e for e in self._consumers.get(var, ()) if e is not None]
            if len(consumers) != 1 or consumers[0].primitive.name not in _ELEMENTWISE:
                return
            (equation,) = consumers
            if jx.shape_of(equation.outvars[0]) != jx.shape_of(var):
                return
            var = equation.outvars[0]

    def _rule_of(self, equation: Equation, var: Var) -> SpecRule | None:
        """The rule that constrains a value: by its name, or by the outermost signal that it leaves."""
        place, rank = place_of(equation, self.around), len(jx.shape_of(var))
        name = tensor_name(equation)
        if name is not None and (rule := match_tensor(self.rules, name, place.path, rank).rule):
            return rule
        places = [self.around if e is None else place_of(e, self.around) for e in self._consumers.get(var, ())]
        for signal in reversed(prefixes(place.path)):
            leaves = signal and any(not one.inside(tuple(signal.split("/"))) for one in places)
            if leaves and (rule := match_out(self.rules, signal, rank).rule):
                return rule
        return None


def _not_only_matmuls(rule: OverlapRule, name: str, place: Place, others: Sequence[str]) -> str:
    read = f"is read at {others[0]}, which is not such a matmul" if others else "is not read by any"
    return (
        f"{rule.where}: overlap: only matmuls of rows [..., k] with weights [k, m] hide how their rows are gathered, but the tensor "
        f"{name} at {place.path} {read}. Name a tensor that only they read, or give {name} one spec forward and backward"
    )


def _split_dim(dims: Dims | None, axis: str) -> int | None:
    """The dim that this axis alone splits, if it is not the last one, which matmuls contract."""
    positions = [dim for dim, axes in enumerate(dims or ()) if axis in axes]
    return (
        positions[0]
        if dims and len(positions) == 1 and dims[positions[0]] == (axis,) and positions[0] < len(dims) - 1 and not dims[-1]
        else None
    )


def _by_type(matmuls: Sequence[Matmul]) -> Iterator[tuple[Matmul, ...]]:
    """Matmuls that read equal rows in one type, and make results of one type: those that can share a ring."""
    groups: dict[tuple[object, ...], list[Matmul]] = {}
    for m in matmuls:
        key = (jx.dtype_of(m.rows), str(m.dot.params["precision"]), m.dot.params["preferred_element_type"], m.sums)
        groups.setdefault(key, []).append(m)
    return (tuple(group) for group in groups.values())


# -- the program with rings --------------------------------------------------------------------------------------


def _with_rings(program: Program, groups: Sequence[_Group]) -> Program:
    """The program in which one equation stands for the matmuls of each group, where the first of them stood.

    The others' weights may be made after that, by casts, say. So what a ring reads comes before it.
    """
    eqns = jx.body(program).eqns
    made_by = {var: equation for equation in eqns for var in equation.outvars}
    of = {id(m.equation): one for one in groups for m in one.matmuls}
    new: list[Equation] = []
    done: set[int] = set()

    def add(equation: Equation) -> None:
        if id(equation) in done:
            return
        one = of.get(id(equation))
        done.update([id(equation)] if one is None else [id(m.equation) for m in one.matmuls])
        for atom in equation.invars if one is None else one.operands:
            if jx.is_var(atom) and atom in made_by:
                add(made_by[atom])
        new.extend([equation] if one is None else equations_for(one.run, equation, one.operands, [m.result for m in one.matmuls]))

    for equation in eqns:
        add(equation)
    return jx.with_body(program, eqns=new, outvars=jx.body(program).outvars)


def _with_policies(program: Program) -> Program:
    """The program whose checkpoints treat rings inside them as their matmuls."""
    eqns = [_with_policy(equation) for equation in jx.body(program).eqns]
    return jx.with_body(program, eqns=eqns, outvars=jx.body(program).outvars)


def _with_policy(equation: Equation) -> Equation:
    policy = policy_of(equation)
    return equation if policy is None else with_policy(equation, MeaningPolicy(policy))
