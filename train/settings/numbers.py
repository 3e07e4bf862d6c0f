"""The numbers that keys of a run's file may have. Imports no JAX.

Bounds look generous on purpose: they do not say what is sensible, only where a number is certainly a mistake or would overflow.
"""

from typing import Annotated

from jgt.document import Bound

Count = Annotated[int, Bound(low=1, high=1_000_000_000)]
Natural = Annotated[int, Bound(low=0, high=1_000_000_000)]
MAX_BATCH = 1_000_000
BatchSize = Annotated[int, Bound(low=1, high=MAX_BATCH)]
Positive = Annotated[float, Bound(above=0, high=1e30)]
NotNegative = Annotated[float, Bound(low=0, high=1e30)]
Seconds = Annotated[float, Bound(above=0, high=1_000_000)]
Fraction = Annotated[float, Bound(low=0, high=1)]
