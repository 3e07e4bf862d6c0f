"""A run from its start to its end, inside its run directory.

`loop.py` is the run: read it first. `folder.py` decides whether the run may use its directory, `start.py` finds the state it starts
from and brings batches to its devices, `sample.py` lets the model write at the end. `faults.py` breaks a run on purpose, and `replay.py`
finds out whether the data, the code or the machine is at fault in a step.
"""
