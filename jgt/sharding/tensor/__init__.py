"""Tensor parallelism read from a program: which dims belong together, and which of them an axis may split."""
