"""The files that a run writes about itself, and the lines that a person sees while it trains.

Read `progress.py` first: it follows each step from its dispatch until its metrics are logged. It measures with `clock.py`, writes files
through `records.py`, and prints through `console.py`.
"""
