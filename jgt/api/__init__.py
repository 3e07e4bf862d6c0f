"""The functions of jgt that a caller sees first: `shard`, `place` and `init`, in shard.py."""
