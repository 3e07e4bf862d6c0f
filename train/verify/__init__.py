"""`jgt verify`: shows that a run's layout changes no number, by a command or beside a run that trains.

`small.py` makes a run small, `compare.py` compares it with one device and remembers the result, and `background.py` does both in a process
beside the run.
"""
