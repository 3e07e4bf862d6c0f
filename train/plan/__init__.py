"""`jgt plan`: what a run will cost, on hardware that need not exist.

`__main__.py` is the command, and `request.py` its options. `make.py` plans one run, `advice.py` computes what would help it, and `sync.py`
plans its exchanges. `search.py` looks for a better layout, and `auto.py` does so at the start of a run.
"""
