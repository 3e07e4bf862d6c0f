"""The memory of this process's devices, for the rows of steps.

Of several devices the fullest counts, because it is the one that runs out. An allocator that keeps no statistics, as that of CPU devices,
gives no numbers: then the row has none.
"""

from __future__ import annotations

import jax

_NAMES = {"memory_bytes": "bytes_in_use", "memory_peak_bytes": "peak_bytes_in_use", "memory_limit_bytes": "bytes_limit"}


def memory_use() -> dict[str, int]:
    """Bytes in use at this moment, at most in use so far, and available, on the fullest device of this process; empty if not known."""
    all_stats = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    if not all_stats:
        return {}
    fullest = max(all_stats, key=lambda stats: stats.get("peak_bytes_in_use", stats.get("bytes_in_use", 0)))
    return {name: int(fullest[key]) for name, key in _NAMES.items() if key in fullest}
