"""Values of command-line flags."""

from __future__ import annotations

import argparse


def natural_number(text: str) -> int:
    """A whole number of at least 0. Raises ArgumentTypeError."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {text!r}")
    return int(text)


def whole_number(text: str) -> int:
    """A whole number of at least 1. Raises ArgumentTypeError."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)
