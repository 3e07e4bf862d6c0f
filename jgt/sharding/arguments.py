"""The arguments of one call, and the program that the function makes of them.

A sharded function is called like the function that it wraps: with any tree of arrays, and with flags, names or None
anywhere among them. Arrays (and tracers, and ShapeDtypeStructs in their place) become inputs of the traced program.
Everything else is part of the program, as it would be for a static argument of `jax.jit`.

Tracing is the expensive part of a call, and neither the values of arrays nor their shardings matter for it. `key`
therefore names all that does, so that calls with equal keys can share one trace: the placement of a training state,
the training step and a plan of it are made from the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgt.program import jaxpr as jx
from jgt.program.dataflow import unchanged_arguments
from jgt.sharding.placement import KeyPath, Shaped, named_leaves, path_text

# A scalar of numpy is an array of rank 0. A number of Python is a constant of the program.
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
# Values that cannot change in place, so that a comparison with an earlier call is enough.
_IMMUTABLE = (str, bytes, bool, int, float, complex, type(None), type(Ellipsis))


Named = tuple[KeyPath, Shaped]
"""An array of a call with its key path, which begins with its place among the arguments."""


class Arguments:
    """A function and the arguments of one call. The first positional argument contains the parameters.

    named: the arrays with their key paths, in order.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        self._fn = fn
        self._leaves, self._tree = named_leaves((tuple(args), dict(kwargs)))
        self._is_array = [isinstance(x, _ARRAYS) for _, x in self._leaves]
        self.named: list[Named] = [(path, x) for is_array, (path, x) in zip(self._is_array, self._leaves, strict=True) if is_array]

    @property
    def arrays(self) -> list[Any]:
        """The arguments that the traced program takes."""
        return [x for _, x in self.named]

    def key(self) -> Hashable | None:
        """Equal for calls that are traced to the same program. None if this cannot be known.

        That is so for arguments that might change without notice: any object that is neither an array nor a plain value or function.
        """
        constants: list[object] = [x for is_array, (_, x) in zip(self._is_array, self._leaves, strict=True) if not is_array]
        if not all(isinstance(x, _IMMUTABLE) or callable(x) for x in constants):
            return None
        # The type includes weak types and varying axes, which change the trace although shape and dtype are the same.
        types: tuple[Hashable, ...] = tuple(jax.typeof(x) for x in self._traced_arrays())
        # 1, 1.0 and True are equal, but not the same program.
        return self._tree, tuple((str(type(x)), x) for x in constants), types, jx.trace_context()

    def trace(self) -> tuple[jx.Program, Any]:
        """The program of this call, and the tree of its outputs. Raises ValueError if the function changes its arguments in place."""
        return jx.trace(self._flat, *self._traced_arrays())

    def trace_rows(self, is_batched: Sequence[bool], num_rows: int) -> jx.Program:
        """The program with another batch size: this many rows in every array whose first dim is the batch."""
        shapes = [
            jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), _traced_dtype(x)) if batched else _without_sharding(x)
            for batched, x in zip(is_batched, self.arrays, strict=True)
        ]
        return jx.trace(self._flat, *shapes)[0]

    def parameter_tree(self) -> Any:
        """The tree of the first positional argument. Raises ValueError if it is missing or contains anything but arrays."""
        # The tree is (args, kwargs).
        positional = self._tree.children()[0].children()
        if not positional:
            raise ValueError(
                "the first positional argument must hold the parameters, but none was given; pass them by position, not by name"
            )
        for path, x in self._leaves[: positional[0].num_leaves]:
            if not isinstance(x, _ARRAYS):
                raise ValueError(
                    f"the first argument must hold the parameters and nothing else, a tree of arrays, but "
                    f"{path_text(path[2:]) or 'it'} is {type(x).__name__}. Pass {x!r} in another argument"
                )
        return positional[0]

    def _traced_arrays(self) -> list[Any]:
        # A sharding names a mesh, which would tie the trace to it. Inside a shard_map the type says over which axes a value varies.
        return self.arrays if jx.mesh_around() is not None else [_without_sharding(x) for x in self.arrays]

    def _flat(self, *arrays: Any) -> Any:
        result, before, after = self._run(arrays)
        # Compared by identity: a function that writes into its arguments leaves other objects there, even if the values
        # are equal.
        if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
            self._refuse_changes()
        return result

    def _run(self, arrays: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
        """The function's result, and the leaves of its arguments before and after."""
        values = iter(arrays)
        before = [next(values) if is_array else x for is_array, (_, x) in zip(self._is_array, self._leaves, strict=True)]
        args, kwargs = jax.tree.unflatten(self._tree, before)
        result = self._fn(*args, **kwargs)
        return result, before, jax.tree.leaves((args, kwargs))

    def _refuse_changes(self) -> None:
        # The function gets a copy of the arguments, so a Flax nnx module that updates itself would lose the update.
        changed: list[str] = []

        def arrays_after(*arrays: Any) -> list[Any]:
            _, before, after = self._run(arrays)
            if len(before) != len(after):
                changed.append("the arguments' structure")
                return list(arrays)
            leaves = zip(self._is_array, self._leaves, before, after, strict=True)
            changed.extend(path_text(path[2:]) for is_array, (path, _), a, b in leaves if not is_array and a is not b)
            return [b for is_array, b in zip(self._is_array, after, strict=True) if is_array]

        # A value that went through nnx.remat or nnx.jit is another object, but the same argument of the program.
        origins = unchanged_arguments(jx.trace(arrays_after, *self.arrays)[0])
        changed += [
            path_text(path[2:]) for index, ((path, _), origin) in enumerate(zip(self.named, origins, strict=True)) if index != origin
        ]
        if changed:
            raise ValueError(
                f"the function changes its arguments in place ({', '.join(changed)}), which would be lost. "
                "Return such state from the function: split it off the module (nnx.split) and merge inside, or sow nothing"
            )


def _without_sharding(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, _traced_dtype(x), weak_type=getattr(x, "weak_type", False))


def _traced_dtype(x: Any) -> Any:
    # Without 64-bit mode, JAX traces a NumPy array of int64 as int32. Random keys have a dtype of their own.
    return x.dtype if jnp.issubdtype(x.dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(x.dtype)
