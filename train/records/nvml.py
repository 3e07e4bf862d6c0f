"""Asks the NVIDIA driver about this process's GPUs: their power, and why a clock is lowered.

The driver's own library is called directly (https://docs.nvidia.com/deploy/nvml-api), so no package is needed. Its utilisation says only
that some kernel ran, and is left out. NVML numbers all GPUs of the machine; `CUDA_VISIBLE_DEVICES` says which of them this process has.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

_LIBRARY = "libnvidia-ml.so.1"
_REASONS = {0x8: "hw slowdown", 0x40: "hw thermal", 0x20: "sw thermal", 0x80: "power brake"}
"""The reasons of nvml.h that a person should know. A clock at its limit of power is usual."""


class Gpus:
    """The GPUs of this process. Empty without a driver."""

    def __init__(self, count: int):
        """Finds them. count: the number of GPUs that JAX has in this process."""
        self._handles = list[ctypes.c_void_p]()
        try:
            self._nvml = ctypes.CDLL(_LIBRARY)
            if count and self._nvml.nvmlInit_v2() == 0:
                self._handles = list(filter(None, map(self._handle, _visible(count))))
        except (OSError, AttributeError):
            # No driver, or one that lacks these functions.
            return

    def figures(self) -> dict[str, float | str]:
        """`power_w`: the sum over the GPUs in watts; `slowed`: why the clock of one is lowered. Takes about a millisecond."""
        power, reasons = 0.0, list[str]()
        for handle in self._handles:
            milliwatts, bits = ctypes.c_uint(), ctypes.c_ulonglong()
            if self._nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts)) == 0:
                power += milliwatts.value / 1000
            if self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(bits)) == 0:
                reasons += [text for bit, text in _REASONS.items() if bits.value & bit]
        slowed = {"slowed": ", ".join(dict.fromkeys(reasons))} if reasons else {}
        return ({"power_w": round(power, 1)} if power else {}) | slowed

    def _handle(self, name: str) -> ctypes.c_void_p | None:
        handle = ctypes.c_void_p()
        if name.isdecimal():
            code = self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            code = self._nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        return handle if code == 0 else None


def _visible(count: int) -> Iterator[str]:
    """The numbers or UUIDs of the first `count` GPUs that this process may see."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    yield from [name for name in names if name and name != "-1"][:count] or map(str, range(count))
