"""The proof that a loss may be computed from microbatches: when is f(batch) the sum, or the mean, of f over parts of the batch?

This is the door of the room; import from here only. README.md explains the question, the rules and one example; read it before the files.
"""

from jgt.pipeline.batch.align import align_microbatch
from jgt.pipeline.batch.extent import Extent
from jgt.pipeline.batch.growth import AlignmentError, Feed, Growth
from jgt.pipeline.batch.joined import joined_results, needed_variables
from jgt.pipeline.batch.walk import growth_of

__all__ = [
    "AlignmentError",
    "Extent",
    "Feed",
    "Growth",
    "align_microbatch",
    "growth_of",
    "joined_results",
    "needed_variables",
]
