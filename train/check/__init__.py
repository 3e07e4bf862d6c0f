"""`jgt check --config FILE`: compares rules with mesh and shapes in seconds, without devices.

`report.py` has the check, and the dry run of `python -m train --dry-run`, which does the same on the devices and compiles the
step.
"""
