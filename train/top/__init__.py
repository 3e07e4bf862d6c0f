"""The command `jgt top`: what the processes of a run do at this moment, from the files that they write. Imports neither JAX nor numpy.

`present.py` reads a run as it is now, and `members.py` judges its processes: which are gone, hang or hold the others up. `frame.py` lays
that out for a screen of any size.
"""
