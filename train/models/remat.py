"""What a layer's forward pass leaves for its backward pass: `train.remat` as policies of `jax.checkpoint`.

The backward pass of a layer reads values of its forward pass. Each is either kept, which costs memory, or computed again, which costs time.
The two costs have little to do with each other. A matmul costs more than all that stands around it, and its result is one array. What
stands between two matmuls (norms, rotary positions, the gate of an MLP, casts) costs next to nothing, and yet its derivatives read several
arrays of that size, some of them in f32. So `matmuls` keeps what is dear to compute and computes the rest again: no matmul with weights
runs twice, nor does attention's kernel, and a llama's layers take a third of the memory that JAX's own choice takes.

JAX asks a policy about each primitive, and about each tensor that has a name (`signal.tensor`). Names say what to keep everywhere but in a
fused kernel of attention. It leaves more than its result (cuDNN's the log-sum-exp), which only the kernel's own primitive can keep.

`none` leaves the choice to JAX, except that what stands between matmuls is `cheap` to compute again there as well: on a GPU reading three
arrays takes longer than computing them from one, and on a CPU it takes as long.

The invariant: what is kept changes no result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

Remat = str | tuple[str, ...]
"""What the backward pass computes again, as `train.remat` says it: `none`, `matmuls`, `attention`, `block`, or names of tensors to keep."""

ATTENDED = "heads"
"""The name of attention's result."""

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What a layer keeps, as a policy of `jax.checkpoint`.

    fused: how the name of the primitive begins that is attention's forward pass, all of whose results `heads` then means; empty if that is
    several primitives.
    """

    remat: Remat
    fused: str = ""

    def __call__(self, primitive: Any, *_: Any, **params: Any) -> bool:
        # `signal.tensor` is a primitive, too.
        if primitive.name == "name":
            return params["name"] in self._names and not (self.fused and params["name"] == ATTENDED)
        if self.fused and primitive.name.startswith(self.fused):
            return ATTENDED in self._names
        return self.remat == "matmuls" and _has_weights(primitive, params)

    @property
    def _names(self) -> tuple[str, ...]:
        if self.remat == "matmuls":
            return (ATTENDED,)
        return () if isinstance(self.remat, str) else self.remat


def recomputed(layer: _F, keep: Keep) -> _F:
    """The layer, whose backward pass finds what is kept and computes the rest again.

    `none` keeps whatever the backward pass reads. So does `attention`, which is done inside attention (`attend_with`).
    """
    if keep.remat in ("none", "attention"):
        return layer
    # Layers run in a scan, which is a barrier to common subexpression elimination already; JAX's own would only cost speed.
    return jax.checkpoint(layer, policy=keep, prevent_cse=False)  # pyright: ignore[reportReturnType]


def cheap(function: _F) -> _F:
    """A function of norms and elementwise operations, whose backward pass reads its operands and computes the rest again.

    The results of its sums are kept as well: they are small, and a sum over a sharded dim would be sent again.
    """
    return jax.checkpoint(function, policy=_is_sum, prevent_cse=False)  # pyright: ignore[reportReturnType]


def _is_sum(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive is jax.lax.reduce_sum_p


def _has_weights(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether this is a matmul without batch dims. Those with are attention's, whose scores are the largest arrays of a layer."""
    return primitive is jax.lax.dot_general_p and not params["dimension_numbers"][1][0]
