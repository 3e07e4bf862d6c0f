"""Measures from a profiler trace how much device time each signal took, and when a device was idle. `jgt.planner` predicts the same.

`events` reads the trace, `overlap` divides the time among kernels that run at once, and `device_time` joins the two with the program's
text (`jgt.planner.hlo`), which contains the signal of each instruction.
"""
