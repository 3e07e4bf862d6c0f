"""Checkpoints that are either whole or not listed, wherever a run is killed.

`steps.py` is the folder: which steps are finished, and in which order a step gets its name. `manifest.py` is the list of a step's arrays
and files with their checksums. `saved.py` finds the newest whole step and checks that its arrays fit a run. `checkpoint.py` saves and
restores states; it is the only file that uses Orbax. Read `steps.py` first.
"""
