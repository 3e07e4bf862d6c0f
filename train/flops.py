"""FLOPs of a training step and the share of the hardware's peak that they are."""

from __future__ import annotations

from jgt.plan.chip import chip_of
from train.models.config import ModelConfig


def flops_per_token(config: ModelConfig, num_parameters: int) -> float:
    """FLOPs of forward and backward for one token: 6 a matmul parameter, and 6 · layers · width · seq for causal attention.

    The causal convention: only the half of the score matrix that is used counts. Recompute does not count.
    """
    lookups = 0 if config.is_tied else config.vocab * config.embed
    lookups += config.seq * config.embed if config.kind == "gpt" else 0
    attention = 6 * config.layers * config.heads * config.head_size * config.seq
    return 6.0 * (num_parameters - lookups) + attention


def peak_flops(device_kind: str) -> float | None:
    """Peak bf16 FLOP/s of a device kind as JAX names it; None where no figure is known (CPU)."""
    chip = chip_of(device_kind)
    return None if chip is None else chip.peak_flops("bf16")
