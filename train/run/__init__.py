"""A run from its start to its end, inside its run directory.

`train.py` opens a run, and `loop.py` goes through its steps: read these first. `folder.py` decides whether the run may use its directory,
`start.py` finds the state it starts from and brings batches to its devices, and `xla.py` sets XLA's flags. `faults.py` breaks a run on
purpose, and `replay.py` finds out whether the data, the code or the machine is at fault in a step.
`check.py` and `verify.py` are `jgt check`, `jgt inspect` and `jgt verify`, which judge a run before it trains.
"""
