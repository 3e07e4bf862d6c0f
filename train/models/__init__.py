"""Decoders in Flax nnx. They name their signals and know nothing else of jgt, so that they run unsharded anywhere.

Start with `decoder.py`, the model, then `options.py`, in which models differ. A new option is a key there and a few lines where it acts; a
new attention kernel is an object in `kernels.py` and one in `jgt/program/kernels.py`.
"""
