"""How weights start: normal, scaled by fan-in, smaller where many layers add up (GPT-2, section 2.3)."""

from __future__ import annotations

from flax import nnx

INTO = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")
"""Of matrices that read the residual stream."""

TABLE = nnx.initializers.variance_scaling(1.0, "fan_out", "normal")
"""Of tables [rows, embed]: rows of length about 1."""


def out_of(num_layers: int) -> nnx.Initializer:
    """Of matrices that add to the residual stream, two a layer."""
    return nnx.initializers.variance_scaling(1.0 / (2 * num_layers), "fan_in", "normal")
