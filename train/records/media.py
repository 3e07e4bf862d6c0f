"""Images and histograms for loggers, made of arrays on the host. Texts are plain strings."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

_COLOURS = {1: 0, 3: 2, 4: 6}
"""PNG's type of colour by the number of channels: grey, RGB, RGBA."""
_BINS = 64


@dataclass(frozen=True, eq=False)
class Image:
    """Pixels, uint8 [height, width, channels], with 1, 3 or 4 channels."""

    pixels: np.ndarray

    @staticmethod
    def of(values: Any) -> Image:
        """The image of an array [height, width] or [height, width, channels], or of a figure of matplotlib.

        Floats are between 0 and 1, and whole numbers between 0 and 255. Raises ValueError for other arrays.
        """
        # Only matplotlib's own canvas can answer, and whoever has a figure has imported it.
        if hasattr(values, "canvas"):
            values.canvas.draw()
            values = values.canvas.buffer_rgba()
        array = np.asarray(values)
        shape = array.shape if array.ndim == 3 else (*array.shape, 1)
        if len(shape) != 3 or shape[2] not in _COLOURS or 0 in shape or array.dtype.kind not in "biuf":
            form = "An image is [height, width] or [height, width, channels] with 1, 3 or 4 channels"
            raise ValueError(f"the image is {array.dtype}{list(array.shape)}. {form}")
        if array.dtype.kind in "bf":
            array = np.round(np.nan_to_num(array.astype(np.float64)) * 255)
        # A copy: the caller's array may be a view of one on the device.
        return Image(np.clip(array, 0, 255).astype(np.uint8).reshape(shape))

    def png(self) -> bytes:
        """The image as a PNG file (https://www.w3.org/TR/png-3)."""
        height, width, channels = self.pixels.shape
        # Each line begins with the number of its filter; 0 is none.
        lines = np.pad(self.pixels.reshape(height, width * channels), ((0, 0), (1, 0)))
        header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
        )


@dataclass(frozen=True, eq=False)
class Histogram:
    """The number of values in each bin. counts [n], edges [n + 1]; total, squares: the sum of the values and of their squares."""

    counts: np.ndarray
    edges: np.ndarray
    total: float
    squares: float

    @staticmethod
    def of(values: object) -> Histogram:
        """The histogram of the finite values of an array. Raises ValueError if it has none."""
        array = np.asarray(values, np.float64).ravel()
        array = array[np.isfinite(array)]
        if not array.size:
            raise ValueError("the histogram has no finite values")
        counts, edges = np.histogram(array, _BINS)
        return Histogram(counts, edges, float(array.sum()), float(np.square(array).sum()))


Medium = Image | Histogram | str
"""A value of a step that is not a number."""
