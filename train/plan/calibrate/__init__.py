"""`jgt calibrate`: times kernels on this machine's devices (`kernels.py`), and derives the figures of a chip from them (`figures.py`)."""
