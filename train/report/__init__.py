"""`python -m train.report RUN`: where a run's wall time went. Imports neither JAX nor numpy, and of train only this room.

`events.py` reads what each start of the run wrote, `accounts.py` divides wall time among its causes, `stragglers.py` names
the process that the others wait for, and `table.py` prints all of it.
"""
