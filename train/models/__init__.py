"""Decoders in Flax nnx. They name their signals and know nothing else of jgt, so that they run unsharded anywhere.

Start with `decoder.py`, the model, then `llama.py`, which is what makes it a Llama. A new kind of model is a file like `llama.py` and a row
of `KINDS` in `config.py`; a new attention kernel is an object in `kernels.py` and one in `jgt/program/kernels.py`.
"""
