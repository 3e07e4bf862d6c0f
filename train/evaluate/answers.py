"""The answers of one model to the questions of tasks, in a file: an evaluation that was killed goes on where it was.

The file may come from a stranger with the model beside it, and a disk may have changed it. So it is lines of JSON, each with a checksum,
and nothing in it chooses code. If a line is damaged, or belongs to another model, the file is set aside, and the question is asked again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.manifest import sealed
from ..files.disk import write_whole
from ..files.streams import say
from ..journal.rows import read_lines
from ..journal.sink import AppendedFile

_KINDS: Mapping[str, Callable[[object], bool]] = {
    "loglikelihood": lambda answer: isinstance(answer, list) and [*map(type, answer)] == [float, bool],
    "loglikelihood_rolling": lambda answer: isinstance(answer, float),
    "generate_until": lambda answer: isinstance(answer, str),
}
"""The requests of lm-evaluation-harness, and whether something is an answer to one."""


class StoredAnswers:
    """The answers in a file. path: None stores nothing. model: the identity of the model. Raises OSError."""

    def __init__(self, path: Path | None = None, model: str = ""):
        self._model, self._known = model, dict[str, object]()
        self._file = None if path is None else AppendedFile(path)
        if path is not None and os.path.lexists(path):
            self._read(path)

    def __len__(self) -> int:
        return len(self._known)

    def find(self, kind: str, question: Sequence[object]) -> Any:
        """The stored answer to a question; None if there is none."""
        answer = self._known.get(_key(kind, question))
        return answer if _KINDS[kind](answer) else None

    def add(self, kind: str, question: Sequence[object], answer: object) -> None:
        """Stores an answer."""
        if self._file is not None:
            self._file.write(self._line(_key(kind, question), answer))

    def _line(self, key: str, answer: object) -> bytes:
        return json.dumps(sealed({"model": self._model, "question": key, "answer": answer})).encode() + b"\n"

    def _read(self, path: Path) -> None:
        # A link would lead the answers to another file.
        lines = [*read_lines(path)] if path.is_file() and not path.is_symlink() else [(b"\n", None)]
        for _, row in lines:
            if row is not None and row.get("model") == self._model and isinstance(row.get("question"), str) and sealed(row) == row:
                self._known[row["question"]] = row.get("answer")
        # A kill may have cut off the last line.
        if bad := sum(line.endswith(b"\n") and (row is None or row.get("question") not in self._known) for line, row in lines):
            names = (path.with_name(f"{path.name}.broken{n or ''}") for n in itertools.count())
            path.rename(aside := next(name for name in names if not os.path.lexists(name)))
            write_whole(path, b"".join(self._line(key, answer) for key, answer in self._known.items()))
            say(f"{path}: {bad} of {len(lines)} stored answers are damaged, or are another model's. They are computed again; see {aside}")


def _key(kind: str, question: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps([kind, *question], sort_keys=True).encode()).hexdigest()
