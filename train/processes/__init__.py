"""The processes of one run: how they join, how they keep watch over each other, and how they end together.

`processes.py` joins them and compares their input. While they train, `watch.py` is the thread beside the training thread that handles
signals and hangs, and `peers.py` carries what the processes tell each other. Read `watch.py` first.
"""
