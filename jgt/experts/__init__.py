"""Mixtures of experts: rows that go through the experts chosen for them, on devices that share the experts.

`call` has what a model says (`jgt.signal.experts`), and `rows` the permutations. `rooms` and `whole` are two ways to send rows to their
experts, and `exchange` is the program of a device. `parts` has the regions that it is on a mesh, and `replace` puts these into a traced
program, by the rules. `advice` compares the bytes of the two ways, and `served` counts the rounds of an exchange.
"""

from pathlib import Path

from jgt import regions, signal
from jgt.experts.call import call_experts
from jgt.experts.replace import Placed, call_of, exchange_at, exchange_of, place_experts, weights_of
from jgt.experts.served import can_count, served
from jgt.program.jaxpr import exclude_lines

# A call of experts is on the line of the model.
for _module in (__file__, regions.__file__, signal.__file__):
    exclude_lines(Path(_module).parent if _module.endswith("__init__.py") else Path(_module))

__all__ = ["Placed", "call_experts", "call_of", "can_count", "exchange_at", "exchange_of", "place_experts", "served", "weights_of"]
