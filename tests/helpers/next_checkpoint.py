"""JAX's next implementation of jax.checkpoint, which a flag of JAX turns on, and primitives that are objects."""

import contextlib

import jax
import pytest
from jax.experimental import hijax

Base = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive
"""The class of primitives that are objects; jax 0.12 has renamed it."""

ASKS_POLICIES = hasattr(hijax, "HiPrim")
"""Whether this JAX asks every policy with the flag, and not those of its own classes alone."""

asks_policies = pytest.mark.skipif(not ASKS_POLICIES, reason="this JAX does not ask policies with jax_remat3")


@contextlib.contextmanager
def next_checkpoint(is_on=True):
    """Turns the flag on or off for a while."""
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", is_on)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", before)


@pytest.fixture(params=[False, pytest.param(True, marks=asks_policies)], ids=["checkpoint", "next checkpoint"])
def either_checkpoint(request):
    """Runs a test with each implementation."""
    with next_checkpoint(request.param):
        yield
