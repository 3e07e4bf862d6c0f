"""Tests that compile for a GPU need JAX's CUDA plugin."""

from importlib.util import find_spec

import pytest

needs_plugin = pytest.mark.skipif(
    not any(find_spec(name) for name in ("jax_cuda13_plugin", "jax_cuda12_plugin")), reason="the extra plan-gpu is not installed"
)
