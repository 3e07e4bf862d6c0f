"""One layer as programs: forward, backward and, apart, weight gradients, with what they hand to each other.

A layer reads its weights, values common to all layers, local values that come from the inputs alone, and what travels
from layer to layer; it returns what travels on. Residuals of its derivative are saved only where they depend on what
travels: what weights or inputs alone give is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jgt import jaxpr as jx
from jgt import scopes
from jgt.jaxpr import Program, Var
from jgt.parts import Flat, Part, cut, flatten, marks
from jgt.pipeline.floats import Floats, Values, raw, whole_like
from jgt.pipeline.split import Split


class Body:
    """The layer scan's body as a function of what a layer reads."""

    def __init__(self, split: Split, body: Program, *, is_padded: bool):
        self._split, self._body, self._is_padded = split, body, is_padded
        self._num_consts, self._num_carry = jx.scan_sizes(split.scan)
        live = split.scan.outvars[self._num_carry :]
        self._ys = [live.index(var) for var in split.ys]

    def __call__(self, weights: Values, common: Values, local: Values, index: Any, travel: Values) -> Values:
        """What travels on from layer `index` (negative: padding, which changes nothing)."""
        split = self._split
        num_moving = len(split.travel)
        moving = [whole_like(x, a.aval) for x, a in zip(travel[:num_moving], split.travel, strict=True)]
        ys = travel[num_moving:]
        whole = dict(zip([*split.in_layers, *split.local.outputs], [*common, *local], strict=True))
        whole |= {var: value for var, value in zip(split.travel, moving, strict=True) if jx.is_var(var) and var not in whole}
        own = dict(zip(split.weights, weights, strict=True))
        layer = jnp.maximum(index, 0)
        consts = [self._value(a, whole) for a in split.scan.invars[: self._num_consts]]
        scanned = [
            own[a] if a in own else jax.lax.dynamic_index_in_dim(self._value(a, whole), layer, keepdims=False)
            for a in split.scan.invars[self._num_consts + self._num_carry :]
        ]
        with scopes.signals(split.place.signals):
            results = jx.evaluate(self._body, [*consts, *moving[: self._num_carry], *scanned])
        new_ys = [jax.lax.dynamic_update_index_in_dim(y, results[self._num_carry + i], layer, 0) for y, i in zip(ys, self._ys, strict=True)]
        after = [*map(raw, results[: self._num_carry]), *travel[self._num_carry : num_moving], *new_ys]
        return [jnp.where(index >= 0, new, old) for new, old in zip(after, travel, strict=True)] if self._is_padded else after

    @staticmethod
    def _value(atom: Any, whole: Mapping[Var, Any]) -> Any:
        return whole[atom] if jx.is_var(atom) else atom.val


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """What one layer reads, as ShapeDtypeStructs: its own weights, common and local values, what travels."""

    weights: Values
    common: Values
    local: Values
    travel: Values


class Layer:
    """A layer's programs at one set of shapes.

    recompute: only what travels into the layer is saved. apart: weight gradients have a program of their own.
    """

    def __init__(self, body: Callable[..., Values], shapes: Shapes, *, recompute: bool, apart: bool):
        self._shapes = shapes
        self._weights, self._common, self._travel = (Floats.among(v) for v in (shapes.weights, shapes.common, shapes.travel))
        index = jax.ShapeDtypeStruct((), jnp.int32)
        groups = [
            self._weights.take(shapes.weights),
            self._common.take(shapes.common),
            self._travel.take(shapes.travel),
            [*self._weights.leave(shapes.weights), *self._common.leave(shapes.common), *shapes.local, index],
            self._travel.leave(shapes.travel),
        ]
        tree: Any = None

        def run(w: Values, c: Values, x: Values, still: Values, moving: Values) -> tuple[Values, Values]:
            num_w = len(self._weights.which) - sum(self._weights.which)
            num_c = len(self._common.which) - sum(self._common.which)
            weights = self._weights.merge(w, still[:num_w])
            common = self._common.merge(c, still[num_w : num_w + num_c])
            after = body(weights, common, still[num_w + num_c : -1], still[-1], self._travel.merge(x, moving))
            return self._travel.take(after), self._travel.leave(after)

        if recompute:
            run = jax.checkpoint(run, prevent_cse=False)

        def forward(w: Values, c: Values, x: Values, still: Values, moving: Values) -> tuple[Values, Values]:
            nonlocal tree
            ahead, derivative, others = jax.vjp(lambda w, c, x: run(w, c, x, still, moving), w, c, x, has_aux=True)
            residuals, tree = jax.tree.flatten(derivative)
            return self._travel.merge(ahead, others), residuals

        program = jx.trace(forward, *groups)[0]
        flat = flatten(program)
        num = [len(g) for g in groups]
        first = num[0] + num[1]
        moving_vars = [*flat.invars[first : first + num[2]], *flat.invars[first + num[2] + num[3] :]]
        bits = marks(flat, dict.fromkeys(moving_vars, 1))
        ahead, residuals = flat.outvars[: len(shapes.travel)], flat.outvars[len(shapes.travel) :]
        self.saved: tuple[Var, ...] = tuple(dict.fromkeys(a for a in residuals if jx.is_var(a) and bits.get(a, 0)))
        self._arguments = flat.invars
        self._ahead = cut(flat, ahead)
        self._saving = cut(flat, [*ahead, *self.saved])
        self._again = cut(flat, list(dict.fromkeys(a for a in residuals if jx.is_var(a) and a not in self.saved)))
        self._residuals = residuals

        def backward(residuals: Values, cotangents: Values) -> tuple[Values, Values, Values]:
            return jax.tree.unflatten(tree, residuals)(cotangents)

        shapes_of = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in residuals]
        self._back = _Backward(flatten(jx.trace(backward, shapes_of, groups[2])[0], _dissolves), num, apart=apart)

    @property
    def saved_shapes(self) -> Values:
        """What forward saves for backward, of one layer."""
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.saved]

    @property
    def stashed_shapes(self) -> Values:
        """What backward stashes for the weight gradients, of one layer."""
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self._back.stash]

    def ahead(self, weights: Values, common: Values, local: Values, index: Any, travel: Values) -> Values:
        """What travels on."""
        return self._call(self._ahead, self._bound(weights, common, local, index, travel))

    def forward(self, weights: Values, common: Values, local: Values, index: Any, travel: Values) -> tuple[Values, Values]:
        """What travels on, and what is saved."""
        found = self._call(self._saving, self._bound(weights, common, local, index, travel))
        return found[: len(travel)], found[len(travel) :]

    def backward(
        self, weights: Values, common: Values, local: Values, index: Any, saved: Values, cotangents: Values
    ) -> tuple[Values, Gradients, Values]:
        """The cotangents of what travelled in, the gradients that are ready, and what is stashed for the others."""
        return self._back.run(self._all_residuals(weights, common, local, index, saved), cotangents)

    def weight_gradients(self, weights: Values, common: Values, local: Values, index: Any, saved: Values, stashed: Values) -> Gradients:
        """The gradients that backward left."""
        return self._back.finish(self._all_residuals(weights, common, local, index, saved), stashed)

    def _bound(self, weights: Values, common: Values, local: Values, index: Any, travel: Values | None) -> dict[Var, Any]:
        still = [*self._weights.leave(weights), *self._common.leave(common), *local, index]
        x, moving = ([], []) if travel is None else (self._travel.take(travel), self._travel.leave(travel))
        num_x = sum(self._travel.which)
        w, c = self._weights.take(weights), self._common.take(common)
        num_before = len(w) + len(c)
        names = [*self._arguments[:num_before], *self._arguments[num_before + num_x : num_before + num_x + len(still)]]
        known = dict(zip(names, [*w, *c, *still], strict=True))
        if travel is not None:
            known |= dict(zip(self._arguments[num_before : num_before + num_x], x, strict=True))
            known |= dict(zip(self._arguments[num_before + num_x + len(still) :], moving, strict=True))
        return known

    @staticmethod
    def _call(part: Part, known: Mapping[Var, Any]) -> Values:
        return part([known[v] for v in part.inputs])

    def _all_residuals(self, weights: Values, common: Values, local: Values, index: Any, saved: Values) -> Values:
        known = self._bound(weights, common, local, index, None)
        again = dict(zip(self._again.outputs, self._call(self._again, known), strict=True)) | dict(zip(self.saved, saved, strict=True))
        return [again[a] if jx.is_var(a) else jnp.asarray(a.val, a.aval.dtype) for a in self._residuals]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradients by position among the weights, and among the common values, that have any."""

    weights: Mapping[int, Any]
    common: Mapping[int, Any]


def _dissolves(equation: Any) -> bool:
    return jx.is_call(equation) or jx.is_remat(equation)


class _Backward:
    """The backward program, perhaps cut in two: what travels back first, weight gradients later."""

    def __init__(self, flat: Flat, num: Sequence[int], *, apart: bool):
        num_w, num_c, num_x = num[:3]
        self._num_residuals = len(flat.invars) - num_x
        self._invars = flat.invars
        dw, dc, dx = flat.outvars[:num_w], flat.outvars[num_w : num_w + num_c], flat.outvars[num_w + num_c :]
        self._dx = cut(flat, dx)
        wanted = {("w", i): a for i, a in enumerate(dw)} | {("c", i): a for i, a in enumerate(dc)}
        made = dict.fromkeys(v for e in jx.body(self._dx.program).eqns for v in e.outvars)
        self._now = {k: a for k, a in wanted.items() if not apart or not jx.is_var(a) or a in made}
        self._later = {k: a for k, a in wanted.items() if k not in self._now}
        self._finish = cut(flat, list(self._later.values()), list(made))
        # Saved residuals outlive backward; whatever else the weight gradients read is stashed.
        self.stash: tuple[Var, ...] = tuple(v for v in self._finish.inputs if v not in self._invars[: self._num_residuals])
        self._run = cut(flat, [*dx, *self._now.values(), *self.stash])
        self._num_x = num_x

    @property
    def reads(self) -> tuple[int, ...]:
        """Which residuals the weight gradients read."""
        return tuple(i for i, v in enumerate(self._invars[: self._num_residuals]) if v in self._finish.inputs)

    def run(self, residuals: Values, cotangents: Values) -> tuple[Values, Gradients, Values]:
        known = dict(zip(self._invars, [*residuals, *cotangents], strict=True))
        found = self._run([known[v] for v in self._run.inputs])
        end = self._num_x + len(self._now)
        return found[: self._num_x], _gradients(self._now, found[self._num_x : end]), found[end:]

    def finish(self, residuals: Values, stashed: Values) -> Gradients:
        known = dict(zip(self._invars, residuals, strict=False)) | dict(zip(self.stash, stashed, strict=True))
        return _gradients(self._later, self._finish([known[v] for v in self._finish.inputs]))


def _gradients(keys: Mapping[tuple[str, int], Any], values: Values) -> Gradients:
    found = dict(zip(keys, values, strict=True))
    return Gradients(weights={i: v for (kind, i), v in found.items() if kind == "w"}, common={i: v for (kind, i), v in found.items() if kind == "c"})
