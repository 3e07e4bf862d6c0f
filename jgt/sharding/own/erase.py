# pyright: basic
"""The layout that a program brings along, erased.

Many programs say where their values are: with `with_sharding_constraint`, with `reshard` and `out_sharding=` of Explicit meshes, with the
shardings of a jit inside. `erase` takes all of that out, so that rules may decide. Where the program has asked for a layout, the erased
one has a named tensor, and its named scopes are signals, so that rules can say the same, or something else, without a change in the model.
What rules of jgt have asked for stays, and so does what is inside a shard_map: there a layout is a part of the computation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.extend.linear_util as lu
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgt.program import jaxpr as jx
from jgt.program.dims import sharding_dims, show_dims
from jgt.program.equations import Around, is_call, map_subprograms
from jgt.program.jaxpr import Atom, Equation, Program, Var
from jgt.program.places import (
    NO_MESH,
    Place,
    in_rule,
    is_manual,
    line_of,
    manual_mesh,
    off_mesh,
    place_of,
    scopes_as_signals,
    under_mesh,
    with_auto_axes,
)
from jgt.program.retarget import plain_value
from jgt.program.scopes import PREFIX
from jgt.program.tracing import evaluate, trace
from jgt.sharding.own.layout import ON_A_DEVICE, OwnLayout, equations, requests_of

_MOVES = frozenset({"reshard", "sharding_constraint"})
"""Equations that say where a value is and nothing else."""


def erase(program: Program, around: Around = contextlib.nullcontext) -> tuple[Program, tuple[OwnLayout, ...]]:
    """The same program without a layout of its own, and the layouts that it asked for, in its order.

    around: the context in which it was traced, which derivative rules of its own need, too.
    """
    eraser = _Eraser(around=around, has_signals=any(PREFIX in str(e.source_info.name_stack) for e in equations(program)))
    with under_mesh(NO_MESH):
        return eraser.program(program, Place(), is_whole=True), tuple(eraser.layouts)


def _stays(equation: Equation) -> bool:
    """Whether an equation is left as it is: a rule asks for it, or it is inside a shard_map that leaves no axis Explicit."""
    mesh = manual_mesh(equation)
    return in_rule(equation) or (mesh is not None and not mesh.explicit_axes)


def _derived(equation: Equation) -> list[tuple[int, NamedSharding]]:
    """The result of a matmul with the layout that JAX derives for it."""
    is_matmul = equation.primitive.name == "dot_general" and manual_mesh(equation) is None and not in_rule(equation)
    aval: Any = equation.outvars[0].aval
    return [(0, aval.sharding)] if is_matmul and equation.ctx.cur_abstract_mesh.explicit_axes else []


@dataclass
class _Eraser:
    """One walk through a program. names: for each signal and operation, the layouts that have a name so far."""

    around: Around
    has_signals: bool
    layouts: list[OwnLayout] = field(default_factory=list[OwnLayout])
    names: dict[tuple[str, str], list[tuple[Any, ...]]] = field(default_factory=dict[tuple[str, str], list[tuple[Any, ...]]])

    def program(self, program: Program, around: Place, *, is_whole: bool = False) -> Program:
        inner = jx.body(program)
        values, eqns = _Values(), list[Equation]()
        arguments: dict[Any, int] = {var: n for n, var in enumerate(inner.invars)} if is_whole else {}
        for equation in inner.eqns:
            new = equation if self.has_signals else scopes_as_signals(equation)
            place = place_of(new, around)
            requests = requests_of(equation)
            derived = [] if requests else _derived(equation)
            moves = equation.primitive.name in _MOVES and not _stays(equation)
            if not moves:
                eqns.append(self._plain(new, place, values))
            for number, sharding in requests or derived:
                var = equation.outvars[number]
                # A scalar has no dim that a rule could be about.
                if jx.is_dropped(var) or len(jx.shape_of(var)) <= place.num_vmaps:
                    continue
                # Entering a region of Auto axes asks for nothing.
                if equation.primitive.name == "reshard" and not sharding.mesh.explicit_axes:
                    continue
                argument = arguments.get(equation.invars[0]) if moves and jx.is_var(equation.invars[0]) else None
                source = values.atom(equation.invars[0]) if moves else values.var(var)
                named = jx.new_var_like(values.var(var))
                layout = replace(self._layout(new, place, sharding, jx.shape_of(var), bool(derived)), argument=argument)
                eqns.append(_named(source, named, layout.name, new.replace(ctx=off_mesh(new))))
                values.put(var, named)
                self.layouts.append(layout)
            if moves and equation.outvars[0] not in values:
                values.put(equation.outvars[0], values.atom(equation.invars[0]))
        outvars = [values.atom(atom) for atom in inner.outvars]
        return _retyped(
            program,
            constvars=[values.var(v) for v in inner.constvars],
            invars=[values.var(v) for v in inner.invars],
            eqns=eqns,
            outvars=outvars,
        )

    def _inside(self, program: Program, place: Place) -> Program:
        # Derivative rules are traced when they are needed, in another context.
        with under_mesh(NO_MESH):
            return self.program(program, place)

    def _backward(self, rule: Callable[..., Any], place: Place) -> Callable[..., Any]:
        """A backward rule without its own layout. What it returns besides arrays stays."""

        def changed(*args: Any) -> Any:
            returned: list[Any] = []

            def run(*arrays: Any) -> Any:
                returned[:] = jax.tree.flatten(rule(*arrays))
                return [x for x in returned[0] if isinstance(x, jax.Array)]

            with self.around():
                program, _ = trace(run, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args))
            found = iter(evaluate(self._inside(program, place), args))
            leaves, tree = returned
            return jax.tree.unflatten(tree, [next(found) if isinstance(x, jax.Array) else x for x in leaves])

        return changed

    def _layout(self, equation: Equation, place: Place, sharding: NamedSharding, shape: tuple[int, ...], is_derived: bool) -> OwnLayout:
        # A vmap puts dims in front, which rules do not count.
        dims, name = sharding_dims(sharding, len(shape)), equation.primitive.name
        dims, of_vmap = dims[place.num_vmaps :], dims[: place.num_vmaps]
        known = self.names.setdefault((place.path, name), [])
        # The same layout of the same operation in the same region is one tensor, as in unrolled layers. A derived one may be unknown here.
        key = shape if is_derived else dims
        if key not in known:
            known.append(key)
        number = known.index(key)
        problem = f"a vmap splits its rows over {show_dims(of_vmap)}" if any(of_vmap) else ""
        problem = f"sums that are not added up yet: {sharding.spec}" if sharding.spec.unreduced else problem
        name = f"{name}_{number + 1}" if number else name
        where, shape = line_of(equation), shape[place.num_vmaps :]
        return OwnLayout(signal=place.path, name=name, dims=dims, shape=shape, where=where, is_derived=is_derived, problem=problem)

    def _plain(self, equation: Equation, place: Place, values: _Values) -> Equation:
        """An equation without layout, and on no mesh."""
        invars, outvars = [values.atom(a) for a in equation.invars], [values.var(v) for v in equation.outvars]
        if _stays(equation):
            return equation.replace(invars=invars, outvars=outvars)
        if is_manual(equation):
            equation = equation.replace(params={**equation.params, "mesh": with_auto_axes(equation.params["mesh"])})
        if equation.primitive.name not in ON_A_DEVICE:
            equation = map_subprograms(equation, lambda inner: self._inside(inner, place), self.around)
            equation = _with_backward_rule(equation, lambda rule: self._backward(rule, place))
        return _without_layout(equation.replace(ctx=off_mesh(equation), invars=invars, outvars=outvars))


class _Values:
    """The values of a program, with types that name no mesh."""

    def __init__(self) -> None:
        self._new: dict[Var, Atom] = {}

    def __contains__(self, var: Var) -> bool:
        return var in self._new

    def put(self, var: Var, atom: Atom) -> None:
        self._new[var] = atom

    def var(self, var: Var) -> Any:
        if var not in self._new:
            aval = plain_type(var.aval)
            self._new[var] = var if aval is var.aval else type(var)(aval)
        return self._new[var]

    def atom(self, atom: Any) -> Any:
        return self.var(atom) if jx.is_var(atom) else Literal(plain_value(atom.val), plain_type(atom.aval))


def plain_type(aval: Any) -> Any:
    """The type of an array without its layout."""
    sharding = getattr(aval, "sharding", None)
    if not (isinstance(aval, ShapedArray) and isinstance(sharding, NamedSharding) and sharding.mesh.axis_names):
        return aval
    mesh = with_auto_axes(sharding.mesh) if sharding.mesh.manual_axes else NO_MESH
    return aval if mesh == sharding.mesh else aval.update(sharding=NamedSharding(mesh, PartitionSpec(*[None] * len(aval.shape))))


def _retyped(program: Program, **parts: Any) -> Program:
    """A program made of these constvars, invars, eqns and outvars, whose constants are on no mesh."""
    new, constants = jx.with_parts(program, **parts), getattr(program, "consts", ())
    # With new constvars, a program of jax 0.12 has lost the constants.
    return ClosedJaxpr(jx.body(new), [plain_value(x) for x in constants]) if constants else new


def _named(source: Atom, named: Var, name: str, like: Equation) -> Equation:
    """The equation that names a value, at the place of another one."""
    plain = jx.body(trace(lambda x: checkpoint_name(x, name), jx.struct_of(named))[0]).eqns[0]
    return like.replace(primitive=plain.primitive, params=plain.params, effects=plain.effects, invars=[source], outvars=[named])


def _without_layout(equation: Equation) -> Equation:
    """An equation that asks for no layout of its results and names no mesh around it."""
    if is_call(equation):
        with under_mesh(NO_MESH):
            plain = jx.body(jax.make_jaxpr(jax.jit(lambda x: x))(0.0)).eqns[0].params
        num = len(equation.invars), len(equation.outvars)
        free = {"in_shardings": plain["in_shardings"] * num[0], "out_shardings": plain["out_shardings"] * num[1]}
        return equation.replace(params={**equation.params, **free, "ctx_mesh": Mesh(np.empty((), object), ())})
    asks = [key for key in ("sharding", "out_sharding") if equation.params.get(key) is not None]
    return equation.replace(params={**equation.params, **dict.fromkeys(asks)}) if asks else equation


def _with_backward_rule(equation: Equation, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Equation:
    """An equation whose backward rule, if it has one as a function of arrays, is changed."""
    rule = equation.params.get("bwd")
    if rule is None:
        return equation
    return equation.replace(params={**equation.params, "bwd": lu.wrap_init(change(rule.call_wrapped), debug_info=rule.debug_info)})
