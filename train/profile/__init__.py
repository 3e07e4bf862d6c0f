"""`--profile A:B`: a trace of some steps of a run, and device time by signal."""
