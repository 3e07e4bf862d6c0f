"""Replicas of a program: groups of devices along some axes of a mesh that compute for themselves, until they exchange what they have.

`replicas` runs a function once for each of them, as one program that sends nothing between them, and `exchange` adds up what they have,
in a type of one's choice. What the function means is not known here: it may compute gradients of one part of a batch, or a whole training
step.
"""

from jgt.replicas.exchange import BLOCK, WireType, blocked, exchange, restored, rounded
from jgt.replicas.manual import manual_of_replicas
from jgt.replicas.replicas import Replicas
from jgt.replicas.riders import Pack, turns_of, with_riders

__all__ = [
    "BLOCK",
    "Pack",
    "Replicas",
    "WireType",
    "blocked",
    "exchange",
    "manual_of_replicas",
    "restored",
    "rounded",
    "turns_of",
    "with_riders",
]
