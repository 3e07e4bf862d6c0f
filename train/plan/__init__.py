"""`jgt plan`: what a run will cost, on hardware that need not exist.

`__main__.py` is the command, and `request.py` its options. `make.py` plans one run, `advice.py` computes what would help it, `sync.py`
plans its exchanges, and `search.py` looks for a better layout.
"""
