"""`jgt check --show-data`: windows of a run's data as tables of tokens, texts and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jgt.document import InputError, nearest, shown

from ..config import Run
from ..data.batches import Data
from ..data.tokenizer import Tokenizer
from .console import Screen


def data_windows(run: Run, data: Data, count: int, part: str | None) -> Iterator[list[dict[str, object]]]:
    """The first windows that the run trains on, in its order, whatever its mesh: a row of values for each token.

    part: shows held-out windows instead: `count` of this part, or of each part if it is empty. Raises InputError.

    A row has the token's position in the window, its id, its text if there is a tokenizer, its weight in the loss, and the number of its
    document if documents are masked. Nothing predicts the first token of a window, which has no weight. Other samples of the user's own
    have a row for each array.
    """
    config = run.config.data
    if part and part not in data.eval_parts:
        raise InputError([f"command line: --eval {shown(part)}: no data of this name is held out. {nearest(part, data.eval_parts)}"])
    batches = data.train_batches(0, 1, [0], count) if part is None else data.eval_batches(1, [0], count, part=part or None)
    tokenizer = None if config.tokenizer_name is None else data.tokenizer
    for batch in batches:
        row = {name: values[0] for name, values in batch.items()}
        if not row.keys() >= {"inputs", "targets", "weights"}:
            yield _array_rows(row)
            continue
        # A pair of answers is two windows.
        sides = [row] if row["inputs"].ndim == 1 else [{name: values[side] for name, values in row.items()} for side in range(2)]
        yield from (_token_rows(side, tokenizer, data.end) for side in sides)


def _token_rows(row: Mapping[str, np.ndarray], tokenizer: Tokenizer | None, end: int | None) -> list[dict[str, object]]:
    ids = [int(row["inputs"][0]), *map(int, row["targets"])]
    columns: dict[str, list[Any]] = {"position": list(range(len(ids))), "token": ids}
    if tokenizer is not None:
        columns["text"] = [_text(tokenizer, before, token) for before, token in zip([None, *ids[:-1]], ids, strict=True)]
    columns["weight"] = [None, *map(float, row["weights"])]
    if "segments" in row:
        begins = [True, *(np.diff(row["segments"]) != 0), int(row["inputs"][-1]) == end]
        columns["document"] = np.cumsum(begins).tolist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _text(tokenizer: Tokenizer, before: int | None, token: int) -> str:
    """The text that a token adds. A tokenizer may leave out the space in front of a first token."""
    alone = tokenizer.decode([token])
    if before is None:
        return alone
    context, both = tokenizer.decode([before]), tokenizer.decode([before, token])
    return both[len(context) :] if both.startswith(context) else alone


def _array_rows(row: Mapping[str, np.ndarray]) -> list[dict[str, object]]:
    values = {name: np.asarray(x) for name, x in row.items()}
    return [{"array": name, "shape": list(x.shape), "type": str(x.dtype), "begins": x.ravel()[:8].tolist()} for name, x in values.items()]


def print_windows(windows: Iterator[list[dict[str, object]]]) -> None:
    """Prints windows for a person. Texts are quoted, with escapes in place of what a terminal would obey."""
    screen = Screen(enabled=True)
    for number, rows in enumerate(windows, 1):
        cells = [[_cell(name, value) for name, value in row.items()] for row in rows]
        screen.table(f"Window {number}", list(rows[0]), cells, numbers=0)


def _cell(name: str, value: object) -> str:
    # Of another weight than 0 and 1, three digits.
    return "" if value is None else f"{value:.3g}" if name == "weight" else shown(value, 60) if name == "text" else str(value)
