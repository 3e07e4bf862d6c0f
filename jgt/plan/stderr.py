"""What XLA says on the process's stderr while it compiles: its warnings have no other way out."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

_SPECIFIC = re.compile(
    r"Involuntary full rematerialization\. The compiler cannot go from sharding (?P<source>\{.*?\}) to (?P<target>\{.*?\}) "
    r"efficiently for HLO operation %?(?P<name>[\w.\-]+) = (?P<shape>\S+) .*?metadata=\{(?P<metadata>.*?)\}"
)
_GENERAL = "Involuntary full rematerialization"


@dataclass(frozen=True, kw_only=True)
class Warning:
    """An involuntary full rematerialization: a tensor made whole on every device to be laid out anew. shape: on one device."""

    shape: str
    before: str
    after: str
    metadata: str


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


def rematerializations(lines: list[str]) -> list[Warning]:
    """The involuntary rematerializations that XLA warned of."""
    found = []
    for line in lines:
        if _GENERAL not in line:
            continue
        match = _SPECIFIC.search(line)
        parts = match.groupdict() if match else {}
        shape, metadata = parts.get("shape", ""), parts.get("metadata", "")
        found.append(Warning(shape=shape, before=parts.get("source", ""), after=parts.get("target", ""), metadata=metadata))
    return list(dict.fromkeys(found))
