"""Meshes: axis names and sizes → devices. `sizes` is free of JAX; `jgt.make_mesh` is the public door to the rest."""
