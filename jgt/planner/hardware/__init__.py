"""Hardware that need not exist: chips and their links as data, and how long work takes on them.

The YAML files in `chips/` describe what a chip can do, `chip.py` reads them, and a `target.py` is hosts with such chips. `rates.py` turns a
kernel's work into seconds, and `network.py` the bytes that a group of devices sends.
"""
