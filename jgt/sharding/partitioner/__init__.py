"""XLA's partitioner, which splits a program over devices: what it does wrongly, and how jgt avoids that.

This is the door of the folder; import from here only. It can be deleted when XLA is mended.
"""

from jgt.sharding.partitioner.avoid import avoid_faults
from jgt.sharding.partitioner.avoided import MARK, Avoided, avoided_faults, with_faults

__all__ = ["MARK", "Avoided", "avoid_faults", "avoided_faults", "with_faults"]
