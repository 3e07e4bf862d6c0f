"""Devices to build a mesh of: virtual CPU devices for tests and first steps."""

from __future__ import annotations

import jax


def use_virtual_cpu(num_devices: int) -> None:
    """Makes JAX see this many CPU devices and nothing else. Call it before anything asks JAX for devices.

    Raises RuntimeError when JAX has already started.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
