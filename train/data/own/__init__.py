"""Data of the user's own: a function that returns samples, by index or as a stream.

Read `source.py`: `open_own` calls the function. `samples.py` has samples with an index, and checks each sample. `shard.py` reads one shard
of a stream and knows how to come back to its place in it, and `streams.py` makes batches of shards. `shipped.py` has functions that need
no code: a dataset of Hugging Face, and tar files (`tars.py`).
"""

from .samples import SampleError
from .shipped import function_of
from .source import OwnSource, open_own

__all__ = ["OwnSource", "SampleError", "function_of", "open_own"]
