"""Attention in a traced program, replaced by attention on a split sequence: found, proven, replaced.

    axes: {batch: [data, fsdp]}
    inputs: [batch, seq, ...]
    signals:
      layers/*: {out: [batch, seq, null]}
      layers/attn:
        context: {axis: seq, method: ring}

The model names q, k and v, [b, s, heads, h], and the result of its attention, heads [b, s, heads, h]. The equations between them are
replaced, whoever wrote them. The batch is split in the same way as the inputs. A rule for q under `tensors:` may split the heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims, num_parts, show_dims
from jgt.program.jaxpr import Equation, Program, Var
from jgt.program.places import Place, manual_mesh, mesh_around, place_of
from jgt.replacements.context.blocks import XLA_BLOCKS, BlockKernel
from jgt.replacements.context.cudnn import CUDNN_BLOCKS, obstacle
from jgt.replacements.context.pairs import UnreadableError
from jgt.replacements.context.plans import SequenceSplit, attend
from jgt.replacements.context.proof import Attention, attention_in
from jgt.replacements.proof import equations_for
from jgt.replacements.replacement import Replaced, Site
from jgt.rules import ContextRule, Match, Rules, match_context, match_tensor


@dataclass(frozen=True, kw_only=True)
class _Region:
    """The equations between four named tensors.

    replaced: the identities of those that depend on q, k or v. operands: q, k, v and what else the equations read. reader: an equation
    outside that reads a value of the replaced ones.
    """

    eqns: tuple[Equation, ...]
    replaced: frozenset[int]
    operands: tuple[Var, ...]
    result: Var
    reader: Equation | None

    @property
    def rows(self) -> tuple[Var, ...]:
        """q, k and v."""
        return self.operands[:3]


@dataclass(frozen=True)
class Context:
    """The replacement that `context:` asks for."""

    rules: Rules

    def apply(self, program: Program, around: Place, site: Site) -> Replaced:
        """The program whose attention runs on a split sequence."""
        names: dict[str, tuple[Equation, Place]] = {}
        matches: list[Match[ContextRule]] = []
        problems: list[str] = []
        for equation in jx.body(program).eqns:
            name, place = jx.tensor_name(equation), place_of(equation, around)
            match = match_context(self.rules, place.path)
            # Rows of a vmap have a dim that no spec names.
            if name is None or match.rule is None or place.num_vmaps or name not in match.rule.between:
                continue
            # In a loop in Python the names come again; each result belongs to the q, k and v before it.
            names[name] = equation, place
            if name != match.rule.between[-1]:
                continue
            found = [names.pop(one, None) for one in match.rule.between]
            if None in found:
                missing = ", ".join(one for one, it in zip(match.rule.between, found, strict=True) if it is None)
                problems.append(f"{match.rule.where}: context: {name} at {place.path} has no {missing} before it, named beside it")
                continue
            matches.append(match)
            new, wrong = self._replaced(program, match.rule, [one[0] for one in found if one], place, site)
            problems += wrong
            program = new if not wrong else program
        return Replaced(program=program, matches=tuple(matches), problems=tuple(dict.fromkeys(problems)))

    def _replaced(
        self, program: Program, rule: ContextRule, named: Sequence[Equation], place: Place, site: Site
    ) -> tuple[Program, list[str]]:
        here = manual_mesh(named[0]) or mesh_around() or site.mesh
        manual = () if isinstance(here, Mesh) else here.manual_axes
        sizes = dict(here.shape)
        region = _region(program, named)
        # One token at a time: its row is not split.
        if sizes.get(rule.axis, 1) == 1 or jx.shape_of(region.rows[0])[1:2] == (1,):
            return program, []
        dims, wrong = self._dims(rule, place, region, site, manual)
        wrong += _shape_problems(rule, region, dims, sizes)
        if wrong:
            return program, wrong
        try:
            attention = attention_in(jx.program_of(program, region.operands, region.eqns, [region.result]))
        except UnreadableError as error:
            line = next((line for line in map(jx.line_of, reversed(region.eqns)) if line), "the attention")
            return program, [f"{rule.where}: context: {line} is not attention that can be split along the sequence: {error}"]
        wrong = list(_order_problems(rule, attention, jx.shape_of(region.rows[0])[1], sizes))
        if wrong:
            return program, wrong
        split = SequenceSplit(
            attention=attention,
            method=rule.method,
            axis=rule.axis,
            num=sizes[rule.axis],
            batch=dims[0],
            heads=dims[2],
            is_zigzag=_is_zigzag(rule, attention),
            kernel=_kernel(attention, region, here),
        )

        def run(*operands: jax.Array) -> list[jax.Array]:
            return [attend(split, here, *operands)]

        operands = [*region.rows, *(one.var for one in attention.pairs.operands)]
        new = equations_for(run, region.eqns[-1], operands, [region.result])
        return _with(program, region, [*_made_inside(program, attention), *new]), []

    def _dims(self, rule: ContextRule, place: Place, region: _Region, site: Site, manual: Sequence[str]) -> tuple[Dims, list[str]]:
        """The axes of the dims of q, and what is wrong with its rule."""
        rank = len(jx.shape_of(region.rows[0]))
        inputs = next((one.dims(rank) for one in self.rules.inputs if one.rank < rank), ((),) * rank)
        wrong: list[str] = []
        for name in (rule.between[0], rule.between[-1]):
            spec = match_tensor(self.rules, name, place.path, rank).rule
            dims = None if spec is None else spec.dims(rank)
            if spec is not None and dims is not None and dims[1] != (rule.axis,):
                better = show_dims((dims[0], (rule.axis,), *dims[2:]))
                wrong.append(f"{spec.where}: {spec.pattern}: context: splits the sequence of {name} over {rule.axis}. Write {better}")
        spec = match_tensor(self.rules, rule.between[0], place.path, rank).rule
        dims = (inputs[0], (rule.axis,), *[()] * (rank - 2)) if spec is None else spec.dims(rank)
        if rule.axis in dims[0]:
            wrong.append(f"{rule.where}: context: {rule.axis} splits the batch already. Take it out of the batch, or name another axis")
        return site.free(dims, manual), wrong


def _region(program: Program, named: Sequence[Equation]) -> _Region:
    """The equations that make the last of four named tensors from the first three, and those that only they need."""
    eqns = jx.body(program).eqns
    made = {var: equation for equation in eqns for var in equation.outvars}
    rows, result = [one.outvars[0] for one in named[:3]], named[3].invars[0]
    assert jx.is_var(result)
    needed: set[Var] = {result}
    inner: list[Equation] = []
    for equation in reversed(eqns):
        if any(var in needed and var not in rows for var in equation.outvars):
            inner.append(equation)
            needed.update(a for a in equation.invars if jx.is_var(a))
    inside = inner[::-1]
    # What depends on q, k or v is replaced; what doesn't may be read elsewhere, too.
    depends, replaced = set(rows), set[int]()
    for equation in inside:
        if _reads(equation, depends):
            depends.update(equation.outvars)
            replaced.add(id(equation))
    hidden = depends - {*rows, result}
    reader = next((e for e in eqns if id(e) not in replaced and _reads(e, hidden)), None)
    read = dict.fromkeys(a for e in inside for a in e.invars if jx.is_var(a))
    operands = [var for var in read if var not in made and var not in rows]
    return _Region(eqns=tuple(inside), replaced=frozenset(replaced), operands=(*rows, *operands), result=result, reader=reader)


def _reads(equation: Equation, variables: Collection[Var]) -> bool:
    return any(jx.is_var(a) and a in variables for a in equation.invars)


def _shape_problems(rule: ContextRule, region: _Region, dims: Dims, sizes: Mapping[str, int]) -> Iterator[str]:
    q, k, v = map(jx.shape_of, region.rows)
    names = ", ".join(rule.between[:3])
    if any(len(shape) != 4 for shape in (q, k, v)) or q[:2] != k[:2] or k[:3] != v[:3] or q[2] % k[2]:
        shapes = ", ".join(str(list(shape)) for shape in (q, k, v))
        yield f"{rule.where}: context: {names} have to be [b, s, heads, size], of equal b and s, but they are {shapes}"
        return
    if region.reader is not None:
        yield (
            f"{rule.where}: context: between {names} and {rule.between[-1]} a value is made that "
            f"{jx.line_of(region.reader) or region.reader.primitive.name} reads, too. It would be one of the whole sequence"
        )
    heads = num_parts(dims[2], sizes) * (sizes[rule.axis] if rule.method == "ulysses" else 1)
    for count, what in ((q[2], "heads"), (k[2], "key heads")):
        if count % heads:
            fits = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            yield (
                f"{rule.where}: context: {count} {what} do not divide by {heads}, as {rule.method} over {rule.axis}={sizes[rule.axis]} "
                f"needs it. Sizes that fit: {fits}; ring and gather leave the heads alone"
            )
    is_twice = rule.order == "zigzag"
    if q[1] % (sizes[rule.axis] * (2 if is_twice else 1)):
        yield _length(rule, q[1], sizes[rule.axis], is_twice=is_twice)


def _length(rule: ContextRule, length: int, size: int, *, is_twice: bool) -> str:
    n = 2 * size if is_twice else size
    below, above = length // n * n, -(-length // n) * n
    twice = " (zigzag order: twice the axis)" if is_twice else ""
    near = " or ".join(str(one) for one in (below, above) if one)
    return f"{rule.where}: context: a sequence of {length} does not divide by {n}{twice}. Take {near}"


def _is_zigzag(rule: ContextRule, attention: Attention) -> bool:
    return rule.order == "zigzag" or (rule.order is None and rule.method == "ring" and attention.is_causal and not attention.window)


def _order_problems(rule: ContextRule, attention: Attention, length: int, sizes: Mapping[str, int]) -> Iterator[str]:
    if rule.order == "zigzag" and (not attention.is_causal or rule.method == "ulysses"):
        why = "the attention is not causal" if rule.method != "ulysses" else "each device has the whole sequence in ulysses"
        yield f"{rule.where}: context: order: zigzag would change nothing, since {why}. Write order: plain"
    elif _is_zigzag(rule, attention) and length % (2 * sizes[rule.axis]):
        yield f"{_length(rule, length, sizes[rule.axis], is_twice=True)}, or write order: plain"


def _kernel(attention: Attention, region: _Region, mesh: Mesh | AbstractMesh) -> BlockKernel:
    """cuDNN's where the model calls it, or where its devices have it."""
    device: Any = mesh.devices.flat[0] if isinstance(mesh, Mesh) else None
    q, k = (jx.struct_of(var) for var in region.rows[:2])
    return CUDNN_BLOCKS if attention.is_fused or not obstacle(q, k, device) else XLA_BLOCKS


def _made_inside(program: Program, attention: Attention) -> list[Equation]:
    """The equations from inside of calls, such as jits, that make operands of the pairs."""
    source, found = attention.pairs.source, dict[int, Equation]()
    outside = {var for equation in jx.body(program).eqns for var in equation.outvars}

    def add(var: Var) -> None:
        equation = source.made.get(var)
        if equation is None or var in outside or id(equation) in found:
            return
        for a in equation.invars:
            if jx.is_var(a):
                add(a)
        found[id(equation)] = equation

    for one in attention.pairs.operands:
        add(one.var)
    return list(found.values())


def _with(program: Program, region: _Region, new: Sequence[Equation]) -> Program:
    """The program with new equations where the last ones of the region stood."""
    eqns: list[Equation] = []
    for equation in jx.body(program).eqns:
        if equation is region.eqns[-1]:
            eqns += new
        elif id(equation) not in region.replaced:
            eqns.append(equation)
    return jx.with_body(program, eqns=eqns, outvars=jx.body(program).outvars)
