"""Mixtures of experts: rows that go through the experts chosen for them, on devices that share the experts.

`call` has what a model says (`jgt.signal.experts`), `rows` the permutations, `exchange` the programs of a device, `parts` the regions that
they are on a mesh, and `replace` puts these into a traced program, by the rules.
"""

from jgt.experts.call import call_experts
from jgt.experts.replace import Placed, call_of, place_experts

__all__ = ["Placed", "call_experts", "call_of", "place_experts"]
