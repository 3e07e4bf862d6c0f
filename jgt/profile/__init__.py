"""Reads a profiler trace of a compiled program: how much device time each signal took, and when a device had nothing to do.

`events` reads the trace, `overlap` divides the time among kernels that run at once, and `device_time` joins the two with the program's
text (`jgt.hlo`), which knows the signal of each instruction. What `jgt.planner` predicts, this room measures.
"""
