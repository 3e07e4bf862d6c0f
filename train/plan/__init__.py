"""`jgt plan`: what a run will cost, on hardware that need not exist.

`__main__.py` is the command, `make.py` plans one run, `sync.py` its exchanges, and `worker.py` the layouts of a search.
"""
