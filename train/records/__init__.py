"""What a run writes about itself, and what a person sees of it while it trains.

Read `progress.py` first: it follows each step from its dispatch until its metrics are logged. It measures with `clock.py`,
writes files through `records.py`, and prints through `console.py`.
"""
