"""Pieces of a program that a rule replaces by another program of the same meaning: found, proven, replaced.

`region` is the mechanism: an equation that means one thing and is lowered as another, written for the devices of a mesh. `ring` has the
programs that hide what tensor parallelism sends beside matmuls, `matmuls` finds in a traced program what `overlap:` is about, and `proof`
shows that each is a matmul. `gathers` has weights that travel in eight bits. The rewriter in `jgt.sharding` is the one that asks.
"""

from jgt.regions.gathers import Gather, block_of, policy_of, with_gathers
from jgt.regions.matmuls import Overlapped, Site, overlap
from jgt.regions.region import RegionPolicy, is_recomputed

__all__ = [
    "Gather",
    "Overlapped",
    "RegionPolicy",
    "Site",
    "block_of",
    "is_recomputed",
    "overlap",
    "policy_of",
    "with_gathers",
]
