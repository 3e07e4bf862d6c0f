"""What XLA says on the process's stderr while it compiles: its warnings have no other way out."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def captured() -> Iterator[list[str]]:
    """Collects the lines that anything writes to file descriptor 2; they are written out again if the block fails."""
    lines: list[str] = []
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        failed = True
        try:
            yield lines
            failed = False
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            text = file.read().decode("utf-8", "replace")
            lines += text.splitlines()
            if failed:
                sys.stderr.write(text)
