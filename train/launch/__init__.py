"""Starts the processes of one run on this machine, watches them, and starts them again. Free of JAX."""
