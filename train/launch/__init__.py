"""Starts the processes of one run on this machine, watches them, and starts them again when they fail. Needs no JAX.

`__main__.py` is the command, `group.py` the processes that live and die together, and `supervisor.py` starts groups, one after another.
"""
