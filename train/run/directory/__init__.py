"""The run directory: who holds it, what it keeps of the config and the code of each start, and what a later start may not change.

`folder.py` locks it and moves an earlier run out of it, `history.py` writes what describes the run, and `identity.py` compares a config
with that.
"""
