"""The command `jgt metrics`, and the section `metrics:` of a run: a run's numbers for Prometheus.

They are read from the run directory, as by `jgt top`, so a run that nobody asks does nothing for them. `families.py` has the names, and
`endpoint.py` the port.
"""
