"""Mixtures of experts: rows that go through the experts chosen for them, on devices that share the experts.

`call` has what a model says (`jgt.signal.experts`), and `rows` the permutations. `rooms` and `whole` are two ways to send rows to their
experts, and `exchange` is the program of a device. `parts` has the regions that it is on a mesh, and `replace` puts these into a traced
program, by the rules.
"""

from jgt.experts.call import call_experts
from jgt.experts.replace import Placed, call_of, place_experts

__all__ = ["Placed", "call_experts", "call_of", "place_experts"]
