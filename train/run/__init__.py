"""A run from its start to its end, inside its run directory.

Read `train.py` first: a run is a list of objects that are opened, one loop, and an end. In the order in which it uses them, `opened.py` has
the program and the data, `session.py` what a start holds and writes, `start.py` the state to begin from, `compiling.py` the step, `loop.py`
the steps with their saves (`saves.py`), and `end.py` what is said and written at the end. The room `directory` decides whether the run may
use its directory, and whether it continues what is there. `load.py` and `api.py` are for Python: models and runs there. `faults.py` breaks
a run on purpose, and `replay.py` finds out whether the data, the code or the machine is at fault in a step. `check.py` has `jgt check` and
`jgt inspect`, which judge a run before it trains.
"""
