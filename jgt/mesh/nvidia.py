"""Whether this machine has an NVIDIA GPU, and silence from JAX's CUDA plugin where it has none.

The extra `plan-gpu` installs the plugin to compile for absent GPUs, without NVIDIA's libraries. JAX loads every installed plugin as soon
as anything asks for devices, and logs a traceback of twenty lines if one fails, as the CUDA plugin does without cuDNN. Without a GPU,
this is noise that hides the lines that matter. With a GPU, or if CUDA is asked for, it is the reason why the GPU is not used, and stays.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

# Linux; the driver's control device; Windows' subsystem for Linux; Jetson.
_DEVICES = ("nvidia[0-9]*", "nvidiactl", "dxg", "nvhost*", "nvmap")
_LOGGER = "jax._src.xla_bridge"


def has_nvidia(folder: Path = Path("/dev")) -> bool:
    """Whether the system shows a device of NVIDIA's."""
    return any(next(folder.glob(pattern), None) is not None for pattern in _DEVICES)


def quiet_plugin() -> None:
    """Leaves out the messages of a CUDA plugin that fails on a machine without a GPU. Calling it again changes nothing."""
    # A logger exists before its module does, so JAX need not be imported.
    logging.getLogger(_LOGGER).addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not (text.startswith("Jax plugin configuration error") and "cuda" in text) or _asks_for_cuda() or has_nvidia()


def _asks_for_cuda() -> bool:
    jax = sys.modules.get("jax")
    asked = f"{os.environ.get('JAX_PLATFORMS', '')},{getattr(getattr(jax, 'config', None), 'jax_platforms', None) or ''}"
    return bool({"cuda", "gpu"} & {platform.strip() for platform in asked.split(",")})
