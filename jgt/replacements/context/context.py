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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims, show_dims
from jgt.program.jaxpr import Equation, Program
from jgt.program.places import Place, line_of, manual_mesh, mesh_around, place_of
from jgt.program.tracing import tensor_name
from jgt.replacements.context.blocks import XLA_BLOCKS, BlockKernel
from jgt.replacements.context.checks import is_zigzag, order_problems, shape_problems
from jgt.replacements.context.cudnn import CUDNN_BLOCKS, obstacle
from jgt.replacements.context.pairs import UnreadableError
from jgt.replacements.context.plans import attend
from jgt.replacements.context.proof import Attention, attention_in
from jgt.replacements.context.region import Region, made_inside, region_between, replaced_by
from jgt.replacements.context.split import SequenceSplit
from jgt.replacements.proof import equations_for
from jgt.replacements.replacement import Replaced, Site
from jgt.rules import ContextRule, Match, Rules, match_context, match_tensor


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
            name, place = tensor_name(equation), place_of(equation, around)
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
        region = region_between(program, named)
        # One token at a time: its row is not split.
        if sizes.get(rule.axis, 1) == 1 or jx.shape_of(region.rows[0])[1:2] == (1,):
            return program, []
        dims, wrong = self._dims(rule, place, region, site, manual)
        wrong += shape_problems(rule, region, dims, sizes)
        if wrong:
            return program, wrong
        try:
            attention = attention_in(jx.program_of(program, region.operands, region.eqns, [region.result]))
        except UnreadableError as error:
            line = next((line for line in map(line_of, reversed(region.eqns)) if line), "the attention")
            return program, [f"{rule.where}: context: {line} is not attention that can be split along the sequence: {error}"]
        wrong = list(order_problems(rule, attention, jx.shape_of(region.rows[0])[1], sizes))
        if wrong:
            return program, wrong
        split = SequenceSplit(
            attention=attention,
            method=rule.method,
            axis=rule.axis,
            num=sizes[rule.axis],
            batch=dims[0],
            heads=dims[2],
            is_zigzag=is_zigzag(rule, attention),
            is_exchanged=is_zigzag(rule, attention) and rule.order != "zigzag_rows",
            kernel=_kernel(attention, region, here),
        )

        def run(*operands: jax.Array) -> list[jax.Array]:
            # A sink may have its heads in groups.
            sink = [] if attention.sink is None else [jnp.ravel(operands[-1])]
            return [attend(split, here, *operands[: len(operands) - len(sink)], *sink)]

        operands = [*region.rows, *attention.operands]
        new = equations_for(run, region.eqns[-1], operands, [region.result])
        return replaced_by(program, region, [*made_inside(program, attention), *new]), []

    def _dims(self, rule: ContextRule, place: Place, region: Region, site: Site, manual: Sequence[str]) -> tuple[Dims, list[str]]:
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


def _kernel(attention: Attention, region: Region, mesh: Mesh | AbstractMesh) -> BlockKernel:
    """cuDNN's where the model calls it, or where its devices have it."""
    device: Any = mesh.devices.flat[0] if isinstance(mesh, Mesh) else mesh.abstract_device
    q, k, v = map(jx.struct_of, region.rows)
    return CUDNN_BLOCKS if attention.is_fused or not obstacle(q, k, v, device) else XLA_BLOCKS
