"""Text from a model.

`rules.py` lays out what generation keeps, `caching.py` says how a model computes one more token, `programs.py` compiles that, `draw.py`
chooses tokens, `batch.py` runs requests of different lengths together, `text.py` makes text of tokens, and `generate.py` is the door.
"""
