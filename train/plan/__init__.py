"""`jgt plan`: what a run will cost, on hardware that need not exist. A wing: the trunk does not import it.

`__main__.py` is the command, and `request.py` its options. `make.py` plans one run, `advice.py` computes what would help it, and `sync.py`
plans its exchanges. `search` looks for a better layout, `searching.py` is its command, and `auto.py` does so at the start of a run.
`calibrate` measures the figures of a chip.
"""
