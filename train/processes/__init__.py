"""The processes of one run: how they join, how they keep watch over each other, and how they end together.

They first meet without JAX: process 0 opens a door (`door.py`), the others knock at it (`join.py`) and show who they are (`badge.py`), and
nobody waits longer than `waiting.py` allows. `processes.py` then lets JAX connect them, and compares their input. While they train,
`watch.py` is the thread beside the training thread that handles signals and hangs, and `peers.py` carries what the processes tell each
other. Read `watch.py` first.
"""
