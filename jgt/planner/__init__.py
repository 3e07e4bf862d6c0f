"""What XLA will do with a function, before anything runs: collectives, memory, FLOPs and time, by signal.

Read `plan.py` first: it compiles a function (`compiled.py`) and calls each reader of the result. `layouts.py`, `flops.py`, `usage.py` and
`formulas.py` read the traced program; `memory.py` and `timeline.py` read XLA's. `signals.py` and `findings.py` join both. `table.py`,
`page.py`, `compare.py` and `budget.py` are what a person sees of a plan; `chip.py` and `described.py` are the hardware to plan for.
"""
