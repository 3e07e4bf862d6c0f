"""The lines of a run's files: who writes them, who reads them back, and what follows from them. Imports neither JAX nor numpy.

`sink.py` appends whole lines, `timeline.py` makes the events of a process, and `status.py` the file with its present. `rows.py` reads lines
back, `events.py` what each start of a run wrote, and `loads.py` the load of experts. `accounts.py` divides wall time among its causes, and
`members.py` judges the processes: which are gone, hang or hold the others up.
"""
