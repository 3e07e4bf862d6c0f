"""Fixed-length windows of a stream: what one row of a batch is made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from train.data.stream import Stream


def num_windows(num_tokens: int, seq: int) -> int:
    """How many windows of seq + 1 tokens fit when each starts at the last token of the one before."""
    return max(num_tokens - 1, 0) // seq


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Window i holds tokens i*seq to (i+1)*seq inclusive, so that every token but the first is a target once."""

    stream: Stream
    seq: int

    def __len__(self) -> int:
        return num_windows(len(self.stream), self.seq)

    def __getitem__(self, index: int) -> np.ndarray:
        """int32 [seq + 1]."""
        start = index * self.seq
        return self.stream.read(start, start + self.seq + 1)
