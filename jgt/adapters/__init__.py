"""Low-rank updates of the matrices in a traced program (LoRA). Start with `matrices.py`; `evaluate.py` runs the program."""
