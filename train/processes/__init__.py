"""The processes of one run: how they join, how they keep watch over each other, and how they end together.

They first meet without JAX (`join.py`). `processes.py` then lets JAX connect them, and compares their input. While they train, `watch.py`
is the thread beside the training thread that handles signals and hangs, by the limits of `config.py`, and `peers.py` carries their
messages. Read `watch.py` first.
"""
