"""The mechanisms of jgt for programs that are built on it, such as the trainer. `jgt` has their names; users of jgt do not need them."""

from jgt.replacements.experts.experts import exchange_at
from jgt.replacements.experts.grouped import mosaic_obstacle
from jgt.replacements.gradients import sum_of_groups
from jgt.replacements.layers import recomputed
from jgt.replacements.replicas import Replicas
from jgt.sharding.paths import path_text
from jgt.sharding.placement import Placement
from jgt.sharding.sharded import Sharded
from jgt.sharding.storage import Storage

__all__ = [
    "Placement",
    "Replicas",
    "Sharded",
    "Storage",
    "exchange_at",
    "mosaic_obstacle",
    "path_text",
    "recomputed",
    "sum_of_groups",
]
