"""Compiled programs that are stored for later starts, and checked before they run.

A program with one wrong bit may run and compute wrong numbers, or end the process. `sealed.py` writes files that show whether they are
whole. `trial.py` notes which stored programs a start has loaded and not yet tried, so that a program that ends a process is not loaded
again. `programs.py` is the folder of programs; read it first. `jax_cache.py` is its door: it makes JAX use the folder, and is the only
file that depends on the internals of JAX's own cache.
"""
