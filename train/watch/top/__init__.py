"""The command `jgt top`: a run at this moment, on the screen and redrawn every second.

`view.py` reads a run as it is now, and `frame.py` lays the frame out.
"""
