"""Pipeline schedules as tables of integers: built by name or read from a CSV file, verified, simulated and drawn.

Read `table.py` first: it defines what a schedule is. `schedules.py` has the built-in ones, and turns what a user
writes (a name or a path) into a verified table; `buffers.py` gives the table's values their memory slots. `jgt.pipeline`
runs a table. Nothing here imports JAX, so that `jgt schedule` answers at once and works without devices.
"""
