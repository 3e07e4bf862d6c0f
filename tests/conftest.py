"""The whole session is strict: 8 CPU devices, rank promotion raises, warnings are errors, a hung collective fails."""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# Programs of processes that tests start are kept for the session, not for the user.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jgt-tests-")
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8"
    " --xla_cpu_collective_call_warn_stuck_timeout_seconds=20 --xla_cpu_collective_call_terminate_timeout_seconds=60"
)

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def root() -> "os.PathLike[str]":
    """The repository's root."""
    from pathlib import Path

    return Path(__file__).parent.parent
