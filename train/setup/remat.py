"""`train.remat` as policies of `jax.checkpoint`, which say what a layer's forward pass leaves for its backward pass.

The backward pass of a layer reads values of its forward pass. Each is either kept, which costs memory, or computed again, which costs time.
A matmul costs more time than everything around it, and its result is one array. The values between two matmuls (norms, rotary positions,
the gate of an MLP, casts) cost next to nothing, and yet their derivatives read several arrays of that size, some of them in f32. So
`matmuls` computes only these again: no matmul with weights runs twice, nor does attention's kernel, and a llama's layers take a third of
the memory that JAX's own choice takes.

JAX asks a policy about each primitive, and about each tensor that has a name (`signal.tensor`). Names say what to keep everywhere but in a
fused kernel of attention. It leaves more than its result (cuDNN's the log-sum-exp), which only the kernel's own primitive can keep.

The policy is put around the layers of a model as it is traced (`jgt.replacements.layers`), so it serves every model whose layers are a
scan. The invariant: what is kept changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive

from jgt import recomputed
from jgt.document import InputError

from ..models.kernels import AttentionKernel

Remat = str | tuple[str, ...]
"""A value of `train.remat`: `none`, `matmuls`, `attention`, `block`, or names of tensors to keep."""

AUTO = "auto"
"""The value of `train.remat` that leaves the setting to `train.setup.fit`."""

ATTENDED = "heads"
"""The name of attention's result."""

_F = TypeVar("_F", bound=Callable[..., object])


@dataclass(frozen=True, kw_only=True)
class Keep:
    """A policy of `jax.checkpoint`: whether a layer keeps the result of a primitive.

    fused: how the name of the primitive begins that is attention's forward pass, all of whose results `heads` then means; empty if that is
    several primitives.
    """

    remat: Remat
    fused: str = ""

    def __call__(self, primitive: Primitive, *_: object, **params: object) -> bool:
        # `signal.tensor` is a primitive, too.
        if primitive.name == "name":
            is_kept = params["name"] in self.remat if isinstance(self.remat, tuple) else self._keeps_matmuls and params["name"] == ATTENDED
            return (is_kept or self.remat == "attention") and not (self.fused and params["name"] == ATTENDED)
        if self.fused and primitive.name.startswith(self.fused):
            return self._keeps_matmuls or ATTENDED in self.remat
        if primitive is jax.lax.reduce_sum_p:
            return self.remat == "attention"
        return self._keeps_matmuls and _has_weights(primitive, params)

    @property
    def _keeps_matmuls(self) -> bool:
        return self.remat in ("matmuls", "attention")


def remat_settings(*, keeps_scores: bool) -> tuple[Remat, ...]:
    """The settings of `train.remat` that `auto` tries, in order.

    Where attention is a fused kernel, `matmuls` comes first: it computes no matmul again, and the step is faster than with `none`, because
    fewer bytes are moved. Elsewhere a layer's scores are an array in memory, which all settings but `none` compute again.
    """
    return ("none", "attention", "matmuls", "block") if keeps_scores else ("matmuls", "block")


def with_remat_of(loss: _F, remat: Remat, attention: AttentionKernel | None, where: str) -> _F:
    """The loss whose layers keep for the backward pass what `train.remat` says; `none` keeps whatever it reads.

    attention: the kernel of attention, if it is known. where: file and line of the key. Raises InputError where the loss is traced, if its
    model has no layers to put the policy around.
    """
    # Only the scores of attention are to be computed again, and a fused kernel keeps none.
    if remat == "none" or (remat == "attention" and attention is not None and not attention.keeps_scores):
        return loss
    keep = Keep(remat=remat, fused="" if attention is None else attention.forward)
    problem = (
        f"{where}: train.remat: the model's layers are not a scan over stacked parameters. "
        "Use jax.lax.scan, nnx.scan or linen's nn.scan for them, or use jax.checkpoint in the model and remove the key"
    )
    return recomputed(loss, keep, missing=InputError([problem]))


def _has_weights(primitive: Primitive, params: Mapping[str, Any]) -> bool:
    """Whether this is a matmul without batch dims. Those with are attention's, whose scores are the largest arrays of a layer."""
    return primitive is jax.lax.dot_general_p and not params["dimension_numbers"][1][0]
