"""A process of the doctor: it joins its peers as a process of a run does, with the same messages, and adds numbers with all their devices.

It prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..files.ends import EndError
from ..processes.cluster import Cluster
from ..processes.connect import start_jax
from ..processes.join import Membership
from ..processes.processes import clock_ahead
from ..records.nvml import Gpus
from ..settings.command_line import read_token
from .machine import Machine

_BYTES = {"cpu": 1 << 20, "gpu": 1 << 26}
_TRIES = 3


def main() -> int:
    """The process that joins its peers and adds numbers with them. Returns the exit code."""
    request = json.loads(sys.argv[1])
    cluster = request["cluster"] and Cluster(**request["cluster"])
    try:
        start_jax(cluster, None, member=Membership(seconds=request["seconds"], token=read_token(None)[0]))
        print(json.dumps(_sum() | {"clock": clock_ahead()}), flush=True)
    except EndError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(error.code)
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    return 0


def _sum() -> dict[str, Any]:
    """The time of an all-reduce, and whether its sum is right."""
    devices, platform = jax.devices(), jax.default_backend()
    count, size = len(devices), _BYTES.get(platform, _BYTES["cpu"]) // 4
    mesh = Mesh(np.array(devices), ("all",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*names)) for names in (("all",), ()))
    ones = jax.make_array_from_callback((count, size), split, _numbered(size))
    add = jax.jit(lambda x: x.sum(0), out_shardings=whole)
    total, times = add(ones), list[float]()
    for _ in range(_TRIES):
        begun = time.perf_counter()
        jax.block_until_ready(add(ones))
        times.append(time.perf_counter() - begun)
    right = bool((np.asarray(total.addressable_data(0)) == count * (count - 1) / 2).all())
    sent = 2 * (count - 1) / count * size * 4
    return {
        "devices": count,
        "local": jax.local_device_count(),
        "kind": devices[0].device_kind,
        "platform": platform,
        "right": right,
        "seconds": min(times),
        "gb_s": sent / min(times) / 1e9,
        "gpus": Machine().num_gpus if os.environ.get("CUDA_VISIBLE_DEVICES") != "-1" else 0,
        "slowed": Gpus(jax.local_device_count() if platform == "gpu" else 0).figures().get("slowed", ""),
    }


def _numbered(size: int) -> Callable[[Any], np.ndarray]:
    """A function from the place of a device's row to the row, which has the number of the device."""
    return lambda at: np.full((1, size), at[0].start or 0, np.float32)
