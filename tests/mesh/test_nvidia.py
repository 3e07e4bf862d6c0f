"""A CUDA plugin without a GPU is silent; one whose failure matters is not."""

import logging
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from jgt.mesh import nvidia
from jgt.mesh.nvidia import has_nvidia

FAILED = "Jax plugin configuration error: Exception when calling %s.initialize()"


@pytest.fixture
def is_shown(monkeypatch):
    """Whether a message of JAX's about its plugins is shown."""

    def _is_shown(message, *args, platforms="", gpu=False):
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        monkeypatch.setattr(nvidia, "has_nvidia", lambda: gpu)
        record = logging.LogRecord(nvidia._LOGGER, logging.ERROR, "xla_bridge.py", 1, message, args, None)
        return bool(logging.getLogger(nvidia._LOGGER).filter(record))

    return _is_shown


def test_only_a_plugin_that_nobody_asked_for_is_silent(is_shown):
    assert not is_shown(FAILED, "jax_plugins.xla_cuda13")
    assert not is_shown(FAILED, "jax_plugins.xla_cuda13", platforms="cpu")
    assert is_shown(FAILED, "jax_plugins.xla_cuda13", gpu=True)
    assert is_shown(FAILED, "jax_plugins.xla_cuda13", platforms="cuda,cpu")
    assert is_shown(FAILED, "jax_plugins.xla_cuda13", platforms="gpu")
    assert is_shown(FAILED, "jax_plugins.xla_rocm7")
    assert is_shown("Unable to initialize backend 'cuda': %s", "no driver")


@pytest.mark.parametrize("name", ["nvidia0", "nvidiactl", "dxg", "nvhost-gpu", "nvmap"])
def test_devices_that_show_a_gpu(tmp_path, name):
    (tmp_path / "null").touch()
    assert not has_nvidia(tmp_path)
    (tmp_path / name).touch()
    assert has_nvidia(tmp_path)
    assert not has_nvidia(tmp_path / "absent")


@pytest.mark.skipif(has_nvidia() or find_spec("jax_cuda13_plugin") is None, reason="has a GPU, or no CUDA plugin")
def test_a_program_that_asks_for_devices_prints_nothing(root):
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    code = "import jax, jgt; assert jax.devices()[0].platform == 'cpu'"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
