"""`--profile A:B`: records a trace of some steps of a run, and reports device time by signal.

`steps` reads the option and imports no JAX, so that a mistake in it is reported at once; `profiler` does the work in the training loop.
"""
