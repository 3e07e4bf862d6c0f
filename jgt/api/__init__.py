"""The functions of jgt that a caller sees first: `shard`, `place` and `init` in shard.py, and `verify` in verify.py.

`verify` compares a layout with one device: `comparison` runs both programs, and `taps` finds the first value that differs.
"""
