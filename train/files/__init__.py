"""The ground floor, with `settings`: local disks, object stores, streams, and how a process ends. Imports no JAX and no other room.

`disk.py` writes whole files and explains a disk's errors, `json_text.py` reads JSON, `locks.py` locks files, and `sealed.py` has files that
show whether they are whole. `bucket.py` reads, writes and lists objects of s3:// and gs://, and writes under a condition; `cache.py` keeps
local copies of them. `lease.py` gives a run in a bucket to one writer at a time, and `mirror.py` copies its small files there and back.
`worker.py` does something again and again beside the run, `streams.py` writes lines on stderr, and `ends.py` has the exit codes.
"""
