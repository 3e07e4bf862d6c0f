"""Prints a comparison of two runs as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from jgt.console import count_text, make_console, make_table
from jgt.document import shown

from .compare import Comparison, Difference

_MAX_VALUE = 40


def print_comparison(comparison: Comparison, names: Sequence[str]) -> None:
    """Prints a comparison to stdout. names: of the two runs."""
    console = make_console()
    if comparison.config:
        console.print(
            _table("Config", ["key", *names], [[d.name, *map(_config_text, (d.first, d.second))] for d in comparison.config], texts=3)
        )
    else:
        console.print("Config: no key differs")
    console.print(_table("Results", ["", *names, "change"], [_row(d) for d in comparison.results], texts=1))
    if comparison.losses:
        console.print(_table("Loss", ["step", *names, "change"], [_row(d) for d in comparison.losses], texts=0))
    console.print(Text(comparison.verdict), soft_wrap=True)


def _table(title: str, columns: list[str], rows: list[list[str]], texts: int) -> Any:
    table = make_table(title, columns, texts)
    for row in rows:
        # Text, not str: values may contain brackets, which rich would take for markup.
        table.add_row(*map(Text, row))
    return table


def _row(difference: Difference) -> list[str]:
    change = "" if difference.change is None else f"{difference.change:+.2%}"
    return [difference.name, *map(_figure_text, (difference.first, difference.second)), change]


def _figure_text(value: float | None) -> str:
    if value is None:
        return ""
    return count_text(value) if abs(value) >= 100 else f"{value:.5g}"


def _config_text(value: Any) -> str:
    text = "(none)" if value is None else shown(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."
