"""`python -m train.report RUN`: where a run's wall time went, read from the run's own files. Imports neither JAX nor numpy.

`events.py` reads what each start of the run wrote, `accounts.py` divides wall time among its causes, `stragglers.py` names
the process that the others wait for, and `table.py` prints all of it, with the load of experts from `loads.py`. `rows.py` reads
the metrics, also for other commands.
"""
