"""`jgt calibrate`: the rates of this machine's devices, as a chip file.

`kernels.py` runs programs of one kind of work each and takes their time, `figures.py` turns the times into the figures of a chip.
"""
