"""The commands `jgt plot` and `jgt compare`: the metrics of runs over time, drawn and compared. Imports no JAX.

Read `runs.py` first: it reads a run directory as curves. `plot.py` draws them as a PNG, `terminal.py` as text, and `compare.py` finds the
differences of two runs.
"""
