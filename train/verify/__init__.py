"""`jgt verify FILE`: shows that a run's layout changes no number, at small sizes and on virtual CPU devices.

`small.py` makes the run small; `jgt.api.verify` compares.
"""
