"""Where the parts of a training program go: parameters by their use, optimizer state and inputs by the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jgt.matrices import on_whole_matrices
from jgt.rewrite import Dims, partition_spec
from jgt.rules import Matcher, Rules, SpecRule, expand, show_dims


@dataclass(frozen=True, kw_only=True)
class ParameterPlace:
    """One parameter: its path and shape, the signals it is used under, its dims' axes and its optimizer state's."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    signals: tuple[str, ...]
    dims: Dims
    optimizer_dims: Dims

    @property
    def spec(self) -> str:
        """The axes of each dim, as the YAML writes them."""
        return show_dims(self.dims)

    def bytes_per_device(self, mesh: Mesh | AbstractMesh) -> int:
        """Bytes of this parameter on one device."""
        local = NamedSharding(mesh, partition_spec(self.dims)).shard_shape(self.shape)
        return int(np.prod(local, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Shardings for everything around one function: built by `place`, complete and checked."""

    rules: Rules
    mesh: Mesh | AbstractMesh
    parameters: tuple[ParameterPlace, ...]
    tree: Any
    tensors: tuple[str, ...] = ()
    """Names of the tensors in the program."""

    @property
    def params(self) -> Any:
        """The parameters' NamedShardings, as a tree like the parameters."""
        return jax.tree.unflatten(self.tree, [self._sharding(p.dims) for p in self.parameters])

    @property
    def gradients(self) -> Any:
        """The gradients' NamedShardings: those of the optimizer state."""
        return jax.tree.unflatten(self.tree, [self._sharding(p.optimizer_dims) for p in self.parameters])

    def optimizer(self, state: Any, memory_kind: str | None = None) -> Any:
        """NamedShardings for an optimizer state (arrays or ShapeDtypeStructs).

        A leaf whose path ends with a parameter's and that has its shape is placed by that parameter (optax's moments), in memory
        of this kind; others, such as counts, are replicated, in the device's memory.
        """
        leaves, tree = jax.tree.flatten_with_path(state)
        owners = [self.owner(path_text(p), x.shape) for p, x in leaves]
        moments = [None if p is None else self._sharding(p.optimizer_dims) for p in owners]
        kept = [s if s is None or memory_kind is None else s.with_memory_kind(memory_kind) for s in moments]
        return jax.tree.unflatten(tree, [self.replicated() if s is None else s for s in kept])

    def owner(self, path: str, shape: tuple[int, ...] | None) -> ParameterPlace | None:
        """The parameter that a leaf of an optimizer state belongs to, by its path and shape (None: whatever the shape)."""
        fits = [p for p in self.parameters if shape in (None, p.shape) and (not p.path or f"/{path}".endswith(f"/{p.path}"))]
        return max(fits, key=lambda p: len(p.path), default=None)

    def map_matrices(self, fn: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
        """fn over stacks of matrices [stack, ..., m, n] that are named and laid out like gradients; each device computes whole ones.

        fn maps each matrix by itself to one of that shape, a zero matrix to itself. Raises ValueError for a leaf that is no parameter's.
        """

        def one(path: Sequence[Any], x: jax.Array) -> jax.Array:
            place = self.owner(path_text(path), x.shape)
            if place is None:
                raise ValueError(f"{path_text(path)}: no parameter has this name and the shape {list(x.shape)}")
            return on_whole_matrices(fn, x, place.optimizer_dims, self.mesh)

        return jax.tree.map_with_path(one, tree)

    def inputs(self, batch: Any) -> Any:
        """NamedShardings for the arguments that are not parameters."""
        matcher = Matcher(self.rules)
        leaves, tree = jax.tree.flatten_with_path(batch)
        dims = [input_rule(matcher, path_text(p), x)[1] for p, x in leaves]
        return jax.tree.unflatten(tree, [self._sharding(d) for d in dims])

    def _sharding(self, dims: Dims) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(dims))

    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())


def input_rule(matcher: Matcher, path: str, x: Any) -> tuple[SpecRule | None, Dims]:
    """The rule and dims of one argument that is not a parameter; random keys (uint32[2] too) are left alone."""
    rank = len(x.shape)
    rule = None if is_key(x) else matcher.input(path, rank)
    return rule, () if rule is None else expand(rule.spec, rank)


def is_key(x: Any) -> bool:
    """Whether an argument is a random key, of JAX's own type or as bits (uint32[2])."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or (x.dtype == np.uint32 and x.shape == (2,))


def path_text(path: Sequence[Any]) -> str:
    """A key path of jax.tree_util as names joined by slashes; the `value` of Flax variables is left out."""
    names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    if len(names) > 1 and names[-1] in ("value", "raw_value"):
        names.pop()
    return "/".join(names)
