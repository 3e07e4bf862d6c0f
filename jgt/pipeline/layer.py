"""One layer as programs: forward, backward and, on their own, weight gradients, with the values that they leave for each other.

A pipeline cannot differentiate its loop with `jax.grad`: the backward pass of one microbatch runs between the forward passes of others, and
its residuals wait in buffers that have a fixed number of slots. So the derivative of one layer is taken here, once, at the shapes of one
microbatch, and cut into programs that the loop calls when the table says so:

    forward           inputs                       →  travel, saved
    backward          inputs, saved, cotangents    →  cotangents, gradients, stashed
    weight_gradients  inputs, saved, stashed       →  gradients

A residual is saved only if it depends on the activation of this microbatch; what follows from weights or inputs alone, such as a mask, is
computed again. Where the table has items for weight gradients, the backward program contains only what the cotangent needs, so that the
previous stage can continue, and stashes the few cotangents that the rest needs later (Qi et al., Zero Bubble Pipeline Parallelism,
https://arxiv.org/abs/2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp

from jgt.pipeline.arrays import Arrays, Floats, Structs, call, from_raw, raw, row, vjp
from jgt.pipeline.matmuls import without_unit_dims
from jgt.pipeline.split import Split
from jgt.program import jaxpr as jx
from jgt.program import scopes
from jgt.program.constraints import pinned_dims
from jgt.program.dims import Dims
from jgt.program.equations import is_call, is_remat, scan_sizes
from jgt.program.jaxpr import Atom, Equation, Program, Var
from jgt.program.parts import Flat, dependency_bits, extract_part, flatten
from jgt.program.tracing import evaluate, trace

_T = TypeVar("_T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerInputs(Generic[_T]):
    """The values that a layer reads, as arrays, shapes or variables.

    weights: the weights of one layer, without the dim of layers. common: values that are the same for all layers. local: values that are
    computed from the microbatch's inputs. index: the layer's number, int32, negative for padding. travel: the activation and whatever
    else enters with it.
    """

    weights: list[_T]
    common: list[_T]
    local: list[_T]
    index: _T
    travel: list[_T]


@dataclass(frozen=True, kw_only=True)
class Body:
    """The layer scan's body as a function of `LayerInputs`. is_padded: some of the layers are padding."""

    split: Split
    program: Program
    is_padded: bool

    def __call__(self, inputs: LayerInputs[jax.Array]) -> Arrays:
        """The values that travel on to the next layer. A layer of padding returns its own input."""
        split, travel, num_moving = self.split, inputs.travel, len(self.split.travel)
        num_consts, num_carry = scan_sizes(split.scan)
        moving = [from_raw(x, jx.struct_of(a)) for x, a in zip(travel[:num_moving], split.travel, strict=True)]
        ys = travel[num_moving:]
        known: dict[Atom, jax.Array] = dict(zip([*split.in_layers, *split.local.outputs], [*inputs.common, *inputs.local], strict=True))
        known |= {atom: value for atom, value in zip(split.travel, moving, strict=True) if jx.is_var(atom) and atom not in known}
        # Weights in the layers' own type become wide again, because the program casts them. XLA removes both casts.
        wide = [x.astype(jx.dtype_of(v)) for v, x in zip(split.weights, inputs.weights, strict=True)]
        weights: Mapping[Atom, jax.Array] = dict(zip(split.weights, wide, strict=True))
        # Padding computes layer 0 and drops the result: -1 is not the index of a row.
        layer = jnp.maximum(inputs.index, 0)
        consts = [_value(a, known) for a in split.scan.invars[:num_consts]]
        # The scan reads row number `layer` of all that it scans over. Of the weights a stage has that row already.
        scanned: Arrays = [
            weights[a] if a in weights else row(_value(a, known), layer) for a in split.scan.invars[num_consts + num_carry :]
        ]
        with scopes.signals(split.place.signals):
            results: Arrays = evaluate(self.program, [*consts, *moving[:num_carry], *scanned])
        stacked = dict(zip(split.scan.outvars, results, strict=True))
        # y is [layers, ...] for all layers of the model and travels on. Each layer writes its own row.
        new_ys: Arrays = [jax.lax.dynamic_update_index_in_dim(y, raw(stacked[var]), layer, 0) for y, var in zip(ys, split.ys, strict=True)]
        after = [*map(raw, results[:num_carry]), *travel[num_carry:num_moving], *new_ys]
        return [jnp.where(inputs.index >= 0, new, old) for new, old in zip(after, travel, strict=True)] if self.is_padded else after

    def travel_dims(self, shapes: Structs, axes: Collection[str]) -> list[Dims]:
        """The axes among these that the rules split each travelling value over, by the constraint that a layer's result has."""
        num_carry = scan_sizes(self.split.scan)[1]
        found = [pinned_dims(self.program, index) for index in range(num_carry)]
        known = [dims or () for dims in [*found, *[None] * (len(shapes) - num_carry)]]
        # Keys travel as their bits, with a dim more than the value that a constraint is on.
        return [
            tuple(tuple(a for a in split if a in axes) for split in [*dims, *[()] * len(shape.shape)][: len(shape.shape)])
            for dims, shape in zip(known, shapes, strict=True)
        ]


def _value(atom: Atom, known: Mapping[Atom, jax.Array]) -> jax.Array:
    return known[atom] if jx.is_var(atom) else atom.val


Gradients = dict[int, jax.Array]
"""Gradients by the position of what they belong to: among the weights that have gradients, then the common values that have."""


class Layer:
    """A layer's programs at one set of shapes.

    weights, common: those with gradients. recompute: only what travels into the layer is saved. apart: weight gradients have a program
    of their own.
    """

    def __init__(
        self,
        body: Callable[[LayerInputs[jax.Array]], Arrays],
        shapes: LayerInputs[jax.ShapeDtypeStruct],
        weights: Floats,
        common: Floats,
        *,
        recompute: bool,
        apart: bool,
    ):
        leaves: list[jax.ShapeDtypeStruct] = jax.tree.leaves(shapes)
        inputs_of = partial(jax.tree.unflatten, cast(Any, jax.tree.structure(shapes)))
        travel = Floats.among(shapes.travel)
        # Nothing is differentiated with respect to the batch, so local values and the index need no gradient.
        without = (False,) * (len(shapes.local) + 1)
        floats = Floats((*weights.which, *common.which, *without, *travel.which))

        def run(floating: Arrays, others: Arrays) -> tuple[Arrays, Arrays]:
            after = body(inputs_of(floats.merge(floating, others)))
            return travel.select(after), travel.others(after)

        # The layer runs inside a scan, which XLA's elimination of common subexpressions does not cross. A barrier would
        # only cost time.
        run_layer = cast("Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]", jax.checkpoint(run, prevent_cse=False)) if recompute else run

        def forward(floating: Arrays, others: Arrays) -> tuple[Arrays, Callable[[Arrays], tuple[Arrays]]]:
            def differentiable(floating: Arrays) -> tuple[Arrays, Arrays]:
                return run_layer(floating, others)

            ahead, derivative, rest = vjp(differentiable, floating)
            return travel.merge(ahead, rest), derivative

        # The derivative is a pytree whose leaves are its residuals: they become outputs of the program, and its tree,
        # filled with residuals again, is the function that the backward program calls.
        program, tree = trace(forward, floats.select(leaves), floats.others(leaves))
        derivative_tree = tree.children()[1]
        flat = flatten(program)
        num_floats = sum(floats.which)
        self._arguments = floats.merge(flat.invars[:num_floats], flat.invars[num_floats:])
        ahead, residuals = flat.outvars[: len(shapes.travel)], flat.outvars[len(shapes.travel) :]
        by_travel = dependency_bits(flat, dict.fromkeys(self._arguments[len(leaves) - len(shapes.travel) :], 1))
        self._saved = tuple(dict.fromkeys(a for a in residuals if jx.is_var(a) and by_travel.get(a, 0)))
        # Three cuts of one traced program: outputs alone, outputs with residuals to save, and residuals that need no saving.
        self._ahead = extract_part(flat, ahead)
        self._saving = extract_part(flat, [*ahead, *self._saved])
        self._again = extract_part(flat, list(dict.fromkeys(a for a in residuals if jx.is_var(a) and a not in self._saved)))
        self._residuals = residuals

        def backward(residuals: Arrays, cotangents: Arrays) -> Arrays:
            derivative: Callable[[Arrays], tuple[Arrays]] = jax.tree.unflatten(derivative_tree, residuals)
            return derivative(cotangents)[0]

        program = trace(backward, [jx.struct_of(a) for a in residuals], travel.select(shapes.travel))[0]
        self._back = _Backward(without_unit_dims(flatten(program, _dissolves)), sum(weights.which) + sum(common.which), apart=apart)

    @property
    def saved_shapes(self) -> Structs:
        """The values of one layer that forward saves for backward."""
        return [jx.struct_of(v) for v in self._saved]

    @property
    def stashed_shapes(self) -> Structs:
        """The values of one layer that backward stashes for the weight gradients."""
        return [jx.struct_of(v) for v in self._back.stash]

    def ahead(self, inputs: LayerInputs[jax.Array]) -> tuple[Arrays, Arrays]:
        """As `forward`, with nothing saved."""
        return call(self._ahead, self._known(inputs)), []

    def forward(self, inputs: LayerInputs[jax.Array]) -> tuple[Arrays, Arrays]:
        """The values that travel on, and those that are saved."""
        outputs = call(self._saving, self._known(inputs))
        return outputs[: len(inputs.travel)], outputs[len(inputs.travel) :]

    def backward(self, inputs: LayerInputs[jax.Array], saved: Arrays, cotangents: Arrays) -> tuple[Arrays, Gradients, Arrays]:
        """The cotangents of what travelled in, the gradients that are ready, and the values stashed for the other gradients.

        `inputs` may lack what travels, here and in `weight_gradients`: the saved values contain what is needed of it.
        """
        return self._back.run(self._all_residuals(inputs, saved), cotangents)

    def weight_gradients(self, inputs: LayerInputs[jax.Array], saved: Arrays, stashed: Arrays) -> Gradients:
        """The gradients that backward did not compute."""
        return self._back.finish(self._all_residuals(inputs, saved), stashed)

    def _known(self, inputs: LayerInputs[jax.Array]) -> dict[Var, jax.Array]:
        # Not strict: what travels comes last, and may be missing.
        return dict(zip(self._arguments, jax.tree.leaves(inputs), strict=False))

    def _all_residuals(self, inputs: LayerInputs[jax.Array], saved: Arrays) -> Arrays:
        again = dict(zip(self._again.outputs, call(self._again, self._known(inputs)), strict=True))
        again |= dict(zip(self._saved, saved, strict=True))
        # JAX may leave a literal as a residual, which needs no slot.
        return [again[a] if jx.is_var(a) else jnp.asarray(a.val, jx.dtype_of(a)) for a in self._residuals]


class _Backward:
    """The backward program; with `apart`, cut in two: first the cotangent that travels back, later the weight gradients.

    flat: (residuals, cotangents) → gradients of weights and common values, cotangents of what travelled in.
    """

    def __init__(self, flat: Flat, num_gradients: int, *, apart: bool):
        self._num_travel = len(flat.outvars) - num_gradients
        self._residuals = flat.invars[: len(flat.invars) - self._num_travel]
        self._invars = flat.invars
        gradients, cotangents = flat.outvars[:num_gradients], flat.outvars[num_gradients:]
        # Every value that is computed on the way to the cotangent of what travelled in.
        on_the_way = dict.fromkeys(v for e in jx.body(extract_part(flat, cotangents).program).eqns for v in e.outvars)
        # A constant, or a value that the travelling cotangent needs as well, costs nothing to have now.
        self._now = [n for n, a in enumerate(gradients) if not apart or not jx.is_var(a) or a in on_the_way]
        self._later = [n for n in range(num_gradients) if n not in self._now]
        self._finish = extract_part(flat, [gradients[n] for n in self._later], list(on_the_way))
        # Saved residuals outlive backward; whatever else the weight gradients read is stashed.
        self.stash = tuple(v for v in self._finish.inputs if v not in self._residuals)
        self._run = extract_part(flat, [*cotangents, *(gradients[n] for n in self._now), *self.stash])

    def run(self, residuals: Arrays, cotangents: Arrays) -> tuple[Arrays, Gradients, Arrays]:
        outputs = call(self._run, dict(zip(self._invars, [*residuals, *cotangents], strict=True)))
        end = self._num_travel + len(self._now)
        return outputs[: self._num_travel], dict(zip(self._now, outputs[self._num_travel : end], strict=True)), outputs[end:]

    def finish(self, residuals: Arrays, stashed: Arrays) -> Gradients:
        known = dict(zip(self._residuals, residuals, strict=True)) | dict(zip(self.stash, stashed, strict=True))
        return dict(zip(self._later, call(self._finish, known), strict=True))


def _dissolves(equation: Equation) -> bool:
    """Whether the backward program is cut inside of this equation: a checkpoint as a whole would be computed twice."""
    return is_call(equation) or is_remat(equation)
