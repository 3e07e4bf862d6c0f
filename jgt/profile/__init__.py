"""What a profiler trace says of a compiled program: device time by signal, and time in which a device had nothing to do."""
