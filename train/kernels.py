"""Which attention kernel a run gets: cuDNN's where it can be had."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from train.models.attention import Kernel, attend_with
from train.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An attention kernel, and why it is not cuDNN's (empty where it is, or nobody wanted it)."""

    kernel: Kernel
    why: str = ""


def choose_attention(config: ModelConfig, device: Any, *, shares_stage: bool = False) -> Choice:
    """The kernel for a model on devices like this one, which may be only described; None: unknown ones.

    shares_stage: several devices work on the same rows in a stage of a pipeline.
    """
    if config.attention == "xla":
        return Choice(kernel="xla")
    why = _obstacle(config, device, shares_stage=shares_stage)
    return Choice(kernel="cudnn" if not why else "xla", why=why)


def _obstacle(config: ModelConfig, device: Any, *, shares_stage: bool) -> str:
    """Why a model cannot have cuDNN's attention on a device."""
    if device is None or device.platform != "gpu" or "NVIDIA" not in device.device_kind:
        return "there is no NVIDIA GPU"
    if config.dtype != "bf16":
        return "it needs model.dtype: bf16"
    if shares_stage:
        # Its partitioner asks a mesh for devices that the mesh inside of a shard_map does not have (jax/_src/custom_partitioning.py).
        return "JAX cannot split it over the devices of a pipeline's stage"
    q, k = (jax.ShapeDtypeStruct((1, config.seq, n, config.head_size), jnp.bfloat16) for n in (config.heads, config.num_kv_heads))
    try:
        jax.eval_shape(partial(jax.grad(_summed), q), k, k)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        # JAX itself knows best what its kernel can do on this GPU with this cuDNN.
        return str(error).splitlines()[0].rstrip(".")
    return ""


def _summed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.sum(attend_with("cudnn", recompute=False)(q, k, v).astype(jnp.float32))
