"""A wing: the command `jgt doctor`, which examines the machines of a run before it starts.

`machine.py` looks at one machine without JAX, and `devices.py` lets JAX's devices add numbers, in processes that may hang.
"""
