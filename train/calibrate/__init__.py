"""`jgt calibrate`: the times of this machine's devices, as a chip file.

`kernels.py` and `steps.py` run programs and take their time, `fit.py` finds the figures of a chip that explain them.
"""
