"""Where the parts of a training program go: shardings for parameters, gradients, optimizer state and inputs.

A placement is complete and checked. It knows each parameter by its path, its dims' axes and the dims' axes of its
optimizer state, and everything else is derived from these: gradients are laid out like the optimizer state, so that with
ZeRO-1 they are reduce-scattered and not all-reduced, and each leaf of an optimizer state finds its parameter by the end of its path
(Adam's `mu/layers/attn/out/kernel` belongs to `layers/attn/out/kernel`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims, partition_spec, show_dims
from jgt.rules import Match, Rules, SpecRule, expand, match_input
from jgt.sharding.matrices import on_whole_matrices

KeyPath = tuple[Any, ...]
"""The keys that lead to a leaf, as jax.tree_util has them."""


class Shaped(Protocol):
    """An array, a tracer or a ShapeDtypeStruct."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dim."""
        ...

    @property
    def dtype(self) -> Any:
        """A numpy dtype, or that of random keys."""
        ...


@dataclass(frozen=True, kw_only=True)
class ParameterPlace:
    """One parameter: its path and shape, the signals that use it, and the axes of its dims and of its optimizer state's dims.

    Both may differ only in which axes shard a dim; the optimizer state has the parameter's shape. sliced: the dims that are sliced off
    before every use, such as the one that counts layers.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    signals: tuple[str, ...]
    dims: Dims
    optimizer_dims: Dims
    sliced: frozenset[int] = frozenset()

    @property
    def spec(self) -> str:
        """The axes of each dim, as the YAML writes them."""
        return show_dims(self.dims)

    def bytes_per_device(self, mesh: Mesh | AbstractMesh) -> int:
        """Bytes of this parameter on one device."""
        local = NamedSharding(mesh, partition_spec(self.dims)).shard_shape(self.shape)
        # The dtype matters: without it, np.prod of the shape () is the float 1.0.
        return int(np.prod(local, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Shardings for everything around one function.

    tree: the tree of the parameters. tensors: the names of the tensors in the program.
    """

    rules: Rules
    mesh: Mesh | AbstractMesh
    parameters: tuple[ParameterPlace, ...]
    tree: Any
    tensors: tuple[str, ...] = ()

    @property
    def params(self) -> Any:
        """The parameters' NamedShardings, as a tree like the parameters."""
        return jax.tree.unflatten(self.tree, [self._sharding(p.dims) for p in self.parameters])

    @property
    def gradients(self) -> Any:
        """The gradients' NamedShardings, which are those of the optimizer state."""
        return jax.tree.unflatten(self.tree, [self._sharding(p.optimizer_dims) for p in self.parameters])

    def optimizer(self, state: Any, memory_kind: str | None = None) -> Any:
        """NamedShardings for an optimizer state (arrays or ShapeDtypeStructs).

        A leaf belongs to the parameter whose path its own path ends with and whose shape it has, as optax's moments do. It is placed
        like that parameter's state, in memory of this kind. Other leaves, such as counts, are replicated in the device's memory.
        """
        leaves, tree = named_leaves(state)
        owners = [self.owner(path_text(p), x.shape) for p, x in leaves]
        moments = [None if p is None else self._sharding(p.optimizer_dims) for p in owners]
        kept = [s if s is None or memory_kind is None else s.with_memory_kind(memory_kind) for s in moments]
        return jax.tree.unflatten(tree, [self.replicated() if s is None else s for s in kept])

    def owner(self, path: str, shape: tuple[int, ...] | None) -> ParameterPlace | None:
        """The parameter that a leaf of an optimizer state belongs to, by its path and shape (None: any shape will do)."""
        # The path of a parameter is empty if the tree of parameters is a single array.
        fits = [p for p in self.parameters if shape in (None, p.shape) and (not p.path or f"/{path}".endswith(f"/{p.path}"))]
        # The longest path wins: a parameter `kernel` at the top also matches the end of out/kernel, but does not own
        # its moments.
        return max(fits, key=lambda p: len(p.path), default=None)

    def map_matrices(self, fn: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
        """fn over a tree of stacks of matrices [stack, ..., m, n], named and laid out like gradients. Each device computes whole matrices.

        fn maps each matrix independently to one of the same shape, and a zero matrix to itself. Raises ValueError for a leaf that belongs
        to no parameter.
        """

        def one(path: KeyPath, x: jax.Array) -> jax.Array:
            place = self.owner(path_text(path), x.shape)
            if place is None:
                raise ValueError(f"{path_text(path)}: no parameter has this name and the shape {list(x.shape)}")
            # The tree is laid out like the gradients, which have the layout of the optimizer state.
            return on_whole_matrices(fn, x, place.optimizer_dims, self.mesh)

        return jax.tree.map_with_path(one, tree)

    def inputs(self, batch: Any) -> Any:
        """NamedShardings for the arguments that are not parameters."""
        leaves, tree = named_leaves(batch)
        dims = [match_argument(self.rules, path_text(path), x)[1] for path, x in leaves]
        return jax.tree.unflatten(tree, [self._sharding(d) for d in dims])

    def _sharding(self, dims: Dims) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(dims))

    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device has whole."""
        return NamedSharding(self.mesh, PartitionSpec())


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What limits the specs of one call besides the tensor: the mesh, and axes that something around the call has taken.

    Inside `jax.vmap(..., spmd_axis_name="data")` a constraint may not name data, because the vmapped dim has it already. Inside a
    shard_map the manual axes are gone, and JAX wants shardings on its mesh. And the layers that a pipeline runs may not be sharded
    over its stage axis.

    claimed: the axes of vmaps around the call (spmd_axis_name). around: the mesh of a shard_map around the call. stage: the signal whose
    layers a pipeline runs, and its mesh axis, which no rule inside may name.
    """

    mesh: Mesh | AbstractMesh
    claimed: frozenset[str] = frozenset()
    around: AbstractMesh | None = None
    stage: tuple[str, str] | None = None

    @classmethod
    def here(cls, mesh: Mesh | AbstractMesh, stage: tuple[str, str] | None = None) -> Surroundings:
        """Those of the trace that is active now."""
        return cls(mesh=mesh, claimed=jx.vmapped_axes(), around=jx.mesh_around(), stage=stage)

    @property
    def sizes(self) -> dict[str, int]:
        """The mesh axes and their sizes."""
        return dict(self.mesh.shape)

    def free_dims(self, dims: Dims, manual: Sequence[str] = ()) -> Dims:
        """Dims without the axes that a vmap or shard_map has taken, or that the mesh does not have (which is a problem of its own)."""
        taken = self.claimed.union(manual, () if self.around is None else self.around.manual_axes)
        free = frozenset(self.mesh.axis_names) - taken
        return tuple(tuple(axis for axis in axes if axis in free) for axes in dims)

    def is_in_stage(self, path: str) -> bool:
        """Whether a signal lies in the one that a pipeline runs."""
        # With the slash, `layers` does not contain a signal such as `layers_norm`.
        return self.stage is not None and f"{path}/".startswith(f"{self.stage[0]}/")

    def stage_problems(self, rule: SpecRule, dims: Dims, signals: Sequence[str], what: str) -> Iterator[str]:
        """The problem of a spec that names the pipeline's axis inside the pipeline."""
        if self.stage is None:
            return
        signal, axis = self.stage
        if any(map(self.is_in_stage, signals)) and any(axis in axes for axes in dims):
            yield (
                f"{rule.where}: {rule.pattern}: the {what} lies in the pipeline of {signal!r}, which has the axis {axis} for itself. "
                f"Take {axis} out of this spec; the pipeline splits the layers over it"
            )


def match_argument(rules: Rules, path: str, x: Shaped) -> tuple[Match[SpecRule], Dims]:
    """The match and dims of an argument that is not a parameter. Random keys (uint32[2] too) are never sharded."""
    # A spec such as [batch, ...] would otherwise split the two words of a key.
    match = Match[SpecRule]() if is_key(x) else match_input(rules, path, len(x.shape))
    return match, () if match.rule is None else expand(match.rule.spec, len(x.shape))


def is_key(x: Shaped) -> bool:
    """Whether an argument is a random key, of JAX's own type or as bits (uint32[2])."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or (x.dtype == np.uint32 and x.shape == (2,))


def named_leaves(tree: object) -> tuple[list[tuple[KeyPath, Any]], Any]:
    """The leaves of a tree with their key paths, and the structure of the tree."""
    return cast("tuple[list[tuple[KeyPath, Any]], Any]", jax.tree.flatten_with_path(tree))


def path_text(path: KeyPath) -> str:
    """A key path of jax.tree_util as names joined by slashes, without the `value` that ends the path of a Flax variable."""
    # A key of a dict has `key`, one of an attribute has `name`, and one of a list has `idx`.
    names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    if len(names) > 1 and names[-1] in ("value", "raw_value"):
        names.pop()
    return "/".join(names)
