"""Parameters that are stored in another form than the model uses.

A model uses its parameters in its own shapes, whole or split by the rules. Between steps, another form is better in three cases:

    the optimizer state is split more finely (ZeRO-1)   the parameter gets the same split, so that a device stores less
    the axes of a dim do not divide it                  the dim is padded with zeros, so that all devices have equal parts
    a stage runs chunks that are not neighbours         the shape is [chunks of a stage, stages, layers of a chunk, ...]

So each parameter has a stored form, with its own shape and split, and each step begins by converting it to the form that the model uses.
If the model casts a parameter to bf16 wherever it reads it, the cast comes before the conversion, which then sends bf16. In the backward
pass, the gradient is reduced into the stored form, where the optimizer needs it.

Padding is zero, stays zero under an optimizer that treats all elements alike or each matrix alone, and adds nothing to a norm; the
program slices it off before anything reads it. A chunk is padded by whole layers. Where each stage runs every S-th of v · S equal chunks,
that form is a reshape, so the bytes and their order stay the same. A checkpoint has the model's shapes, so that it fits any mesh and
schedule: `entered` and `left` convert, and no device ever holds more than its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jgt.program import scopes
from jgt.program.dims import Dims, even_dims, num_parts, partition_spec
from jgt.program.reads import Read
from jgt.replacements.replacement import ParameterPlace
from jgt.sharding.inputs import KeyPath, path_text
from jgt.sharding.placement import Placement


@dataclass(frozen=True)
class Stack:
    """The conversion of a stack of layers [layers, ...] to its chunks [chunks of a stage, stages, layers of a chunk, ...], and back."""

    to_chunks: Callable[[jax.Array], jax.Array]
    to_layers: Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True)
class Form:
    """The stored form of one parameter.

    model: its place by the rules, which may split its dims unevenly. stored: its place between steps. saved: its place in a checkpoint, in
    the model's shape, split evenly, and as finely as it is stored. stack: the conversion of a stack of layers that is stored on its stages.
    read: the narrower type in which the program reads it.
    """

    model: ParameterPlace
    stored: ParameterPlace
    saved: ParameterPlace
    stack: Stack | None = None
    read: Read | None = None


def form_of(place: ParameterPlace, sizes: Mapping[str, int], *, finely: bool) -> Form | None:
    """The stored form of a parameter at this place, on a mesh of these sizes; None: the model's. finely: split like its optimizer state."""
    parts = [math.lcm(*(num_parts(axes, sizes) for axes in both)) for both in zip(place.dims, place.optimizer_dims, strict=True)]
    shape = tuple(-(-size // n) * n for size, n in zip(place.shape, parts, strict=True))
    of_state, of_model = (math.prod(num_parts(axes, sizes) for axes in dims) for dims in (place.optimizer_dims, place.dims))
    dims = place.optimizer_dims if finely and of_state > of_model else place.dims
    if (shape, dims) == (place.shape, place.dims):
        return None
    stored = replace(place, shape=shape, dims=dims)
    even, even_state = (even_dims(d, place.shape, sizes, place.sliced) for d in (dims, place.optimizer_dims))
    moves = dims != place.dims
    return Form(model=place, stored=stored, saved=replace(place, dims=even, optimizer_dims=even_state), read=place.read if moves else None)


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The stored forms of a model's parameters, by path; others are stored as the model has them. model: their places by the rules."""

    model: Placement
    forms: Mapping[str, Form] = field(default_factory=dict[str, Form])

    @cached_property
    def placement(self) -> Placement:
        """The places of the parameters as they are stored."""
        return self._with({path: form.stored for path, form in self.forms.items()})

    @cached_property
    def saved(self) -> Placement:
        """The places of parameters of the model's shapes, before they enter and after they have left."""
        return self._with({path: form.saved for path, form in self.forms.items()})

    @property
    def has_stacks(self) -> bool:
        """Whether stacks of layers are stored on their stages."""
        return any(form.stack is not None for form in self.forms.values())

    @property
    def reshapes(self) -> bool:
        """Whether the stored shapes are others than the model's."""
        return any(form.stored.shape != form.model.shape for form in self.forms.values())

    @property
    def padded(self) -> list[Form]:
        """The parameters that are padded, other than by layers."""
        return [form for form in self.forms.values() if form.stack is None and form.stored.shape != form.model.shape]

    @property
    def spread(self) -> list[Form]:
        """The parameters that are split more finely than the model uses them."""
        return [form for form in self.forms.values() if form.stack is None and form.stored.dims != form.model.dims]

    @property
    def in_use(self) -> Storage:
        """The storage of what `used` returns: stacks that are stored on their stages, and other parameters as the model has them."""
        return replace(self, forms={path: form for path, form in self.forms.items() if form.stack is not None})

    def of_same_shapes(self) -> Storage | None:
        """The part of it that keeps the model's shapes; None if that is nothing."""
        forms = {path: form for path, form in self.forms.items() if form.stored.shape == form.model.shape}
        return replace(self, forms=forms) if forms else None

    def shapes(self, params: Any) -> Any:
        """The shapes of the model's parameters, from stored ones."""
        return jax.eval_shape(self.left, params)

    def entered(self, tree: Any, *, as_state: bool = False) -> Any:
        """A tree of the model's shapes, stored: parameters, or (as_state) anything that is laid out like the optimizer state."""

        def enter(form: Form, x: jax.Array) -> jax.Array:
            saved, stored = (_dims_of(place, as_state=as_state) for place in (form.saved, form.stored))
            if form.stack is None:
                return self._pinned(_padded(x, form.stored.shape), stored)
            # Pinned before and after: in between the stage axis moves from one dim to another.
            chunks = form.stack.to_chunks(self._pinned(x, saved))
            return self._pinned(self._pinned(chunks, ((), (), *saved)), stored)

        return self._mapped(enter, self.saved, tree)

    def left(self, tree: Any, *, as_state: bool = False) -> Any:
        """The inverse of `entered`."""

        def leave(form: Form, x: jax.Array) -> jax.Array:
            saved, stored = (_dims_of(place, as_state=as_state) for place in (form.saved, form.stored))
            if form.stack is None:
                return self._pinned(_sliced(self._pinned(x, stored), form.model.shape), saved)
            chunks = self._pinned(self._pinned(x, stored), ((), (), *saved))
            return self._pinned(form.stack.to_layers(chunks), saved)

        return self._mapped(leave, self.placement, tree)

    def used(self, params: Any) -> Any:
        """The parameters that the model uses, from stored ones, at the top of a step. Stacks remain on their stages.

        Its derivative brings gradients into the stored form.
        """

        def use(form: Form, x: jax.Array) -> jax.Array:
            if form.stack is not None:
                return x
            # In its signal, so that a plan and a profile know whose bytes these are.
            (signal,) = form.model.signals if len(form.model.signals) == 1 else ("",)
            with scopes.signals(signal.split("/") if signal else ()):
                return self._used(form, x)

        return self._mapped(use, self.placement, params)

    def model_shapes(self, used: Any) -> Any:
        """The shapes of the model's parameters, from what `used` returns."""

        def shape(form: Form, x: Any) -> Any:
            return jax.ShapeDtypeStruct(form.model.shape, x.dtype) if form.stack is not None else x

        return self._mapped(shape, self.placement, used)

    def _used(self, form: Form, x: jax.Array) -> jax.Array:
        dtype, read, moves = x.dtype, form.read, form.stored.dims != form.model.dims

        def forward(x: jax.Array) -> jax.Array:
            x = x if read is None else x.astype(read.dtype)
            if moves:
                # Pinned twice, or the cast could come after the way.
                x = self._pinned(self._pinned(x, form.stored.dims), form.model.dims)
            x = _sliced(x, form.model.shape)
            # A value that is read twice has a gradient of two parts. They are added in the wide type, in which the program gets its value.
            return x if read is None or read.once else x.astype(dtype)

        def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
            return (self._pinned(_padded(cotangent, form.stored.shape), form.stored.optimizer_dims).astype(dtype),)

        def with_residuals(x: jax.Array) -> tuple[jax.Array, None]:
            return forward(x), None

        used = cast("jax.custom_vjp[jax.Array]", jax.custom_vjp(forward))
        used.defvjp(with_residuals, backward)
        return used(x)

    def _mapped(self, fn: Callable[[Form, Any], Any], placement: Placement, tree: Any) -> Any:
        def one(path: KeyPath, x: Any) -> Any:
            place = placement.owner(path_text(path), x.shape)
            form = None if place is None else self.forms.get(place.path)
            return x if form is None else fn(form, x)

        return jax.tree.map_with_path(one, tree)

    def _with(self, places: Mapping[str, ParameterPlace]) -> Placement:
        return replace(self.model, parameters=tuple(places.get(p.path, p) for p in self.model.parameters))

    def _pinned(self, x: jax.Array, dims: Dims) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.model.mesh, partition_spec(dims)))


def _dims_of(place: ParameterPlace, *, as_state: bool) -> Dims:
    return place.optimizer_dims if as_state else place.dims


def _padded(x: jax.Array, shape: Collection[int]) -> jax.Array:
    return x if x.shape == shape else jnp.pad(x, [(0, to - size) for size, to in zip(x.shape, shape, strict=True)])


def _sliced(x: jax.Array, shape: Collection[int]) -> jax.Array:
    return x if x.shape == shape else jax.lax.slice(x, [0] * x.ndim, tuple(shape))
