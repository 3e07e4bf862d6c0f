"""Traced programs: the jaxprs that jgt reads and rewrites.

Start with jaxpr.py, which wraps JAX's own classes, and `equations`, which finds and replaces the programs inside one; `tracing` goes from a
function to its program and back, and `places` says where an equation is. On top of them, `parts` cuts a program into pieces that run on
their own, and `dataflow` and `uses` answer questions about its values and its parameters. `constraints` adds shardings and checkpoints,
and `retarget` moves a program to another mesh. `dims` and `scopes` own two small languages: the mesh axes of an array's dims, and the names
that jgt leaves in a compiled program.
"""
