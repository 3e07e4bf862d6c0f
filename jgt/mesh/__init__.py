"""Meshes: from axis names and sizes to devices.

`sizes.py` checks the numbers without JAX, so that a wrong `mesh:` section is reported at once; `mesh.py` decides which device
goes where. `nvidia.py` silences the plugin of absent GPUs. `jgt.make_mesh` and `jgt.abstract_mesh` are the public doors.
"""
