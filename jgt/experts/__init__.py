"""Mixtures of experts: rows that go through the experts chosen for them, on devices that share the experts.

`call` has what a model says (`jgt.signal.experts`), and `rows` the permutations. `rooms` and `whole` are two ways to send rows to their
experts, and `exchange` is the program of a device. `parts` has the regions that it is on a mesh, and `replace` puts these into a traced
program, by the rules. `advice` compares the bytes of the two ways, and `served` counts the rounds of an exchange.
"""
