"""Where the parts of a training program go: shardings for parameters, gradients, optimizer state and inputs.

A placement is complete and checked. It knows each parameter by its path, its dims' axes and the dims' axes of its
optimizer state, and everything else is derived from these: gradients are laid out like the optimizer state, so that with
ZeRO-1 they are reduce-scattered and not all-reduced, and each leaf of an optimizer state finds its parameter by the end of its path
(Adam's `mu/layers/attn/out/kernel` belongs to `layers/attn/out/kernel`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jgt.program.dims import Dims, even_dims, partition_spec
from jgt.program.places import mesh_around, vmapped_axes
from jgt.replacements.replacement import ParameterPlace
from jgt.rules import Rules, SpecRule
from jgt.sharding.inputs import KeyPath, Signature, named_leaves, path_text
from jgt.sharding.matrices import on_whole_matrices
from jgt.sharding.own.layout import OwnLayout


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Shardings for everything around one function, as `place` returns them: `params`, `gradients`, `optimizer(state)`, `inputs(tree)`.

    parameters: the parameters, with their dims and the signals that use them.
    tree: the tree of the first argument.
    others: by number, the dims of its leaves that are not parameters: state, or None for a leaf that is not an array.
    signature: the names of the function's arguments.
    tensors: the names of the tensors in the program.
    layouts: what the program itself asks for.
    """

    rules: Rules
    mesh: Mesh | AbstractMesh
    parameters: tuple[ParameterPlace, ...]
    tree: Any
    others: Mapping[int, Dims | None] = field(default_factory=dict[int, Dims | None])
    signature: Signature = field(default_factory=Signature)
    tensors: tuple[str, ...] = ()
    layouts: tuple[OwnLayout, ...] = ()

    def __str__(self) -> str:
        """A table of the parameters: path, shape, spec, and the signals that use it."""
        header = ("parameter", "shape", "spec", "signals")
        rows = [(p.path or "(itself)", str(list(p.shape)), p.spec, ", ".join(p.signals)) for p in self.parameters]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in (header, *rows))
        lasts = ("dropped", "kept beside the rules")[self.rules.own == "keep"]
        count = sum(not one.is_derived for one in self.layouts)
        own = f"\nThe program asks for {count} layouts of its own, which are {lasts}" if count else ""
        return "\n".join(lines) + own

    @property
    def params(self) -> Any:
        """The NamedShardings of the first argument, as a tree like it: parameters, and state of an nnx module. None: not an array."""
        return self._like_first(self._even(p, p.dims) for p in self.parameters)

    @property
    def used(self) -> Any:
        """As `params`, within a program: dims may be split unevenly."""
        return self._like_first(p.dims for p in self.parameters)

    @property
    def gradients(self) -> Any:
        """The gradients' NamedShardings, which the optimizer state shares."""
        return self._like_first(self._even(p, p.optimizer_dims) for p in self.parameters)

    def optimizer(self, state: Any, memory_kind: str | None = None) -> Any:
        """NamedShardings for an optimizer state (arrays or ShapeDtypeStructs).

        A leaf belongs to the parameter whose path its own path ends with and whose shape it has, as optax's moments do. It is placed
        like that parameter's state, in memory of this kind. A leaf may have more dims in front, as the memory of L-BFGS: those are not
        sharded. Other leaves, such as counts, are replicated in the device's memory.
        """
        leaves, tree = named_leaves(state)
        all_dims = [self._state_dims(path_text(p), x.shape) for p, x in leaves]
        return jax.tree.unflatten(tree, [self.replicated() if dims is None else self._sharding(dims, memory_kind) for dims in all_dims])

    def _state_dims(self, path: str, shape: tuple[int, ...]) -> Dims | None:
        place = self.owner(path, shape)
        if place is not None:
            return self._even(place, place.optimizer_dims)
        place = self.owner(path, None)
        num_more = 0 if place is None else len(shape) - len(place.shape)
        # A scalar parameter is at the end of every shape, so its state cannot be told from anything else.
        if place is None or not place.shape or num_more <= 0 or shape[num_more:] != place.shape:
            return None
        return ((),) * num_more + self._even(place, place.optimizer_dims)

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

    def inputs(self, tree: Any, argument: str | int | None = None) -> Any:
        """NamedShardings for an argument that is not the parameters, given by its name or position.

        Without either, it is the first argument that contains neither parameters nor state.
        """
        leaves, structure = named_leaves(tree)
        to = self.signature.path_to(argument)
        dims = [self.signature.input((*to, *path), x).match(self.rules)[1] for path, x in leaves]
        return jax.tree.unflatten(structure, [self._sharding(d) for d in dims])

    def _like_first(self, dims: Iterable[Dims]) -> Any:
        of_parameters = iter(dims)
        leaves = [self.others[n] if n in self.others else next(of_parameters) for n in range(self.tree.num_leaves)]
        return jax.tree.unflatten(self.tree, [None if d is None else self._sharding(d) for d in leaves])

    def _even(self, place: ParameterPlace, dims: Dims) -> Dims:
        return even_dims(dims, place.shape, self.mesh.shape, place.sliced)

    def _sharding(self, dims: Dims, memory_kind: str | None = None) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(dims), memory_kind=memory_kind)

    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device has whole."""
        return NamedSharding(self.mesh, PartitionSpec())


@dataclass(frozen=True, kw_only=True)
class CallContext:
    """The limits of the specs of one call: its mesh, and the axes that something around the call has taken.

    claimed: the axes of vmaps around the call (spmd_axis_name), which no constraint may name, because the vmapped dim has them already.
    around: the mesh of a shard_map around the call; its manual axes are gone, and JAX wants shardings on it. stage: the signal whose layers
    a pipeline runs, and its mesh axis, which no rule inside may name. pads: whether parameters may have dims that their axes do not divide.
    uneven: the sizes of such dims, which may be split unevenly wherever they occur: logits have the dim of a vocabulary, too.
    """

    mesh: Mesh | AbstractMesh
    claimed: frozenset[str] = frozenset()
    around: AbstractMesh | None = None
    stage: tuple[str, str] | None = None
    pads: bool = False
    uneven: frozenset[int] = frozenset()

    @classmethod
    def here(cls, mesh: Mesh | AbstractMesh, stage: tuple[str, str] | None = None) -> CallContext:
        """The surroundings of the trace that is active now."""
        return cls(mesh=mesh, claimed=vmapped_axes(), around=mesh_around(), stage=stage)

    @property
    def sizes(self) -> dict[str, int]:
        """The mesh axes and their sizes."""
        return dict(self.mesh.shape)

    def free_dims(self, dims: Dims, manual: Sequence[str] = ()) -> Dims:
        """Dims without the axes that a vmap or shard_map has taken, and without axes that the mesh does not have."""
        taken = self.claimed.union(manual, () if self.around is None else self.around.manual_axes)
        free = frozenset(self.mesh.axis_names) - taken
        return tuple(tuple(axis for axis in axes if axis in free) for axes in dims)

    def is_in_stage(self, path: str) -> bool:
        """Whether a signal lies in the one that a pipeline runs."""
        # The slash matters: `layers` does not contain `layers_norm`.
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
