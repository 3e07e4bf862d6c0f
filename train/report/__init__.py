"""`jgt report`, `jgt plot`, `jgt compare` and `jgt trace`: what a run's files say about it. Imports neither JAX nor numpy.

`rows.py` reads the metrics, also for other rooms, and `events.py` what each start of the run wrote, from which it finds the straggler.
`accounts.py` divides wall time among its causes, and `table.py` prints it, with the load of experts (`loads.py`). `runs.py` reads runs as
curves, which `plot.py` draws and `compare.py` compares. `status.py` reads what a process has not written yet, and `trace.py` makes a
timeline of everything.
"""
