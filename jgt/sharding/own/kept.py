"""The layout that a program brings along beside rules: kept as rules, and what rules cannot change of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jax.sharding import AbstractMesh, Mesh

from jgt.program.dims import show_dims
from jgt.program.jaxpr import Program
from jgt.program.places import is_manual, line_of
from jgt.rules import Rules, SignalRule, SpecRule, match_tensor
from jgt.sharding.own.layout import OwnLayout, equations


def with_own(rules: Rules, layouts: Sequence[OwnLayout]) -> tuple[Rules, list[str]]:
    """The rules and, if they keep them, the layouts that the program asks for; and a problem for each that a rule is about, too."""
    if rules.own == "drop":
        return rules, []
    kept, problems = dict[tuple[str, str], SignalRule](), dict[str, None]()
    for one in (one for one in layouts if not one.is_derived):
        rule = match_tensor(rules, one.name, one.signal, len(one.dims)).rule
        if rule is not None:
            what = f"the tensor {one.name} at {one.signal or 'the top'}, for which the program asks {show_dims(one.dims)} at {one.where}"
            problems[f"{rule.where}: {rule.pattern}: is about {what}. Remove one of them, or write own: drop"] = None
            continue
        spec = _OwnSpec(pattern=one.name, spec=one.dims, where=one.where)
        kept[one.signal, one.name] = SignalRule(pattern=one.signal or "**", tensors=(spec,), where=one.where)
    # The innermost first: a rule covers signals inside of its own.
    own = sorted(kept.values(), key=lambda rule: -len(rule.pattern.split("/")) if rule.pattern != "**" else 0)
    return replace(rules, signals=(*rules.signals, *own)), list(problems)


class _OwnSpec(SpecRule):
    """A spec of the program's own. Its axes need not divide the dims: JAX takes that, and XLA pads."""

    def misfit_problems(self, *args: object, **kwargs: object) -> dict[int, str]:
        return {}


def manual_problems(program: Program, mesh: Mesh | AbstractMesh) -> Iterator[str]:
    """A problem for each line with a shard_map over another mesh than this one: it is a program for each device of its own."""
    for line, own in {line_of(e): e.params["mesh"] for e in equations(program) if is_manual(e)}.items():
        if dict(own.shape) != dict(mesh.shape):
            over, here = (", ".join(f"{axis}={size}" for axis, size in one.shape.items()) for one in (own, mesh))
            yield f"{line}: a shard_map over {over} is part of the program, and the mesh is {here}. Use a mesh with the same axes and sizes"
