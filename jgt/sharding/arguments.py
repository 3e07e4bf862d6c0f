"""The arguments of one call, and the program that the function makes of them.

A sharded function is called like the function that it wraps: with any tree of arrays, and with flags, names or None
anywhere among them. Arrays (and tracers, and ShapeDtypeStructs in their place) become inputs of the traced program.
Everything else is part of the program, as it would be for a static argument of `jax.jit`.

Tracing is the expensive part of a call, and neither the values of arrays nor their shardings matter for it. `key`
therefore names all that does, so that calls with equal keys can share one trace: the placement of a training state,
the training step and a plan of it are made from the same program.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jgt.program import jaxpr as jx
from jgt.program.places import mesh_around, trace_context
from jgt.sharding.inputs import Input, KeyPath, Named, Signature, named_leaves, path_text
from jgt.sharding.own.layout import OwnLayout
from jgt.sharding.own.trace import explicit_mesh_of, trace_as_it_is, trace_own
from jgt.sharding.variables import Variables, is_parameter

# A scalar of numpy is an array of rank 0. A number of Python is a constant of the program.
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
# Values that cannot change in place, so that a comparison with an earlier call is enough.
_IMMUTABLE = (str, bytes, bool, int, float, complex, type(None), type(Ellipsis))


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The program of a call.

    program: a program from the arrays to the leaves of the result, then the new values of the arrays that the function changes in place.
    out_tree: the tree of the result. changed: the numbers of those arrays. layouts: what the function asks for, and the program does not.
    """

    program: jx.Program
    out_tree: Any
    changed: tuple[int, ...] = ()
    layouts: tuple[OwnLayout, ...] = ()


class Arguments:
    """A function and the arguments of one call. The first positional argument contains the parameters.

    parameters: the arrays of the first argument that are parameters, with their key paths. inputs: all other arrays: state inside the first
    argument, and the arrays of the others. Together, in this order, they are the arguments of the traced program.
    own: the mesh that the function is written for, if one is known. mesh: that of the rules, on which it is traced if it needs one.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        signature: Signature | None = None,
        own: AbstractMesh | None = None,
        mesh: AbstractMesh | None = None,
    ):
        self._fn, self._own, self._mesh = fn, own, mesh
        tree = (tuple(args), dict(kwargs))
        self._leaves, self._tree = named_leaves(tree)
        self._variables = Variables(tree)
        self.signature = Signature() if signature is None else signature
        is_array = [isinstance(x, _ARRAYS) for _, x in self._leaves]
        first = [n for n, (path, _) in enumerate(self._leaves) if is_array[n] and _is_first(path) and not self._is_state(n)]
        others = [n for n in range(len(self._leaves)) if is_array[n] and n not in set(first)]
        # The number of the leaf for each argument of the traced program.
        self._order = [*first, *others]
        self.parameters: list[Named] = [self._leaves[n] for n in first]
        self.inputs: list[Input] = [self.signature.input(*self._leaves[n], is_state=self._is_state(n)) for n in others]

    def _is_state(self, leaf: int) -> bool:
        variable = self._variables.owner(leaf)
        return variable is not None and not (is_parameter(variable) and _is_first(self._leaves[leaf][0]))

    @property
    def arrays(self) -> list[Any]:
        """The arguments that the traced program takes."""
        return [self._leaves[n][1] for n in self._order]

    def key(self) -> Hashable | None:
        """Equal for calls that are traced to the same program. None if this cannot be known.

        That is so for arguments that might change without notice: any object that is neither an array nor a plain value or function.
        """
        arrays = set(self._order)
        constants: list[object] = [x for n, (_, x) in enumerate(self._leaves) if n not in arrays]
        if not all(isinstance(x, _IMMUTABLE) or callable(x) for x in constants):
            return None
        # The type includes weak types and varying axes, which change the trace although shape and dtype are the same.
        types: tuple[Hashable, ...] = tuple(jax.typeof(x) for x in self._typed_arrays())
        # 1, 1.0 and True are equal, but not the same program.
        return self._own, self._tree, self._variables.sharing(), tuple((str(type(x)), x) for x in constants), types, trace_context()

    def trace(self) -> Traced:
        """The program of this call. Raises ValueError if the function changes anything in place that is not a variable of nnx."""
        candidates: list[int] = []

        def run(*arrays: Any) -> Any:
            result, before, after = self._run(arrays)
            candidates[:] = self._changed(before, after)
            return result, [after[n] for n in candidates]

        program, tree, layouts = trace_own(run, self._own, self._traced_arrays(), self._typed_arrays(), self._mesh)
        num_results, origins = tree.num_leaves - len(candidates), list[int | None]()
        if candidates:
            # A value that went through nnx.remat or nnx.jit is another object, but the same argument of the program.
            origins = importlib.import_module("jgt.program.dataflow").unchanged_arguments(program)[num_results:]
        number = {leaf: number for number, leaf in enumerate(self._order)}
        changed = [n for n, leaf in enumerate(candidates) if origins[n] != number[leaf]]
        fixed = [path_text(self._leaves[candidates[n]][0][2:]) for n in changed if self._variables.owner(candidates[n]) is None]
        if fixed:
            raise ValueError(_lost(fixed))
        kept = [*range(num_results), *(num_results + n for n in changed)]
        if len(kept) < tree.num_leaves:
            program = jx.with_results(program, kept)
        return Traced(program=program, out_tree=tree.children()[0], changed=tuple(number[candidates[n]] for n in changed), layouts=layouts)

    def as_it_is(self) -> jx.Program:
        """The program of this call with the layout that the function brings along."""
        return trace_as_it_is(lambda *arrays: self._run(arrays)[0], self._own, self._typed_arrays())[0]

    def trace_rows(self, is_batched: Sequence[bool], num_rows: int, changed: Sequence[int]) -> jx.Program:
        """The program with another batch size: this many rows in every array whose first dim is the batch.

        changed: the numbers of the arrays that `trace` saw change.
        """
        shapes = [
            jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), _traced_dtype(x)) if batched else _without_sharding(x)
            for batched, x in zip(is_batched, self.arrays, strict=True)
        ]

        def run(*arrays: Any) -> Any:
            result, _, after = self._run(arrays)
            return result, [after[self._order[number]] for number in changed]

        return trace_own(run, self._own, shapes, shapes, self._mesh)[0]

    def store(self, changed: Sequence[int], values: Sequence[Any]) -> None:
        """Stores the new values of arrays, by number, in the variables of the caller that they belong to."""
        self._variables.store({self._order[number]: value for number, value in zip(changed, values, strict=True)})

    def parameter_tree(self) -> tuple[Any, list[int | None]]:
        """The tree of the first positional argument, and for each of its leaves the number of the array; None for other values.

        Raises ValueError if the argument is missing, and TypeError if it is anything but a tree with arrays.
        """
        # The tree is (args, kwargs).
        positional = self._tree.children()[0].children()
        if not positional:
            raise ValueError(
                "the first positional argument must hold the parameters, but none was given; pass them by position, not by name"
            )
        first = [x for _, x in self._leaves[: positional[0].num_leaves]]
        # Some leaves of an equinox module, say, are not arrays. They are constants of the program, as in the other arguments.
        if first and not any(isinstance(x, _ARRAYS) for x in first):
            kind = type(first[0]).__name__
            raise TypeError(
                f"the first argument must hold the parameters, a tree of arrays, but it has none: it is or contains {kind}. "
                "Pass what the model's init returned, an nnx module, or a tree of arrays"
            )
        number = {leaf: number for number, leaf in enumerate(self._order)}
        return positional[0], [number.get(leaf) for leaf in range(positional[0].num_leaves)]

    def _traced_arrays(self) -> list[Any]:
        # A sharding names a mesh, which would tie the trace to it. Inside a shard_map the type says over which axes a value varies.
        return self.arrays if mesh_around() is not None else [_without_sharding(x) for x in self.arrays]

    def _typed_arrays(self) -> list[Any]:
        """The arrays to trace, with the types that they have on the function's own mesh."""
        own = self._own
        if own is None or not own.explicit_axes or mesh_around() is not None:
            return self._traced_arrays()
        return [x if _is_on(x, own) else _without_sharding(x) for x in self.arrays]

    def _run(self, arrays: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
        """The function's result, and the leaves of its arguments before and after."""
        leaves = [x for _, x in self._leaves]
        for number, x in zip(self._order, arrays, strict=True):
            leaves[number] = x
        args, kwargs = both = self._variables.rebuilt(self._tree, leaves)
        before = jax.tree.leaves(both)
        result = self._fn(*args, **kwargs)
        return result, before, jax.tree.leaves((args, kwargs))

    def _changed(self, before: Sequence[Any], after: Sequence[Any]) -> list[int]:
        """The leaves that the function replaced. Raises ValueError if it changed anything other than the values of arrays."""
        if len(before) != len(after):
            raise ValueError(_lost(["the arguments' structure"]))
        # Compared by identity: a function that writes into its arguments leaves other objects there, even if the values are equal.
        changed = [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a is not b and not self._variables.is_repeated(n)]
        arrays = set(self._order)
        constants = [path_text(self._leaves[n][0][2:]) for n in changed if n not in arrays]
        if constants:
            raise ValueError(_lost(constants))
        return changed


def split_result(fn: Callable[..., Any]) -> tuple[Callable[..., list[Any]], Callable[[Sequence[Any]], Any]]:
    """A function like this one that returns the arrays of its result alone, and one that makes the whole result of such arrays.

    What is neither an array nor a number stays as it was when the first one ran last.
    """
    kept: list[Any] = []

    def arrays_of(*args: Any) -> list[Any]:
        leaves, tree = cast("tuple[list[Any], Any]", jax.tree.flatten(fn(*args)))
        is_array = [isinstance(x, (*_ARRAYS, int, float, complex)) and not isinstance(x, bool) for x in leaves]
        kept[:] = tree, is_array, [None if is_one else x for x, is_one in zip(leaves, is_array, strict=True)]
        return [x for x, is_one in zip(leaves, is_array, strict=True) if is_one]

    def whole(arrays: Sequence[Any]) -> Any:
        (tree, is_array, others), found = kept, iter(arrays)
        return jax.tree.unflatten(tree, [next(found) if is_one else x for x, is_one in zip(others, is_array, strict=True)])

    return arrays_of, whole


def _is_first(path: KeyPath) -> bool:
    """Whether a leaf is in the first positional argument."""
    return path[0].idx == 0 and getattr(path[1], "idx", None) == 0


def _lost(names: Sequence[str]) -> str:
    # The function gets a copy of the arguments, so that what it writes into a dict, say, would be lost.
    return (
        f"the function changes its arguments in place ({', '.join(names)}), which would be lost. "
        "Return the new values; only the values of nnx variables are stored in the caller's arguments"
    )


def _without_sharding(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, _traced_dtype(x), weak_type=getattr(x, "weak_type", False))


def _is_on(x: Any, mesh: AbstractMesh) -> bool:
    own = explicit_mesh_of(x)
    return own is not None and own.shape_tuple == mesh.shape_tuple


def _traced_dtype(x: Any) -> Any:
    # Without 64-bit mode, JAX traces a NumPy array of int64 as int32. Random keys have a dtype of their own.
    return x.dtype if jnp.issubdtype(x.dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(x.dtype)
