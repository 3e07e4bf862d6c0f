"""Hardware that need not exist: chips and their links as data, and how long work takes on them.

What a chip can do is in its YAML file (`chips/`). `rates.py` turns work into seconds, `network.py` what a group of devices sends. Nothing
outside of this room knows what connects two devices.
"""
