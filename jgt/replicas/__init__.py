"""Replicas of a program: groups of devices along some axes of a mesh that compute for themselves, until they exchange what they have.

`replicas.py` runs a function once for each of them, as one program that sends nothing between them, and `exchange.py` adds up what they
have, in a type of one's choice. The function is the caller's: it may compute gradients of one part of a batch, or a whole training step.
"""

from jgt.replicas.exchange import BLOCK, WireType, block_groups, exchange
from jgt.replicas.layer_sums import LayerSums, num_turns, with_layer_sums
from jgt.replicas.manual import manual_of_replicas
from jgt.replicas.replicas import Replicas

__all__ = [
    "BLOCK",
    "LayerSums",
    "Replicas",
    "WireType",
    "block_groups",
    "exchange",
    "manual_of_replicas",
    "num_turns",
    "with_layer_sums",
]
