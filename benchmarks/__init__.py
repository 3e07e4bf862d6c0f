"""Benchmarks that anyone can repeat. The docstring of each module gives its command."""
