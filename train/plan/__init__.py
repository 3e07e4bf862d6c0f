"""`jgt plan`: what a run will cost, on hardware that need not exist.

`__main__.py` is the command, `make.py` plans one run, `advice.py` says what would help it, and `sync.py` plans its exchanges.
"""
