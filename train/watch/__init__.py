"""`jgt report`, `jgt plot`, `jgt compare`, `jgt trace` and `jgt top`: a run as a person sees it. A wing: the trunk does not import it.

Everything here is computed from `train.journal`. `table.py` prints where wall time went, with the load of experts (`heat_map.py`).
`runs.py` reads runs as curves, which `plot.py` draws and `compare.py` compares. `trace.py` makes a timeline of everything. `top` shows a
run at this moment. Imports neither JAX nor numpy.
"""
