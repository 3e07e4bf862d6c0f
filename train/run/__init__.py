"""A run from its start to its end, inside its run directory.

`train.py` is a run from its start to its end, and `loop.py` goes through its steps: read these first. `opened.py` has the program and the
data, `session.py` what a start holds and writes, and `start.py` finds the state to begin from. `folder.py` decides whether the run may use
its directory, and `identity.py` whether it continues what is there. `faults.py` breaks a run on purpose, and `replay.py` finds out whether
the data, the code or the machine is at fault in a step. `check.py` has `jgt check` and `jgt inspect`, which judge a run before it trains.
"""
