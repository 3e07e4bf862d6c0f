"""Object stores, s3:// and gs://: what a run on them needs beside its local folder.

`bucket.py` reads, writes and lists objects, and writes under a condition. `lease.py` gives a run to one writer at a time. `mirror.py`
copies a run's small files to its bucket and back. Nothing here imports JAX. Checkpoints on a bucket are in `train.checkpoint.objects`. Read
`bucket.py` first.
"""
