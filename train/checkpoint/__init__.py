"""Checkpoints that are either whole or not listed, wherever a run is killed.

`steps.py` is the folder: which steps are finished, and in which order a step gets its name. `manifest.py` is the list of a step's arrays
and files with their checksums, `contents.py` compares the files with it, and `signature.py` proves who wrote it. `saved.py` finds the
newest whole step and checks that its arrays fit a run. `checkpoint.py` saves states, by `files.py` into a folder, and `restore.py` restores
them; `files.py` and `restore.py` alone use Orbax. `pieces.py` reads the arrays of a step by parts, without Orbax and the run's devices.
Read `steps.py` first.
"""
